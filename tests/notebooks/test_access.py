"""Lessons, reports, cards and figures for readers who cannot see them, or not well."""

import re
from types import SimpleNamespace

import access_rules
import ipywidgets
import matplotlib as mpl
import nbformat
import numpy as np
import pytest
from access_rules import (
    WHITE,
    contrast,
    faint_shapes,
    faint_texts,
    faint_words,
    over,
    page_problems,
)
from fake_runs import fake_run, out_of_memory, traced_run
from lesson_files import notebook
from nbformat.v4 import new_output

from labkit import lessons, report
from labkit.check import WIDGET_STATE, check_notebook
from labkit.memory import GIB, Category
from labkit.outcomes import Outcome
from labkit.readable import lacks, mend
from labkit.show import (
    allocation,
    cards,
    curves,
    dots,
    gantt,
    levels,
    parts,
    picture,
    plots,
    predictions,
    timelines,
    widgets,
)
from labkit.show.rich import grid

PAGE = '<html lang="en"><title>A page</title><main>{}</main></html>'
MUTE = "shows a picture without a text for those who cannot see it"


# --- lessons and their report ------------------------------------------------------------------


LESSONS = [lessons.lesson_at(path) for path in sorted(lessons.default_folder().glob("*.ipynb"))]
NAMES = {lesson.name for lesson in LESSONS}


def prose(lesson, **options):
    """A lesson's Markdown as HTML, as the report has it."""
    cells = nbformat.read(lesson.path, as_version=4).cells
    written = [report.markdown(cell.source) for cell in cells if cell.cell_type == "markdown"]
    return mend("".join(written), **options)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.number)
def test_a_lessons_text_has_an_outline_and_links_that_say_where_they_go(lesson):
    page = prose(lesson)
    assert page_problems(PAGE.format(page)) == []
    assert lacks(page) == []


def test_all_lessons_make_one_page_whose_links_lead_somewhere():
    parts = [
        f'<section id="{lesson.name}">{prose(lesson, below=2, lessons=NAMES)}</section>'
        for lesson in LESSONS
    ]
    page = PAGE.format(f"<h1>All</h1><h2>Lessons</h2>{''.join(parts)}")
    assert page_problems(page) == []
    assert page.count("<h3") == len(LESSONS) == 24
    assert page.count('href="#') >= 10
    assert not re.search(r'href="(?!https?://|#)', page)


def test_the_report_is_a_page_in_order(tmp_path):
    nbformat.write(notebook("pass"), tmp_path / "06_saving.ipynb")
    outcomes = [
        Outcome("06", "06_saving", "What does it save?", "passed", notebook="06_saving.ipynb"),
        Outcome("07", "07_more", "What more?", "failed", ("it broke",), 1.0),
    ]
    page = report.report(tmp_path, outcomes).read_text(encoding="utf-8")
    assert page_problems(page) == []
    assert lacks(page) == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("a", "0 headings of level 1; exactly one"),
        ("<h1>a</h1><h1>b</h1>", "2 headings of level 1; exactly one"),
        ("<h1>a</h1><h3>b</h3>", "the heading 'b' of level 3 follows one of level 1"),
        ("<h1>a</h1><h2> </h2>", "a heading of level 2 without words"),
        ("<h1>a</h1>See <a href='https://x.org'>here.</a>",
         "the link to https://x.org says 'here.', not where it goes"),
        ("<h1>a</h1><a href='#b'>part b</a>", "the link 'part b' goes to #b, which is not there"),
        ("<h1 id='a'>a</h1><p id='a'>", "the id 'a' twice"),
        ("<h1>a</h1><main>", "2 main parts; exactly one"),
    ],
)  # fmt: skip
def test_each_rule_for_pages_finds_what_it_is_for(body, problem):
    assert page_problems(PAGE.format(body)) == [problem]


def test_a_page_in_order_has_no_problems():
    body = '<h1>a</h1><h2 id="b">b</h2><a href="#b"><img alt="to part b"></a><h3>c</h3><h2>d</h2>'
    assert page_problems(PAGE.format(body)) == []
    bare = PAGE.format(body).replace(' lang="en"', "").replace("<title>A page</title>", "")
    assert page_problems(bare) == ["no language is set", "no title"]


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
    assert lacks(rich.html) == []
    assert not plt.fignum_exists(figure.number)  # or the notebook would show it again, mute


def test_tables_are_within_the_keyboards_reach_and_have_headings():
    text = grid(["", "peak"], [["plain", "3"]], caption='Peaks & "more"').html
    assert text.startswith('<div tabindex="0" role="group" aria-label="Peaks &amp; &quot;more')
    assert "<td></td>" in text
    assert text.count('scope="col"') == text.count('scope="row"') == 1
    assert lacks(text) == []


def test_what_notebooks_show_is_mended_for_a_page():
    page = mend(
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


def test_contrast_is_that_of_the_guidelines():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#ffffff", "#ffffff") == 1
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)  # just too little
    assert contrast("#767676", "#ffffff") == pytest.approx(4.542, abs=1e-3)  # just enough


def test_the_rule_for_words_reads_inherited_colours():
    page = '<div style="color:#777777"><b>pale</b><br><i style="color:#222222">dark</i></div>'
    assert faint_words(page) == ["'pale': #777777 on #ffffff, 4.48"]
    assert faint_words(page, paper="#000000") == ["'dark': #222222 on #000000, 1.32"]


def every_card():
    verdicts = [
        cards._card(look, verdict, "Title", body="A body", rows=[("Name", "a value")], code="1 + 1")
        for looks in (cards.VERDICTS, cards.OUTCOMES, cards.TONES)
        for verdict, look in looks.items()
    ]
    return [card.html for card in verdicts]


def test_every_card_can_be_read_on_light_and_dark_pages():
    for card in every_card():
        for ink, paper in (("#000000", "#ffffff"), ("#ffffff", "#111111")):
            assert faint_words(card, ink=ink, paper=paper) == []


def test_no_verdict_is_told_by_colour_alone():
    for looks in (cards.VERDICTS, cards.OUTCOMES):
        assert len({look.symbol for look in looks.values()}) == len(looks)
    for name, look in cards.TONES.items():
        assert name in cards._card(look, name, "").html


def test_what_widgets_say_can_be_read(monkeypatch):
    from labkit.show import calculator

    said = SimpleNamespace(message=ipywidgets.HTML())
    for alarm in (False, True):
        widgets.Explorer._tell(said, "It went so.", alarm=alarm)
        assert "It went so." in said.message.value
        assert faint_words(said.message.value, ink="#ffffff", paper="#111111") == []
    source = re.findall(r'"(#[0-9a-f]{6})", "', "\n".join(_lines_of(calculator)))
    assert len(set(source)) >= 4  # fits, does not fit, too close, refused
    for colour in source:
        calculator.Calculator._tell(said, "One line.\nAnother.", colour, "✔")
        assert faint_words(said.message.value, ink="#ffffff", paper="#111111") == []


def _lines_of(module):
    import inspect

    return [line for line in inspect.getsource(module).splitlines() if "#" in line]


# --- figures -----------------------------------------------------------------------------------


def _story():
    return allocation._story(traced_run(), None)


ALL = {category: 1 / len(Category) for category in Category}
SEVEN = [f"number {i}" for i in range(7)]
FIGURES = {
    "bars": lambda: plots.draw_bars([
        fake_run(shares=ALL, reserved_bytes=int(1.2 * GIB), capacity_bytes=2 * GIB),
        fake_run("too large", shares=ALL, oom=out_of_memory(GIB, GIB, int(1.5 * GIB))),
    ]),
    "timeline": lambda: timelines.draw_timeline(traced_run()),
    "lines": lambda: curves.lines(
        {name: {1: i + 1, 2: 2 * i + 3} for i, name in enumerate([*SEVEN, "gradients"])},
        "x", "y", write=str, limit=9,
    ),
    "dots": lambda: dots.dots({name: (i, i * i) for i, name in enumerate(SEVEN)}, "x", "y"),
    "parts": lambda: parts.parts({"bar": dict.fromkeys(SEVEN[:6], 1 << 30)}, title="Parts"),
    "gantt": lambda: gantt.gantt({"chart": {"GPU 0": [
        (kind, i, i + 0.8, "text") for i, kind in enumerate(["forward", "backward", *"abcd"])
    ]}}),
    "levels": lambda: levels.levels(
        {name: np.arange(9.0) for name in SEVEN}, values=np.linspace(0, 9, 99)
    ),
    "segments": lambda: allocation.draw(_story(), _story().moments[:2]),
}  # fmt: skip
PHASES = timelines.PHASE_COLOURS.values()  # strips with words in them, and paler areas below
TINTS = [
    *PHASES,
    *(over((*mpl.colors.to_rgb(colour), 0.45), WHITE) for colour in PHASES),
    gantt._IDLE["facecolor"],
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
    assert lacks(drawn.rich().html) == []


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


def test_hatches_and_outlines_stand_out_from_every_fill():
    for category in Category:
        look = picture.fill(category)
        assert contrast(look["edgecolor"], look["facecolor"]) >= access_rules.DRAWN_CONTRAST
        assert contrast(look["edgecolor"], "white") >= access_rules.DRAWN_CONTRAST


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
