"""Lesson 00 in real JupyterLab, as `make lab` starts it: run, explored, answered, survived.

The tests go through the lesson in a learner's order, on one page and one kernel; each leaves
the notebook so that the next can begin.
"""

import pytest
from browsing import NARROW, WIDE, shot

pytestmark = pytest.mark.browser

EXPLORER, PREDICTION = "00-explore-2", "00-predict-2"
WIDGETS = ".jupyter-widgets button, .jupyter-widgets input, .jupyter-widgets select, .noUi-handle"


def test_all_cells_run_without_an_error(lesson_page):
    counts = lesson_page.counts()
    assert counts == list(range(counts[0], counts[0] + len(counts)))
    code = [cell for cell in lesson_page.saved()["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    for id, name in (("00-setup-2", "machine"), ("00-plot-1", "heartbeat")):
        lesson_page.cell(id)
        shot(lesson_page.page, f"lab-{name}")
    figure = lesson_page.cell("00-plot-1").locator("img")
    assert figure.evaluate("e => e.complete && e.naturalWidth") > 800


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


def slide(lesson_page, cell, batch_size):
    """Move the slider to a value with the arrow keys."""
    cell.locator(".noUi-handle").focus()
    lesson_page.page.keyboard.press("Home")
    while int(setting(cell)[0]) < batch_size:
        lesson_page.page.keyboard.press("ArrowRight")
    assert setting(cell)[0] == str(batch_size)


def explored(lesson_page, batch_size, precision):
    """Run a setting by pointing and clicking; what is said, and the sources of the figures."""
    cell = lesson_page.cell(EXPLORER)
    slide(lesson_page, cell, batch_size)
    cell.locator(".widget-dropdown select").select_option(label=precision)
    lesson_page.wait()  # as a person does: ipykernel 7.4 may handle a click before the choice
    status = cell.locator("[role=status], [role=alert]")
    before = status.inner_text()
    cell.locator("button.widget-button", has_text="Run").click()

    def answer():
        said = status.inner_text()
        return said if said != before and not said.startswith("Running") else None

    said = lesson_page.until(answer)
    lesson_page.wait()
    images = cell.locator("img").all()
    assert all(image.evaluate("e => e.complete && e.naturalWidth") for image in images)
    return said, [image.get_attribute("src") for image in images]


def test_the_explorer_answers_with_another_figure_and_other_words(lesson_page):
    cell = lesson_page.cell(EXPLORER)
    first = cell.locator("img").evaluate_all("all => all.map(e => e.src)")
    assert len(first) == 2
    said, bars = explored(lesson_page, 4, "amp-bf16")
    assert said.startswith("batch_size 4, precision amp-bf16: peak")
    assert "it fits" in said
    assert len(bars) == 2
    assert not set(bars) & set(first)
    assert "batch_size 4, precision amp-bf16" in cell.locator("img").first.get_attribute("alt")
    lesson_page.bring(cell.locator(".widget-slider"))
    shot(lesson_page.page, "lab-explorer")


def test_an_out_of_memory_error_is_told_and_survived(lesson_page):
    said, bars = explored(lesson_page, 32, "fp32")
    assert "batch_size 32, precision fp32: out of memory: asked for" in said
    assert "you can continue" in said
    lesson_page.bring(lesson_page.cell(EXPLORER).locator(".widget-slider"))
    shot(lesson_page.page, "lab-out-of-memory")
    said, after = explored(lesson_page, 2, "bf16")
    assert said.startswith("batch_size 2, precision bf16: peak")
    assert not set(after) & set(bars)
    assert not lesson_page.cell(EXPLORER).locator(".widget-output .jp-OutputArea-output").count()


def test_an_error_in_a_cell_is_shown_and_the_lesson_goes_on(lesson_page):
    saved = "answer = ...\n\nexercise = lab"
    cell = lesson_page.rewrite(
        "00-exercise-2", saved, f"lab.run(train, gpu='t4', no_such=1)\n{saved}"
    )
    assert "InputError: unknown argument of train 'no_such'" in cell.inner_text()
    assert "Traceback" in cell.inner_text()


@pytest.mark.parametrize(
    ("answer", "verdict", "reason"),
    [
        ('"flops"', "not yet", "A simulated run knows it"),
        ('"seconds_per_step"', "correct", "there is nothing to time"),
    ],
)
def test_an_exercise_is_judged_with_a_reason(lesson_page, answer, verdict, reason):
    cell = lesson_page.rewrite("00-exercise-2", "...", answer)
    card = cell.locator(".jp-OutputArea-output").inner_text()
    assert verdict in card
    assert reason in card
    shot(lesson_page.page, f"lab-exercise-{verdict}")


# --- room ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_is_cut_off_at_any_width(lesson_page, size):
    page = lesson_page.page
    page.set_viewport_size({"width": size[0], "height": size[1]})
    if size == NARROW:
        page.keyboard.press("Control+b")  # the list of files makes room
    try:
        for id, name in ((PREDICTION, "prediction"), (EXPLORER, "explorer")):
            cell = lesson_page.cell(id)
            lesson_page.bring(cell.locator(".jp-Cell-outputArea"))
            shot(page, f"lab-{name}-{size[0]}")
            out = cell.locator(".jp-Cell-outputArea").bounding_box()
            for part in cell.locator(f"{WIDGETS}, .jupyter-widgets img").all():
                box = part.bounding_box()
                assert box["x"] >= out["x"] - 1, part
                assert box["x"] + box["width"] <= out["x"] + out["width"] + 1, part
    finally:
        page.set_viewport_size({"width": WIDE[0], "height": WIDE[1]})
        if size == NARROW:
            page.keyboard.press("Control+b")


# --- the keyboard --------------------------------------------------------------------------------


def test_the_widgets_work_without_a_mouse(lesson_page):
    page, keyboard = lesson_page.page, lesson_page.page.keyboard
    cell = lesson_page.cell(EXPLORER)
    slide(lesson_page, cell, 8)
    keyboard.press("Tab")  # the number beside the slider, which can be typed over
    keyboard.press("Tab")
    keyboard.press("Home")
    for key in ("Space", "ArrowDown", "Enter"):  # opens the menu, goes down in it, takes it
        keyboard.press(key)
    assert setting(cell) == ("8", "amp-bf16")
    for key, says in (("Enter", "batch_size 8, precision amp-bf16: peak"), ("Space", "Cleared")):
        keyboard.press("Tab")
        assert page.evaluate("document.activeElement.tagName") == "BUTTON"
        keyboard.press(key)
        cell.locator("[role=status]", has_text=says).wait_for()
        cell.locator("button.widget-button", has_text="Run").and_(page.locator(":enabled")).focus()
    assert cell.locator("img").count() == 0
    cell = lesson_page.cell("00-predict-3")
    cell.locator("input").focus()
    keyboard.type("0.5")
    keyboard.press("Tab")
    keyboard.press("Space")
    cell.locator("[role=status]", has_text="You predict 512 MiB").wait_for()
