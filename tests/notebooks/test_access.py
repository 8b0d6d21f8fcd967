"""Lessons, reports, cards and figures for readers who cannot see them, or not well."""

from collections.abc import Sequence

import matplotlib as mpl
import nbformat
import numpy as np
import pytest
from bs4 import BeautifulSoup
from fake_runs import fake_run, out_of_memory, traced_run
from lesson_files import notebook
from matplotlib.artist import Artist
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from nbformat.v4 import new_output

from gpumem.figures import bars, cards, drawing, segment_map, timelines
from gpumem.trace import Category
from gpumem.units import GIB
from labkit.course import report
from labkit.course.check import WIDGET_STATE, check_notebook
from labkit.course.html_parts import NO_ALT, problems, repair
from labkit.exercises import engine
from labkit.exercises.lesson_02 import crowd
from labkit.figures import lines
from labkit.lesson import claim_cards, notebooks

TEXT_CONTRAST, DRAWN_CONTRAST = 4.5, 3.0
WHITE = (1.0, 1.0, 1.0, 1.0)

Colour = tuple[float, float, float, float]
VAGUE = {"", "here", "click here", "this", "this page", "link", "more", "read more", "see"}
MUTE = f"shows {NO_ALT}"


# --- lessons -----------------------------------------------------------------------------------


def test_links_of_lessons_say_where_they_go_and_lead_somewhere():
    course = notebooks.find()
    parts = []
    for lesson in course:
        cells = nbformat.read(lesson.path, as_version=4).cells
        written = [report.markdown(cell.source) for cell in cells if cell.cell_type == "markdown"]
        part = repair("".join(written), below=2, lessons={each.name for each in course})
        parts.append(f'<section id="{lesson.name}">{part}</section>')
    page = BeautifulSoup("".join(parts), "html.parser")
    assert problems(str(page)) == []
    links = page.find_all("a", href=True)
    assert sum(link["href"].startswith("#") for link in links) >= 10
    for link in links:
        words = link.get_text() + "".join(image.get("alt", "") for image in link.find_all("img"))
        assert words.strip(" .:→»").lower() not in VAGUE, link
        assert link["href"].startswith("https://") or page.find(id=link["href"][1:]), link


# --- what a lesson shows -----------------------------------------------------------------------


def shown(*outputs, state=None):
    """What the checker says of a notebook that showed this, about readers only."""
    book = notebook("pass")
    book.cells[2].outputs = list(outputs)
    if state:
        book.metadata["widgets"] = {WIDGET_STATE: {"state": {"a": state}}}
    return [problem for problem in check_notebook(book) if " shows a " in problem]


def picture_output(**metadata):
    data = {"image/png": "AAAA", "text/plain": "<Figure size 900x320 with 1 Axes>"}
    return new_output("display_data", data=data, metadata=metadata)


def html_output(text):
    return new_output("display_data", data={"text/html": text, "text/plain": ""})


def test_a_picture_without_a_text_fails_its_lesson():
    assert shown(picture_output()) == [f"cell 3 (06-2) {MUTE}"]
    assert shown(html_output('<img src="data:,"> <img alt=" ">')) == [f"cell 3 (06-2) {MUTE}"]
    html_in_widget = {"model_name": "HTMLModel", "state": {"value": "<img>"}}
    assert shown(state=html_in_widget) == [f"a widget {MUTE}"]
    held = {"model_name": "OutputModel", "state": {"outputs": [picture_output()]}}
    assert shown(state=held) == [f"a widget {MUTE}"]
    assert shown(picture_output(**{"image/png": {"alt": "two bars"}})) == []
    assert shown(html_output('<img alt="two bars" src="data:,">')) == []


def test_a_table_without_headings_fails_its_lesson():
    bare = "<table><tr><td>1</td></tr></table>"
    assert shown(html_output(bare)) == ["cell 3 (06-2) shows a table without headings"]
    assert shown(html_output(bare.replace("<table>", '<table role="presentation">'))) == []
    assert shown(html_output(bare.replace("td>", "th>"))) == []


def test_a_figure_of_a_lessons_own_gets_its_words(monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    seen = []
    monkeypatch.setattr(drawing, "display", seen.append)
    figure, axes = plt.subplots()
    axes.set(title="Bars of <what>", xlabel="bytes")
    drawing.described(figure, "one: 3; two: 5")
    [rich] = seen
    assert rich.text == "Bars of <what>. bytes. one: 3; two: 5"
    assert 'alt="Bars of &lt;what&gt;. bytes. one: 3; two: 5"' in rich.html
    assert problems(rich.html) == []
    assert not plt.fignum_exists(figure.number)  # or the notebook would show it again, mute


def test_what_notebooks_show_is_repaired_for_a_page():
    page = repair(
        "<h1>Why?</h1><h2>So</h2><table><tr><th></th><th>a</th></tr></table>"
        '<div style="overflow-x: auto"><table><caption>b</caption></table></div>'
        '<table role="presentation"></table>'
        '<a href="06_more.ipynb">lesson 06</a><a href="../docs/A.md">the docs</a>'
        '<a href="https://x.org/y.ipynb">y</a><a href="#z">z</a><a href="//[">odd</a>'
        '<a href="https://x.org"><img alt="Open elsewhere" src="https://x.org/b.svg"></a>',
        below=2,
        lessons={"06_more"},
    )
    assert page.startswith("<h3>Why?</h3><h4>So</h4>")
    assert page.count("<th>") == page.count("<td>") == 1
    assert page.count('tabindex="0"') == page.count("overflow-x") == 2
    assert 'aria-label="b"' in page
    assert '<a href="#06_more">lesson 06</a>the docs<a href="https://x.org/y.ipynb">' in page
    assert '<a href="#z">z</a>odd<a href="https://x.org">Open elsewhere</a>' in page


# --- contrast, by the Web Content Accessibility Guidelines (WCAG) 2.2: 1.4.3 and 1.4.11 ---------


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
    allowed = {mpl.colors.to_hex(tint) for tint in tints}
    faint = []
    for axes in figure.axes:
        for shape in filter(Artist.get_visible, [*axes.patches, *axes.collections]):
            if isinstance(shape, Collection) and not shape.get_paths():
                continue  # it has nothing to draw
            for fill, edge in _looks(shape):
                if mpl.colors.to_hex(fill) in allowed:
                    continue
                marks = shape.get_hatch() or np.max(shape.get_linewidth())  # in the edge's colour
                drawn = [fill, edge] if marks else [fill]
                if max(contrast(each, WHITE) for each in drawn) < DRAWN_CONTRAST:
                    faint.append(f"an area in {mpl.colors.to_hex(fill)}")
                elif shape.get_hatch() and contrast(edge, fill) < DRAWN_CONTRAST:
                    found = f"{mpl.colors.to_hex(fill)}: {contrast(edge, fill):.2f}"
                    faint.append(f"a hatch on {found}")
        for line in axes.lines:
            bare = line.get_linestyle() != "None" and not line.get_path_effects()  # no outline
            if bare and contrast(line.get_color(), WHITE) < DRAWN_CONTRAST:
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


# --- colours -----------------------------------------------------------------------------------


def test_verdicts_can_be_read_and_are_not_told_by_colour_alone():
    for looks in (claim_cards.VERDICTS, engine.LOOKS):
        assert len({look.symbol for look in looks.values()}) == len(looks)
    looks = [*claim_cards.VERDICTS.values(), *engine.LOOKS.values(), *cards.TONES.values()]
    for colour in ("#1b2430", "#4a5663", *(look.colour for look in looks)):  # texts of a card
        assert contrast(colour, WHITE) >= TEXT_CONTRAST, colour


# --- figures -----------------------------------------------------------------------------------


ALL = {category: 1 / len(Category) for category in Category}
SEVEN = [f"number {i}" for i in range(7)]
FIGURES = {
    "bars": lambda: bars.draw_bars(
        [
            fake_run(shares=ALL, reserved_bytes=int(1.2 * GIB), capacity_bytes=2 * GIB),
            fake_run("too large", shares=ALL, oom=out_of_memory(GIB, GIB, int(1.5 * GIB))),
        ]
    ),
    "timeline": lambda: timelines.draw_timeline(traced_run()),
    "lines": lambda: lines(
        {name: {1: i + 1, 2: 2 * i + 3} for i, name in enumerate([*SEVEN, "gradients"])},
        "x",
        "y",
        write=str,
        limit=9,
    ),
    "parts": lambda: bars.stacked_bars({"bar": dict.fromkeys(SEVEN[:6], 1 << 30)}, title="Parts"),
    "segments": lambda: segment_map.segment_map(
        {"scattered": crowd(range(0, 40, 5)), "neighbours": crowd(range(8))}
    ),
}
PHASES = timelines.PHASE_COLOURS.values()  # strips with words in them, and paler areas below
TINTS = [
    *PHASES,
    *(over((*mpl.colors.to_rgb(colour), 0.45), WHITE) for colour in PHASES),
]


@pytest.fixture
def drawn(request, monkeypatch):
    monkeypatch.setattr(drawing, "display", lambda rich: None)
    figure = FIGURES[request.param]()
    with mpl.rc_context(drawing.STYLE):
        figure.canvas.draw()
    return figure


@pytest.mark.parametrize("drawn", FIGURES, indirect=True)
def test_every_text_shape_and_line_of_a_figure_stands_out(drawn):
    assert faint_texts(drawn, [WHITE, *PHASES]) == []
    assert faint_shapes(drawn, TINTS) == []
    assert drawn.alt
    assert problems(drawn.rich().html) == []
