"""Lessons, reports, cards and figures for readers who cannot see them, or not well."""

import matplotlib as mpl
import nbformat
import pytest
from bs4 import BeautifulSoup
from lesson_files import notebook
from nbformat.v4 import new_output

from gpumem.figures import cards, drawing, timelines
from labkit.course import report
from labkit.course.check import WIDGET_STATE, check_notebook
from labkit.course.html_parts import NO_ALT, problems, repair
from labkit.exercises import engine
from labkit.lesson import claim_cards, notebooks

TEXT_CONTRAST, DRAWN_CONTRAST = 4.5, 3.0
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
    """The contrast ratio of two colours as matplotlib takes them, from 1 to 21.

    https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio; transparency is left out.
    """
    darker, lighter = sorted(
        sum(
            share * (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
            for share, part in zip((0.2126, 0.7152, 0.0722), mpl.colors.to_rgb(c), strict=True)
        )
        for c in (one, other)
    )
    return (lighter + 0.05) / (darker + 0.05)


def test_verdicts_can_be_read_and_are_not_told_by_colour_alone():
    for looks in (claim_cards.VERDICTS, engine.LOOKS):
        assert len({look.symbol for look in looks.values()}) == len(looks)
    looks = [*claim_cards.VERDICTS.values(), *engine.LOOKS.values(), cards.COOL]
    for colour in ("#1b2430", "#4a5663", *(look.colour for look in looks)):  # texts of a card
        assert contrast(colour, "white") >= TEXT_CONTRAST, colour


def test_texts_outlines_hatches_and_lines_of_figures_stand_out():
    for text in (drawing.INK, drawing.GREY, drawing.ALARM):
        for paper in ("white", *timelines.PHASE_COLOURS.values()):
            assert contrast(text, paper) >= TEXT_CONTRAST, (text, paper)
    edge = drawing.EDGE["edgecolor"]
    for fill in ("white", *(colour for colour, _ in drawing.AREAS.values())):
        assert contrast(edge, fill) >= DRAWN_CONTRAST, fill
    for line in {*drawing.LINE_COLOURS} - {*drawing.PALE}:
        assert contrast(line, "white") >= DRAWN_CONTRAST, line
