"""Pages as people use them who hear them, use the keyboard, or have a small screen: held to axe.

axe-core's rules for WCAG 2.0 to 2.2, levels A and AA, and its best practices, at every impact. Of
JupyterLab only what a lesson shows is looked at.

Limits: axe finds what a program can; it says nothing about what is hard to understand.
"""

import json
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
from browsing import NARROW, WIDE, hold_to_axe, shot, sideways, violations, watched
from fake_runs import fake_run, traced_run
from lesson_files import notebook, result, run
from nbformat.v4 import new_markdown_cell, new_output

from labkit.cheat_sheet import export
from labkit.course import claims, classroom, lesson_cards, report, session, verdicts
from labkit.course.outcomes import Outcome
from labkit.course.results import RESULT_MIME
from labkit.exercises import engine
from labkit.show import bars, cards, timelines

pytestmark = pytest.mark.browser
NOT_OURS = [".noUi-handle"]  # a slider's: ipywidgets gives it no name; its label stands beside it
# The only way in which ipywidgets 7 and 8 name a field that has no label of theirs beside it; the
# question that it belongs to stands above it.
NOT_OUR_RULES = ["label-title-only"]


@pytest.fixture(params=[WIDE, NARROW], ids=["wide", "narrow"])
def sized(request, browser):
    with watched(browser, size=request.param) as page:
        yield page


def open_all(page):
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")


# --- the report --------------------------------------------------------------------------------


def of_html(text):
    return new_output("display_data", data={"text/html": text, "text/plain": "text"})


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    """A report of a notebook that shows everything that lessons show, without running one."""
    folder = tmp_path_factory.mktemp("gallery")
    claim = next(c for c in claims.all_claims().values() if c.unit == "share" and c.needs == "any")
    judgement = verdicts.judge(claim.id, 0.123, "simulated for T4")
    frame = pd.DataFrame({"peak": [1, 2], "a long name of a column" * 4: ["word " * 9] * 2})
    figures = [bars.draw_bars([fake_run(), fake_run("other", 1 << 29)]),
               timelines.draw_timeline(traced_run())]  # fmt: skip
    made = [cards.message_card("A text.\n\nMore.", tone=tone, code="x = 1  # " + "y" * 200)
            for tone in cards.TONES]  # fmt: skip
    made += [lesson_cards.claim_card(judgement)]
    made += [engine.exercise_card(SimpleNamespace(id="06-1", status=status, message="Because."))
             for status in engine.OUTCOMES]  # fmt: skip
    book = notebook("import labkit as lab  # a comment\nx = 'text' if None is not 3.5 else f'{1}'")
    book.cells.insert(1, new_markdown_cell(
        "## Part\n\nA formula: $L \\cdot a$, and one that is wide:\n\n"
        f"$${' + '.join(f'a_{{{i}}}' for i in range(40))}$$\n\n`{'code_' * 30}`\n\n"
        "### Table\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n[lesson 06](06_saving.ipynb)", id="06-md",
    ))  # fmt: skip
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
    open_all(sized)
    hold_to_axe(sized)
    assert sideways(sized) <= 0
    shot(sized, f"gallery-{sized.viewport_size['width']}", whole=True)


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


def test_a_link_to_a_lesson_opens_it(gallery, page):
    page.goto(gallery.as_uri())
    part = page.locator("details").first
    assert part.get_attribute("open") is None
    page.locator("tr a").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("e => e.open", arg=part.element_handle())
    top = page.locator("[id='06_saving']").bounding_box()["y"]
    assert -1 <= top < page.viewport_size["height"]
    assert page.locator("details p a[href='#06_saving']").is_visible()


def test_the_policy_shows_the_page_and_runs_no_script(gallery, browser, tmp_path):
    evil = (
        "<script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">"
        "<a id=evil href=\"javascript:void (document.title = 'ran')\">go</a>"
        "<iframe srcdoc=\"<script>parent.document.title = 'ran'</script>\"></iframe>"
    )
    text = gallery.read_text(encoding="utf-8")
    for name, page_text in (("guarded", text), ("open", text.replace("http-equiv", "data-gone"))):
        path = tmp_path / f"{name}.html"
        path.write_text(page_text.replace("</main>", f"{evil}</main>"), encoding="utf-8")
        page = browser.new_page()  # not watched: what is refused is told on the console
        page.goto(path.as_uri())
        open_all(page)
        page.locator("#evil").click()
        picture = page.locator("details img").first
        assert picture.evaluate("e => e.decode().then(() => e.naturalWidth)") > 800
        card = page.locator("details div[style*='border-left']").first
        assert card.evaluate("e => getComputedStyle(e).borderLeftWidth") == "6px"
        assert (page.title() == "ran") == (name == "open")  # without the policy it runs
        page.close()


def test_the_report_on_paper_shows_the_closed_lessons(gallery, page, tmp_path):
    page.goto(gallery.as_uri())
    page.emulate_media(media="print")
    page.wait_for_function(
        """() => document.querySelector('details:not([open]) img')
            .checkVisibility({contentVisibilityAuto: true, visibilityProperty: true})"""
    )
    page.pdf(path=shot(page, "report-print").with_suffix(".pdf"), format="A4")


# --- the other pages ---------------------------------------------------------------------------


def test_the_cheat_sheet(sized, tmp_path, monkeypatch):
    columns = ("technique", "peak", "when not to")
    rows = (("06 checkpointing", "3 GiB", "Where arithmetic is short. " * 9),) * 3
    made = [export.Section(name, "A note.", columns, rows) for name in ("All of it", "Order")]
    monkeypatch.setattr(export, "sections", lambda sheet: made)
    path = tmp_path / "sheet.html"
    export.write_page(SimpleNamespace(date="2026-11-22T00:00", versions="torch 2"), path)
    sized.goto(path.as_uri())
    hold_to_axe(sized)
    assert sideways(sized) <= 0
    shot(sized, f"cheat-sheet-{sized.viewport_size['width']}")


def test_the_page_of_a_class(sized, tmp_path):
    sent = tmp_path / "sent"
    sent.mkdir()
    claim = next(c for c in claims.of_lesson("06") if c.needs == "any" and c.unit == "share")
    for name, found in (("Ada", 0.38), ("Bob", 0.01), ("Cem", 0.2)):
        entry = session.judgement_record(verdicts.judge(claim.id, found, "simulated for T4"))
        record = result(judgements=(entry,), runs=(run(), run(name="other"))).to_dict()
        (sent / f"{name}.json").write_text(json.dumps(record))
    (sent / "broken.json").write_text("{")
    path = tmp_path / "class.html"
    path.write_text(classroom.page(classroom.gather(sent)))
    sized.goto(path.as_uri())
    hold_to_axe(sized)
    assert sideways(sized) <= 0
    shot(sized, f"class-{sized.viewport_size['width']}")


def test_the_calculators_page(calculator_address, page):
    page.goto(calculator_address)
    page.wait_for_selector("img[alt^=Stacked]")
    hold_to_axe(page)


def test_what_a_lesson_shows_in_jupyterlab(lesson_page):
    """Our outputs only: JupyterLab's own parts are JupyterLab's."""
    found = []
    for number, cell in enumerate(lesson_page.saved()["cells"]):
        if cell.get("outputs"):
            lesson_page.cell(cell["id"])
            here = f'.jp-Cell[data-windowed-list-index="{number}"] .jp-OutputArea-output'
            context = {"include": [here], "exclude": NOT_OURS}
            found += violations(lesson_page.page, context, off=NOT_OUR_RULES)
    assert not found, "\n".join(found)
