"""Contrast in figures, by the Web Content Accessibility Guidelines (WCAG) 2.2: 1.4.3 and 1.4.11."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

TEXT_CONTRAST, DRAWN_CONTRAST = 4.5, 3.0
WHITE = (1.0, 1.0, 1.0, 1.0)

Colour = tuple[float, float, float, float]


# --- contrast ----------------------------------------------------------------------------------


def contrast(one: object, other: object) -> float:
    """The contrast ratio of two colours, from 1 to 21, by WCAG 2.2's own definition.

    https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio; the colours as matplotlib takes them, without
    transparency.
    """
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: object) -> float:
    """https://www.w3.org/TR/WCAG22/#dfn-relative-luminance"""
    parts = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in mpl.colors.to_rgb(colour)
    ]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def over(colour: Colour, paper: object) -> Colour:
    """What is seen of a colour that lets some of the paper through."""
    alpha = colour[3]
    below = mpl.colors.to_rgb(paper)
    mixed = (alpha * c + (1 - alpha) * p for c, p in zip(colour[:3], below, strict=True))
    return (*mixed, 1.0)


# --- figures -----------------------------------------------------------------------------------


def faint_texts(figure: Figure, papers: Sequence[object] = (WHITE,)) -> list[str]:
    """Texts of a drawn figure that do not stand out from what they can be written on.

    Args:
        figure: has been drawn.
        papers: the backgrounds that a text without a box of its own may have.
    """
    faint = []
    for text in figure.findobj(Text):
        if not text.get_text().strip() or not text.get_visible():
            continue
        box = text.get_bbox_patch()
        behind = papers if box is None else [over(box.get_facecolor(), WHITE)]
        least = min(contrast(text.get_color(), paper) for paper in behind)
        if least < TEXT_CONTRAST:
            faint.append(f"{text.get_text()!r} in {text.get_color()}: {least:.2f}")
    return faint


def faint_shapes(figure: Figure, tints: Sequence[object] = ()) -> list[str]:
    """Areas and lines that do not stand out from white paper, by their fill or by their outline.

    Args:
        figure: has been drawn.
        tints: fills that say nothing by themselves: what they mark has words or lines, too.
    """
    grid = {line for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)
            for line in (*axis.get_gridlines(), *axis.get_ticklines())}  # fmt: skip
    frames = {spine for axes in figure.axes for spine in axes.spines.values()}
    own = {axes.patch for axes in figure.axes} | {figure.patch} | frames
    own |= {text.get_bbox_patch() for text in figure.findobj(Text)}
    own |= {legend.get_frame() for legend in figure.findobj(Legend)}
    allowed = {mpl.colors.to_hex(tint) for tint in tints}
    faint = []
    for shape in figure.findobj(lambda artist: isinstance(artist, Patch | Collection)):
        if shape in own or not shape.get_visible():
            continue
        for fill, edge in _looks(shape):
            if mpl.colors.to_hex(fill) in allowed:
                continue
            marks = shape.get_hatch() or np.max(shape.get_linewidth())  # both in the edge's colour
            drawn = [fill, edge] if marks else [fill]
            if max(contrast(each, WHITE) for each in drawn) < DRAWN_CONTRAST:
                faint.append(f"an area in {mpl.colors.to_hex(fill)}")
            elif shape.get_hatch() and contrast(edge, fill) < DRAWN_CONTRAST:
                faint.append(f"a hatch on {mpl.colors.to_hex(fill)}: {contrast(edge, fill):.2f}")
    for line in figure.findobj(Line2D):
        outlined = bool(line.get_path_effects())
        if line in grid or outlined or line.get_linestyle() == "None":
            continue
        if contrast(line.get_color(), WHITE) < DRAWN_CONTRAST:
            faint.append(f"a line in {line.get_color()}")
    return faint


def _looks(shape: Patch | Collection) -> set[tuple[Colour, Colour]]:
    """Fill and edge of each part of a shape, as they are seen on white paper."""
    fills, edges = (
        [over(tuple(colour), WHITE) for colour in np.atleast_2d(colours)] or [WHITE]
        for colours in (shape.get_facecolor(), shape.get_edgecolor())
    )
    count = max(len(fills), len(edges))
    return {(fills[i % len(fills)], edges[i % len(edges)]) for i in range(count)}
