"""The explorer of every lesson in real JupyterLab: each knob that it shows changes the answer.

Limits: one knob at a time, the others as they stand at first. Seconds are printed, not judged.
"""

import shutil
import time

import browsing
import pytest
from browsing import ROOT, shot
from jupyterlab_page import LabPage, jupyterlab
from test_jupyterlab import BADGES

from labkit.course.lessons import notebooks_of

pytestmark = [pytest.mark.browser, pytest.mark.nightly]

CALLS = "lab.explore("
CONTROLS = ".widget-slider, .widget-dropdown"
CUT = "e => e.scrollWidth > e.clientWidth + 1"


def explorers():
    """Each lesson that has an explorer, with its cell."""
    for path in notebooks_of(ROOT / "notebooks"):
        for cell in LabPage(None, path).saved()["cells"]:
            if cell["cell_type"] == "code" and CALLS in "".join(cell["source"]):
                yield pytest.param(path, cell["id"], id=path.stem)


class Explorer:
    """What a person sees of an explorer, and does with it."""

    def __init__(self, lesson, id):
        self.lesson, self.page, self.cell = lesson, lesson.page, lesson.cell(id)
        self.controls = self.cell.locator(CONTROLS).all()
        self.status = self.cell.locator("[role=status], [role=alert]")

    def answer(self):
        """Click Run; what is said about the setting, and how long it took."""
        self.lesson.wait()
        before, began = self.status.inner_text(), time.monotonic()
        self.cell.locator("button.widget-button", has_text="Run").click()

        def said():
            text = self.status.inner_text()
            return None if text == before or text.startswith("Running") else text

        return self.lesson.until(said), time.monotonic() - began

    def turn(self, control, number):
        """Choose a control's value by its place; False if it has no such place."""
        select = control.locator("select")
        if select.count():
            if number >= select.locator("option").count():
                return False
            select.select_option(index=number)
            return True
        control.locator(".noUi-handle").focus()
        self.page.keyboard.press("Home")
        read = control.locator(".widget-readout")
        before = None
        for _ in range(number):
            before = read.inner_text()
            self.page.keyboard.press("ArrowRight")
        return before != read.inner_text()

    def place(self, control):
        """Which of its values a control shows."""
        select = control.locator("select")
        if select.count():
            return select.evaluate("e => e.selectedIndex")
        read = control.locator(".widget-readout")
        shown, number = read.inner_text(), 0
        self.turn(control, 0)
        while read.inner_text() != shown:
            number += 1
            self.page.keyboard.press("ArrowRight")
        return number


def finding(said):
    """What is said of a setting, without its name."""
    return said.split(": ", 1)[1]


@pytest.mark.parametrize(("path", "id"), [*explorers()])
def test_each_knob_changes_the_answer_and_no_label_is_cut(browser, tmp_path, path, id):
    copy = tmp_path / "notebooks" / path.name
    copy.parent.mkdir()
    shutil.copy(path, copy)
    with (
        jupyterlab(tmp_path, copy) as address,
        browsing.watched(browser, pictures=BADGES) as page,
    ):
        page.goto(address)
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        lesson = LabPage(page, copy)
        lesson.wait()
        lesson.run_all()
        explorer = Explorer(lesson, id)
        first = finding(explorer.status.inner_text())
        assert explorer.controls
        for control in explorer.controls:
            label = control.locator(".widget-label")
            name = label.inner_text()
            assert not label.evaluate(CUT), f"{name} is cut"
            home = explorer.place(control)
            number, answers = -1, []
            while not any(answer != first for answer in answers):
                number += 1
                if number == home:
                    continue
                assert explorer.turn(control, number), f"{name} changes nothing: {answers}"
                said, seconds = explorer.answer()
                print(f"{seconds:5.1f} s  {said}")
                answers.append(finding(said))
            explorer.turn(control, home)
        shot(page, f"explorer-{path.stem}")
