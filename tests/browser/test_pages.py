"""Pages that labkit writes, for people who hear them, use the keyboard, or have a small screen.

axe-core's rules for WCAG 2.0 to 2.2, levels A and AA, and its best practices, at every impact.

Limits: axe finds what a program can; it says nothing about what is hard to understand.
"""

import json
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
from attacks import ATTACKS, WITNESS
from browsing import NARROW, WIDE, hold_page, violations, watched
from fake_runs import fake_run, phantom_verdict, traced_run
from lesson_files import notebook, result, run
from nbformat.v4 import new_markdown_cell, new_output

from gpumem.figures import bars, cards, timelines
from gpumem.figures.html_pages import POLICY
from labkit.course import report
from labkit.course.outcomes import Outcome
from labkit.exercises import engine
from labkit.lesson import claim_cards, claims, session
from labkit.lesson.results import RESULT_MIME
from phantom_gpu.report_page import page as phantom_page

pytestmark = pytest.mark.browser


@pytest.fixture(params=[WIDE, NARROW], ids=["wide", "narrow"])
def sized(request, browser):
    with watched(browser, size=request.param) as page:
        yield page


# --- the report --------------------------------------------------------------------------------


def of_html(text):
    return new_output("display_data", data={"text/html": text, "text/plain": "text"})


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    """A report of a notebook that shows everything that lessons show, without running one."""
    folder = tmp_path_factory.mktemp("gallery")
    claim = next(c for c in claims.all_claims().values() if c.unit == "share" and c.needs == "any")
    judgement = claims.judge(claim.id, 0.123, "simulated for T4")
    frame = pd.DataFrame({"peak": [1, 2], "a long name of a column" * 4: ["word " * 9] * 2})
    figures = [
        bars.draw_bars([fake_run(), fake_run("other", 1 << 29)]),
        timelines.draw_timeline(traced_run()),
    ]
    made = [
        cards.message_card("A text.\n\nMore.", title="x", look=look, code="x = 1  # " + "y" * 200)
        for look in (cards.GOOD, cards.WARM, cards.COOL, cards.BAD, cards.QUIET)
    ]
    made += [claim_cards.claim_card(judgement)]
    made += [
        engine.exercise_card(SimpleNamespace(id="06-1", status=status, message="Because."))
        for status in engine.LOOKS
    ]
    book = notebook("import labkit as lab  # a comment\nx = 'text' if None is not 3.5 else f'{1}'")
    book.cells.insert(
        1,
        new_markdown_cell(
            "## Part\n\nA formula: $L \\cdot a$, and one that is wide:\n\n"
            f"$${' + '.join(f'a_{{{i}}}' for i in range(40))}$$\n\n`{'code_' * 30}`\n\n"
            "### Table\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n[lesson 06](06_saving.ipynb)",
            id="06-md",
        ),
    )
    code = book.cells[3]
    code.outputs = [of_html(each.rich().html) for each in figures]
    code.outputs += [of_html(card.html) for card in made]
    code.outputs += [of_html(frame.rename_axis("row").to_html())]
    code.outputs += [new_output("stream", name="stdout", text="one line of text " * 12)]
    record = result(judgements=(session.judgement_record(judgement),)).to_dict()
    book.cells[4].outputs = [
        new_output("display_data", data={RESULT_MIME: record, "text/plain": "sum"})
    ]
    nbformat.write(book, folder / "06_saving.ipynb")
    outcomes = [
        Outcome("06", "06_saving", "What does it save?", "passed", notebook="06_saving.ipynb"),
        Outcome("07", "07_more", "What more?", "failed", ("it broke",), 1.0),
    ]
    return report.report(folder, outcomes)


def test_a_report_of_all_that_lessons_show(gallery, sized):
    sized.goto(gallery.as_uri())
    lesson, heading = sized.locator("details").first, sized.locator("summary").first
    shown = sized.locator("details h4:visible")
    assert shown.count() == 0
    heading.focus()
    sized.keyboard.press("Enter")
    assert lesson.get_attribute("open") is not None
    assert shown.count() > 0
    for figure in sized.locator("details img").all():
        assert figure.evaluate("e => e.decode().then(() => e.naturalWidth)") > 800
    card = sized.locator("details div[style*='border-left']").first  # styles of elements count
    assert card.evaluate("e => getComputedStyle(e).borderLeftWidth") == "6px"
    hold_page(sized, "report")


def test_axe_finds_what_it_is_for(gallery, page):
    page.goto(gallery.as_uri())
    page.evaluate(
        """document.body.insertAdjacentHTML('beforeend', '<img src="data:,">'
            + '<p style="color:#999">pale</p><table><tr><th></th></tr></table>')"""
    )
    found = {problem.split(":")[0] for problem in violations(page)}
    assert found >= {"image-alt", "color-contrast", "empty-table-header", "region"}


def test_what_scrolls_is_reached_and_moved_by_keyboard(gallery, page):
    page.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
    page.goto(gallery.as_uri())
    table = page.locator("[role=group][aria-label='Claims on trial']")
    for _ in range(12):
        page.keyboard.press("Tab")
        if table.evaluate("e => e === document.activeElement"):
            break
    assert table.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    page.wait_for_function("e => e.scrollLeft > 0", arg=table.element_handle())


def test_a_link_to_a_lesson_opens_it_and_paper_shows_it_closed(gallery, page):
    page.goto(gallery.as_uri())
    picture = """() => document.querySelector('details:not([open]) img')
        .checkVisibility({contentVisibilityAuto: true, visibilityProperty: true})"""
    assert not page.evaluate(picture)
    page.emulate_media(media="print")
    page.wait_for_function(picture)
    page.emulate_media(media="screen")
    part = page.locator("details").first
    page.locator("tr a").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("e => e.open", arg=part.element_handle())
    top = page.locator("[id='06_saving']").bounding_box()["y"]
    assert -1 <= top < page.viewport_size["height"]
    assert page.locator("details p a[href='#06_saving']").is_visible()


# --- a hostile lesson --------------------------------------------------------------------------


def opened(browser, path):
    """Whether a script of the page ran, and the addresses that the page asked for."""
    page, asked = browser.new_page(), []  # not watched: what is refused is told on the console
    page.route(
        "**/*",
        lambda route: (
            route.continue_()
            if route.request.url == path.as_uri()
            else (asked.append(route.request.url), route.abort())
        ),
    )
    page.goto(path.as_uri())
    page.wait_for_timeout(300)
    ran = page.evaluate("typeof hit !== 'undefined'")
    page.close()
    return ran, [url for url in asked if not url.startswith("data:")]


def test_a_browser_runs_and_fetches_nothing_of_a_hostile_lesson(browser, tmp_path):
    """Neither what is written nor the policy for the browser lets anything through."""
    book = notebook("pass")
    attacks = [*ATTACKS, WITNESS]
    book.cells[2].outputs = [of_html(attack) for attack in attacks]
    book.cells += [new_markdown_cell(attack) for attack in attacks]
    for number, cell in enumerate(book.cells):
        cell["id"] = f"06-{number}"
    nbformat.write(book, tmp_path / "06_saving.ipynb")
    outcome = Outcome(
        "06", "06_saving", ATTACKS[0], "failed", tuple(ATTACKS), 1.0, notebook="06_saving.ipynb"
    )
    path = report.report(tmp_path, [outcome])
    assert opened(browser, path) == (False, [])
    text = path.read_text(encoding="utf-8")
    assert POLICY in text
    path.write_text(text.replace(POLICY, ""), encoding="utf-8")
    assert opened(browser, path) == (False, [])
    raw = text.replace("</main>", "".join(attacks) + "</main>")
    path.write_text(raw, encoding="utf-8")
    assert opened(browser, path) == (False, [])
    path.write_text(raw.replace(POLICY, ""), encoding="utf-8")
    ran, asked = opened(browser, path)
    assert ran
    assert asked


# --- the other pages ---------------------------------------------------------------------------


def test_the_page_of_a_class(sized, tmp_path):
    claim = next(c for c in claims.of_lesson("06") if c.needs == "any" and c.unit == "share")
    for name, found in (("Ada", 0.38), ("Bob", 0.01), ("Cem", 0.2)):
        entry = session.judgement_record(claims.judge(claim.id, found, "simulated for T4"))
        record = result(judgements=(entry,), runs=(run(), run(name="other"))).to_dict()
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    (tmp_path / "broken.json").write_text("{")
    classroom = report.gather(sorted(tmp_path.glob("*.json")))
    path = report.compare(classroom, tmp_path / "class.html")
    sized.goto(path.as_uri())
    hold_page(sized, "class")


def test_the_page_about_a_phantom_run(sized, tmp_path):
    path = tmp_path / "phantom.html"
    verdict = phantom_verdict(ranks=2, text="a_long_name.of_a_module." * 5)
    path.write_text(phantom_page(verdict, command=["labkit", "phantom", "train.py"]))
    for scheme in ("light", "dark"):
        sized.emulate_media(color_scheme=scheme)
        sized.goto(path.as_uri())
        hold_page(sized, f"phantom-{scheme}")
