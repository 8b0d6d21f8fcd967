"""What makes a page or a figure readable for everybody, as rules that a program can hold it to.

The rules are success criteria of the Web Content Accessibility Guidelines (WCAG) 2.2, W3C
Recommendation of 12 December 2024: 1.1.1 texts for pictures, 1.3.1 headings and tables, 1.4.3 and
1.4.11 contrast, 2.4.4 links, 3.1.1 language; and one first heading, then no level left out, as
its technique G141 advises.

Limits: whether a text says what its picture shows, a person has to judge.
"""

import re
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser

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
VAGUE = {"", "here", "click here", "this", "this page", "link", "more", "read more", "see"}
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "wbr"}

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


# --- HTML with its styles in it ----------------------------------------------------------------


class _Colours(HTMLParser):
    """Text and background colours of inline styles, as far as they are inherited."""

    def __init__(self, ink: str, paper: str) -> None:
        super().__init__()
        self.open = [("", ink, paper)]
        self.found: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            return
        _, ink, paper = self.open[-1]
        style = dict(attrs).get("style") or ""
        rules = dict(rule.split(":", 1) for rule in style.split(";") if ":" in rule)
        ink, paper = rules.get("color", ink), rules.get("background", paper)
        self.open.append((tag, ink.strip(), paper.strip()))

    def handle_endtag(self, tag: str) -> None:
        while len(self.open) > 1 and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.found.append((data.strip(), *self.open[-1][1:]))


def faint_words(fragment: str, *, ink: str = "#000000", paper: str = "#ffffff") -> list[str]:
    """Words of HTML with inline styles that do not stand out from their background."""
    colours = _Colours(ink, paper)
    colours.feed(fragment)
    return [
        f"{words!r}: {ink} on {paper}, {contrast(ink, paper):.2f}"
        for words, ink, paper in colours.found
        if contrast(ink, paper) < TEXT_CONTRAST
    ]


# --- pages -------------------------------------------------------------------------------------


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[tuple[int, str]] = []
        self.links: list[list[str]] = []
        self._heading = self._link = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if re.fullmatch("h[1-6]", tag):
            self._heading = True
            self.headings.append((int(tag[1]), ""))
        if tag == "a" and given.get("href"):
            self._link = True
            self.links.append([given["href"], given.get("aria-label") or ""])
        if tag == "img" and self._link:
            self.links[-1][1] += given.get("alt") or ""

    def handle_endtag(self, tag: str) -> None:
        if re.fullmatch("h[1-6]", tag):
            self._heading = False
        if tag == "a":
            self._link = False

    def handle_data(self, data: str) -> None:
        if self._heading:
            level, words = self.headings[-1]
            self.headings[-1] = (level, words + data)
        if self._link:
            self.links[-1][1] += data


def page_problems(page: str) -> list[str]:
    """What is wrong with a whole page of HTML, a phrase each."""
    read = _Page()
    read.feed(page)
    found = list(_outline_problems(read.headings))
    names = [tag for tag, _ in read.tags]
    if not dict(read.tags).get("html", {}).get("lang"):
        found.append("no language is set")
    if names.count("main") != 1:
        found.append(f"{names.count('main')} main parts; exactly one")
    if "title" not in names:
        found.append("no title")
    ids = [given["id"] for _, given in read.tags if given.get("id")]
    found += [f"the id {id!r} twice" for id in {id for id in ids if ids.count(id) > 1}]
    for address, words in read.links:
        if " ".join(words.split()).strip(" .:→»").lower() in VAGUE:
            found.append(f"the link to {address} says {words!r}, not where it goes")
        if address.startswith("#") and address[1:] not in ids:
            found.append(f"the link {words!r} goes to {address}, which is not there")
    return found


def _outline_problems(headings: Sequence[tuple[int, str]]) -> Iterator[str]:
    first = [words for level, words in headings if level == 1]
    if len(first) != 1:
        yield f"{len(first)} headings of level 1; exactly one"
    before = 0
    for level, words in headings:
        if level > before + 1:
            yield f"the heading {words!r} of level {level} follows one of level {before}"
        if not words.strip():
            yield f"a heading of level {level} without words"
        before = level
