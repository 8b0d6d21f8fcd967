"""Lessons, reports, cards and figures for readers who cannot see them, or not well."""

import ipywidgets
import matplotlib as mpl
import nbformat
import numpy as np
import pytest
from access_rules import TEXT_CONTRAST, WHITE, contrast, faint_shapes, faint_texts, over
from bs4 import BeautifulSoup
from fake_runs import fake_run, out_of_memory, traced_run
from lesson_files import notebook
from nbformat.v4 import new_output

from labkit.course import lesson_cards, lessons, report
from labkit.course.check import WIDGET_STATE, check_notebook
from labkit.exercises import engine
from labkit.show import (
    allocator_view,
    bars,
    cards,
    gantt,
    lines,
    number_lines,
    picture,
    predictions,
    scatter,
    stacked_bars,
    timelines,
    widgets,
)
from labkit.support.html_access import NO_ALT, problems, repair
from labkit.trace import Category
from labkit.values import GIB

VAGUE = {"", "here", "click here", "this", "this page", "link", "more", "read more", "see"}
MUTE = f"shows {NO_ALT}"


# --- lessons -----------------------------------------------------------------------------------


def test_links_of_lessons_say_where_they_go_and_lead_somewhere():
    course = lessons.find()
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
    monkeypatch.setattr(picture, "display", seen.append)
    figure, axes = plt.subplots()
    axes.set(title="Bars of <what>", xlabel="bytes")
    picture.described(figure, "one: 3; two: 5")
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


# --- colours -----------------------------------------------------------------------------------


def test_verdicts_can_be_read_and_are_not_told_by_colour_alone():
    for looks in (lesson_cards.VERDICTS, engine.OUTCOMES):
        assert len({look.symbol for look in looks.values()}) == len(looks)
    looks = [*lesson_cards.VERDICTS.values(), *engine.OUTCOMES.values(), *cards.TONES.values()]
    for colour in (cards.INK, cards.SOFT, *(look.colour for look in looks)):
        assert contrast(colour, cards.PAPER) >= TEXT_CONTRAST, colour


# --- figures -----------------------------------------------------------------------------------


ALL = {category: 1 / len(Category) for category in Category}
SEVEN = [f"number {i}" for i in range(7)]
FIGURES = {
    "bars": lambda: bars.draw_bars([
        fake_run(shares=ALL, reserved_bytes=int(1.2 * GIB), capacity_bytes=2 * GIB),
        fake_run("too large", shares=ALL, oom=out_of_memory(GIB, GIB, int(1.5 * GIB))),
    ]),
    "timeline": lambda: timelines.draw_timeline(traced_run()),
    "lines": lambda: lines.lines(
        {name: {1: i + 1, 2: 2 * i + 3} for i, name in enumerate([*SEVEN, "gradients"])},
        "x", "y", write=str, limit=9,
    ),
    "dots": lambda: scatter.scatter({name: (i, i * i) for i, name in enumerate(SEVEN)}, "x", "y"),
    "parts": lambda: stacked_bars.stacked_bars(
        {"bar": dict.fromkeys(SEVEN[:6], 1 << 30)}, title="Parts"
    ),
    "gantt": lambda: gantt.gantt({"chart": {"GPU 0": [
        (kind, i, i + 0.8, "text") for i, kind in enumerate(["forward", "backward", *"abcd"])
    ]}}),
    "levels": lambda: number_lines.number_lines(
        {name: np.arange(9.0) for name in SEVEN}, values=np.linspace(0, 9, 99)
    ),
    "segments": lambda: allocator_view.allocator_view(traced_run()).picture,
}  # fmt: skip
PHASES = timelines.PHASE_COLOURS.values()  # strips with words in them, and paler areas below
TINTS = [
    *PHASES,
    *(over((*mpl.colors.to_rgb(colour), 0.45), WHITE) for colour in PHASES),
    gantt.IDLE["facecolor"],
]


@pytest.fixture
def drawn(request, monkeypatch):
    monkeypatch.setattr(picture, "display", lambda rich: None)
    figure = FIGURES[request.param]()
    with mpl.rc_context(picture.STYLE):
        figure.canvas.draw()
    return figure


@pytest.mark.parametrize("drawn", FIGURES, indirect=True)
def test_every_text_shape_and_line_of_a_figure_stands_out(drawn):
    assert faint_texts(drawn, [WHITE, *PHASES]) == []
    assert faint_shapes(drawn, TINTS) == []
    assert drawn.alt
    assert problems(drawn.rich().html) == []


@pytest.mark.parametrize("drawn", ["bars"], indirect=True)
def test_the_rules_for_figures_find_what_they_are_for(drawn):
    axes = drawn.axes[0]
    axes.text(0, 0, "pale", color="#999999")
    axes.barh(0, 1, facecolor="#56B4E9", edgecolor="white")
    axes.barh(0, 1, facecolor="#0072B2", edgecolor="#56B4E9", hatch="//")
    axes.plot([0, 1], [0, 1], color="#E69F00")
    assert faint_texts(drawn) == ["'pale' in #999999: 2.85"]
    assert faint_shapes(drawn, TINTS) == [
        "an area in #56b4e9", "a hatch on #0072b2: 2.25", "a line in #E69F00",
    ]  # fmt: skip


# --- widgets -----------------------------------------------------------------------------------


def controls(widget):
    """What can be operated in a widget."""
    kinds = (ipywidgets.Dropdown, ipywidgets.SelectionSlider, ipywidgets.IntSlider,
             ipywidgets.Text, ipywidgets.Button, ipywidgets.Play, ipywidgets.Checkbox)  # fmt: skip
    found = [widget] if isinstance(widget, kinds) else []
    return found + [each for child in getattr(widget, "children", ()) for each in controls(child)]


def test_every_control_has_a_name(monkeypatch):
    explorer = widgets.Explorer(
        None, None, {"batch_size": [1, 2], "precision": ["fp32", "bf16"], "on": [True, False]}
    )
    prediction = predictions.Prediction("How many?", "GiB", "00-peak")
    found = [*controls(explorer.widget), *controls(prediction.widget)]
    assert len(found) == 7
    for control in found:
        assert control.description or control.tooltip, control
