"""Lesson 00 in real JupyterLab, as `make lab` starts it: run, explored, answered, survived.

The tests go through the lesson in a learner's order, on one page and one kernel; each leaves
the notebook so that the next can begin.
"""

import browsing
import pytest
from browsing import NARROW, WIDE, shot
from jupyterlab_page import Explorer, lesson_run

pytestmark = pytest.mark.browser

EXPLORER, PREDICTION = "00-explore-2", "00-predict-2"
BATCH_SIZES = [1, 2, 4, 8, 16, 32]  # of the explorer
WIDGETS = ".jupyter-widgets button, .jupyter-widgets input, .jupyter-widgets select, .noUi-handle"
NOT_OURS = [".noUi-handle"]  # a slider's: ipywidgets gives it no name; its label stands beside it
# The only way in which ipywidgets 7 and 8 name a field that has no label of theirs beside it; the
# question that it belongs to stands above it.
NOT_OUR_RULES = ["label-title-only"]


@pytest.fixture(scope="module")
def lesson_page(browser, tmp_path_factory):
    """Lesson 00 in JupyterLab, all of its cells run on this page."""
    lesson = browsing.ROOT / "notebooks" / "00_start_here.ipynb"
    with lesson_run(browser, tmp_path_factory.mktemp("lab"), lesson) as page:
        yield page


def test_all_cells_run_without_an_error(lesson_page):
    counts = lesson_page.counts()
    assert counts == list(range(1, len(counts) + 1))
    code = [cell for cell in lesson_page.saved()["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    for id, name in (("00-setup-2", "machine"), ("00-plot-1", "heartbeat")):
        lesson_page.cell(id)
        shot(lesson_page.page, f"lab-{name}")
    figure = lesson_page.cell("00-plot-1").locator("img")
    assert figure.evaluate("e => e.complete && e.naturalWidth") > 800


def test_what_the_lesson_shows_is_held_to_axe(lesson_page):
    """Its outputs only: JupyterLab's own parts are JupyterLab's."""
    found = []
    for number, cell in enumerate(lesson_page.saved()["cells"]):
        if cell.get("outputs"):
            lesson_page.cell(cell["id"])
            here = f'.jp-Cell[data-windowed-list-index="{number}"] .jp-OutputArea-output'
            context = {"include": [here], "exclude": NOT_OURS}
            found += browsing.violations(lesson_page.page, context, off=NOT_OUR_RULES)
    assert not found, "\n".join(found)


def test_a_prediction_is_refused_then_taken_then_compared(lesson_page):
    cell = lesson_page.cell(PREDICTION)
    field, button = cell.locator("input"), cell.locator("button.widget-button")
    assert field.get_attribute("title") == "Peak of the first training step"
    for typed, says in (("a lot", "is not a number"), ("5", "You predict 5.00 GiB")):
        field.fill(typed)
        button.click()
        cell.locator("[role=status]", has_text=says).wait_for()
    shot(lesson_page.page, "lab-prediction")
    card = lesson_page.rerun("00-experiment-1").inner_text()
    assert "You predicted 5.00 GiB. Simulated for NVIDIA T4:" in card


def setting(cell):
    """What the controls show."""
    return (
        cell.locator(".widget-slider .widget-readout").inner_text(),
        cell.locator(".widget-dropdown select").locator("option:checked").inner_text(),
    )


def explored(lesson_page, batch_size, precision):
    """Run a setting by pointing and clicking; what is said, and the sources of the figures."""
    explorer = Explorer(lesson_page, EXPLORER)
    cell, (slider, menu) = explorer.cell, explorer.controls
    explorer.slide(slider, BATCH_SIZES.index(batch_size))
    menu.locator("select").select_option(label=precision)
    assert setting(cell) == (str(batch_size), precision)
    said = explorer.answer()
    lesson_page.wait()
    lesson_page.bring(slider)
    shot(lesson_page.page, f"lab-explorer-{batch_size}-{precision}")
    images = cell.locator("img").all()
    assert all(image.evaluate("e => e.complete && e.naturalWidth") for image in images)
    return said, {image.get_attribute("src") for image in images}


def test_the_explorer_answers_survives_an_out_of_memory_error_and_answers_again(lesson_page):
    cell = lesson_page.cell(EXPLORER)
    first = set(cell.locator("img").evaluate_all("all => all.map(e => e.src)"))
    said, second = explored(lesson_page, 4, "amp-bf16")
    assert said.startswith("batch_size 4, precision amp-bf16: peak")
    assert "it fits" in said
    assert "batch_size 4, amp-bf16" in cell.locator("img").first.get_attribute("alt")
    said, third = explored(lesson_page, 32, "fp32")
    assert "batch_size 32, precision fp32: out of memory: asked for" in said
    assert "you can continue" in said
    said, last = explored(lesson_page, 2, "bf16")
    assert said.startswith("batch_size 2, precision bf16: peak")
    assert len(first) == len(second) == len(last) == 2
    assert not first & second
    assert not third & last
    assert not cell.locator(".widget-output .jp-OutputArea-output").count()


def test_an_error_in_a_cell_is_shown_and_the_exercise_is_judged_after_it(lesson_page):
    stub = lesson_page.source("00-exercise-4")
    cell = lesson_page.rewrite("00-exercise-4", f"lab.run(train, gpu='t4', no_such=1)\n{stub}")
    assert "InputError: unknown argument of train 'no_such'" in cell.inner_text()
    assert "Traceback" in cell.inner_text()
    for whole, said in (("reserved", "share of reserved memory"), ("peak", "correct")):
        answer = f": return 100 * run.bytes_of('optimizer') / run.{whole}_bytes"
        cell = lesson_page.rewrite("00-exercise-4", stub.replace(": ...", answer))
        assert said in cell.locator(".jp-OutputArea-output").inner_text()
    shot(lesson_page.page, "lab-exercise")


def test_the_widgets_work_without_a_mouse(lesson_page):
    page, keyboard = lesson_page.page, lesson_page.page.keyboard
    explorer = Explorer(lesson_page, EXPLORER)
    cell = explorer.cell
    explorer.slide(explorer.controls[0], BATCH_SIZES.index(8))
    keyboard.press("Tab")  # the number beside the slider, which can be typed over
    keyboard.press("Tab")
    keyboard.press("Home")
    for key in ("Space", "ArrowDown", "Enter"):  # opens the menu, goes down in it, takes it
        keyboard.press(key)
    assert setting(cell) == ("8", "amp-bf16")
    keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "BUTTON"
    lesson_page.wait()  # as a person does: see Explorer.answer
    keyboard.press("Enter")
    said = "batch_size 8, precision amp-bf16: peak"
    cell.locator("[role=status]", has_text=said).wait_for()
    cell = lesson_page.cell("00-predict-3")
    cell.locator("input").focus()
    keyboard.type("0.5")
    keyboard.press("Tab")
    keyboard.press("Space")
    cell.locator("[role=status]", has_text="You predict 512 MiB").wait_for()


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_is_cut_off_at_any_width(lesson_page, size):
    page = lesson_page.page
    page.set_viewport_size({"width": size[0], "height": size[1]})
    if size == NARROW:
        page.keyboard.press("Control+b")  # the list of files makes room
    for id, name in ((PREDICTION, "prediction"), (EXPLORER, "explorer")):
        cell = lesson_page.cell(id)
        lesson_page.bring(cell.locator(".jp-Cell-outputArea"))
        shot(page, f"lab-{name}-{size[0]}")
        out = cell.locator(".jp-Cell-outputArea").bounding_box()
        for part in cell.locator(f"{WIDGETS}, .jupyter-widgets img").all():
            box = part.bounding_box()
            assert box["x"] >= out["x"] - 1, part
            assert box["x"] + box["width"] <= out["x"] + out["width"] + 1, part
