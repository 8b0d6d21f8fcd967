"""The calculator's page as `make app` serves it, driven in a real browser."""

import sys

import browsing
import pytest
from browsing import NARROW, PATIENCE_SECONDS, WIDE, shot

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Where `make app` serves the calculator, with its token."""
    browsing.need("voila")
    folder = tmp_path_factory.mktemp("voila")
    server = f"http://127.0.0.1:{(port := browsing.free_port())}/"
    arguments = [*browsing.recipe("app", "voila"), f"--port={port}"]
    environment = browsing.lesson_environment(folder)
    environment["JUPYTER_PATH"] = str(browsing.ROOT / "page")
    with browsing.serving(
        [sys.executable, "-m", "voila", *arguments],
        answers=f"{server}voila/static/voila.js",
        cwd=browsing.ROOT,
        environment=environment,
        log=folder / "log",
    ):
        yield server + browsing.token(folder / "log")


@pytest.fixture(scope="module")
def calculator(browser, address):
    with browsing.watched(browser) as page:
        page.goto(address)
        page.wait_for_selector("img[alt^=Stacked]")
        yield page


def choose(page, label, value):
    """Set a menu, and wait for the answer: what it says."""
    status = page.locator("div[role=status]")
    before = status.inner_text()
    page.locator(f".widget-dropdown:has(label:text-is('{label}')) select").select_option(
        label=value
    )
    for _ in range(20 * PATIENCE_SECONDS):
        said = status.inner_text()
        if said != before and "Tracing" not in said:
            return said
        page.wait_for_timeout(50)
    raise AssertionError(f"no answer to {label} = {value}; it says {said!r}")


def test_nobody_gets_in_without_the_token(calculator, address):
    answer = calculator.context.browser.new_context().request.get(address.split("?")[0])
    assert "token" in address
    assert answer.status == 403 or "login" in answer.url


def test_the_page_shows_the_calculator_and_no_code(calculator):
    assert calculator.title().startswith("Memory calculator")
    text = calculator.inner_text("body")
    assert "Choose a model, a GPU and how to train" in text
    assert "Part by part" in text
    for absent in ("lab.", "import ", "Exercise", "Traceback"):
        assert absent not in text
    menus = calculator.locator(".widget-dropdown select")
    chosen = [menus.nth(i).evaluate("e => e.selectedIndex") for i in range(menus.count())]
    assert len(chosen) == 8
    assert min(chosen) >= 0, "a menu is blank"
    assert browsing.violations(calculator) == []


def test_a_change_answers_and_a_refusal_keeps_working(calculator):
    figure = calculator.locator("img[alt^=Stacked]")
    before = figure.get_attribute("src")
    assert "It fits" in choose(calculator, "model", "SmolLM2-tiny")
    assert "SmolLM2-tiny" in figure.get_attribute("alt")
    assert figure.get_attribute("src") != before
    assert "no bfloat16 in hardware" in choose(calculator, "card", "T4 (16 GB)")
    shot(calculator, "calculator-refusal")
    assert "NVIDIA T4" in choose(calculator, "precision", "fp32")
    calculator.wait_for_selector("img[alt*='fp32']")


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_is_cut_off_at_any_width(calculator, size):
    calculator.set_viewport_size({"width": size[0], "height": size[1]})
    last = calculator.locator("th:text-is('together')")  # the end of the table is reached
    last.scroll_into_view_if_needed()
    box = last.bounding_box()
    assert 0 <= box["y"] <= size[1] - box["height"]
    for what in ("select", "img"):
        calculator.locator(what).first.scroll_into_view_if_needed()
        shot(calculator, f"calculator-{size[0]}-{what}")
    for part in calculator.locator("img, select, .noUi-handle, div[role=status]").all():
        box = part.bounding_box()
        if box is not None:  # the field for another model is hidden until it is asked for
            assert box["x"] >= 0, part
            assert box["x"] + box["width"] <= size[0] + 1, part
