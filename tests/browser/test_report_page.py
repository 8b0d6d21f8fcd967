"""The report of `labkit run`, opened from the disk as a learner opens it."""

import browsing
import pytest
from browsing import NARROW, WIDE, shot, sideways

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module", params=[WIDE, NARROW], ids=["wide", "narrow"])
def report_page(request, browser, lesson_report):
    with browsing.watched(browser, size=request.param) as page:
        page.goto(lesson_report.as_uri())
        yield page


def test_a_lesson_opens_and_closes(report_page):
    lesson, heading = report_page.locator("details").first, report_page.locator("summary").first
    shown = report_page.locator("details h4:visible")
    assert lesson.get_attribute("open") is None
    assert shown.count() == 0
    shot(report_page, f"report-{report_page.viewport_size['width']}-closed")
    heading.focus()
    report_page.keyboard.press("Enter")
    assert lesson.get_attribute("open") is not None
    assert shown.count() > 5
    heading.click()
    assert shown.count() == 0


def test_its_figures_are_drawn_and_its_widgets_explained(report_page):
    report_page.locator("details").first.evaluate("lesson => { lesson.open = true }")
    figures = report_page.locator("details img")
    assert figures.count() >= 4
    for figure in figures.all():
        figure.scroll_into_view_if_needed()
        assert figure.is_visible()
        assert figure.evaluate("e => e.complete && e.naturalWidth") > 800
    assert report_page.locator("text=Interactive: open the notebook to use it.").count() >= 3
    assert report_page.locator("math").count() >= 1
    figures.nth(1).scroll_into_view_if_needed()
    shot(report_page, f"report-{report_page.viewport_size['width']}-figure")


def test_the_page_never_scrolls_sideways(report_page):
    shot(report_page, f"report-{report_page.viewport_size['width']}-whole", whole=True)
    assert sideways(report_page) <= 0
