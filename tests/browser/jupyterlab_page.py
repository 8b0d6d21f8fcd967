"""A lesson in JupyterLab, used as a person uses it: by its menus, its keyboard and its widgets.

Cells are named by their ids; JupyterLab draws those out of sight only when they come into sight,
so a cell is brought there before it is looked at.

Limits: knows JupyterLab 4.6 by its class names.
"""

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browsing
from browsing import PATIENCE_SECONDS

BADGES = (  # of a lesson's title: the only pictures that it takes from elsewhere
    "https://colab.research.google.com/assets/colab-badge.svg",
    "https://mybinder.org/badge_logo.svg",
)
# Without a kernel the indicator says "idle" as well, and what is run is dropped without a word.
IDLE = """() => document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle'
    && ![...document.querySelectorAll('.jp-KernelName')].some(e => e.innerText === 'No Kernel')
    && ![...document.querySelectorAll('.jp-InputPrompt')].some(e => e.textContent.includes('*'))"""


@contextlib.contextmanager
def jupyterlab(folder: Path, notebook: Path) -> Iterator[str]:
    """Start JupyterLab as `make lab` does, its own files below ``folder``; the notebook's address,
    with its token."""
    browsing.need("jupyterlab")
    answered = folder / "config/lab/user-settings/@jupyterlab/apputils-extension"
    answered.mkdir(parents=True)  # the question about news, which JupyterLab asks only once
    (answered / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )
    server = f"http://127.0.0.1:{(port := browsing.free_port())}/"
    _, _, *options = browsing.recipe("lab", "jupyter")
    options += ["--no-browser", f"--ServerApp.port={port}"]
    with browsing.serving(
        [sys.executable, "-m", "jupyterlab", str(notebook), *options],
        answers=f"{server}api",
        cwd=folder,
        log=folder / "log",
        environment=browsing.lesson_environment(folder),
    ):
        yield f"{server}lab/tree/{notebook.name}{browsing.token(folder / 'log')}"


@contextlib.contextmanager
def lesson_run(browser: Any, folder: Path, lesson: Path) -> Iterator["LabPage"]:
    """A copy of the lesson below ``folder``, open in JupyterLab, all of its cells run."""
    copy = folder / "notebooks" / lesson.name
    copy.parent.mkdir()
    shutil.copy(lesson, copy)
    with jupyterlab(folder, copy) as address, browsing.watched(browser, pictures=BADGES) as page:
        page.goto(address)
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        opened = LabPage(page, copy)
        opened.wait()
        opened.run_all()
        yield opened


class LabPage:
    """One notebook, open in JupyterLab.

    Args:
        page: what playwright calls a page.
        notebook: the file that it shows.
    """

    def __init__(self, page: Any, notebook: Path) -> None:
        self.page, self.notebook = page, notebook
        self.ids = [cell["id"] for cell in self.saved()["cells"]]

    def saved(self) -> dict[str, Any]:
        """The notebook as it is on the disk, once it is whole: JupyterLab writes it in place."""

        def whole() -> dict[str, Any] | None:
            try:
                return json.loads(self.text())
            except json.JSONDecodeError:
                return None

        return self.until(whole)

    def menu(self, menu: str, item: str) -> None:
        """Choose an item of a menu of the bar."""
        for name in (menu, item):
            self.page.get_by_role("menuitem", name=name, exact=True).click()

    def run_all(self) -> None:
        """Run all cells of a notebook that has not run, up to the first error, and save."""
        self.menu("Run", "Run All Cells")
        self.wait()
        self.page.keyboard.press("Control+s")
        self.until(lambda: min(self.counts()) > 0 or '"output_type": "error"' in self.text())

    def text(self) -> str:
        """The notebook's file."""
        return self.notebook.read_text(encoding="utf-8")

    def counts(self) -> list[int]:
        """How many cells the kernel had run with each code cell, as saved; 0 for none."""
        cells = self.saved()["cells"]
        return [cell["execution_count"] or 0 for cell in cells if cell["cell_type"] == "code"]

    def wait(self) -> None:
        """Until the kernel has nothing to do, and for a moment more: it pauses between cells."""
        quiet = 0

        def settled() -> bool:
            nonlocal quiet
            quiet = quiet + 1 if self.page.evaluate(IDLE) else 0
            return quiet > 5

        self.until(settled)

    def until(self, true: Any) -> Any:
        """What ``true()`` gives, once it is something."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if found := true():
                return found
            self.page.wait_for_timeout(100)
        raise AssertionError(f"in {PATIENCE_SECONDS} seconds it did not come true")

    def cell(self, id: str) -> Any:
        """The cell, where it can be seen."""
        cell = self.page.locator(f'.jp-Cell[data-windowed-list-index="{self.ids.index(id)}"]')
        self.bring(cell)
        return cell

    def bring(self, element: Any, *, block: str = "start") -> None:
        """Scroll until the element is in sight and stays: what comes into sight grows."""
        before = None
        for _ in range(50):
            element.evaluate("(e, block) => e.scrollIntoView({block})", block)
            self.page.wait_for_timeout(120)
            box = element.bounding_box()
            if box is not None and box == before:
                return
            before = box
        raise AssertionError(f"{element} does not come to rest")

    def source(self, id: str) -> str:
        """What the cell holds, as saved."""
        return "".join(self.saved()["cells"][self.ids.index(id)]["source"])

    def rewrite(self, id: str, source: str) -> Any:
        """Type over a cell and run it with the keyboard; the cell."""
        self.cell(id).locator(".cm-content").click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(source)
        self.page.keyboard.press("Control+Enter")
        self.wait()
        return self.cell(id)

    def rerun(self, id: str) -> Any:
        """Run a cell again with the keyboard; the cell."""
        cell = self.cell(id)
        cell.locator(".jp-InputArea-prompt").click()
        self.page.keyboard.press("Control+Enter")
        self.wait()
        return self.cell(id)


class Explorer:
    """What a person sees of an explorer, and does with it.

    Args:
        lesson: the page, its cells run.
        id: of the explorer's cell.
    """

    def __init__(self, lesson: LabPage, id: str) -> None:
        self.lesson, self.page, self.cell = lesson, lesson.page, lesson.cell(id)
        self.controls = self.cell.locator(".widget-slider, .widget-dropdown").all()
        self.status = self.cell.locator("[role=status], [role=alert]")

    def answer(self) -> str:
        """Click Run; what is said about the setting."""
        self.lesson.wait()  # as a person does: ipykernel 7.4 may handle a click before the choice
        before = self.status.inner_text()
        self.cell.locator("button.widget-button", has_text="Run").click()

        def said() -> str | None:
            text = self.status.inner_text()
            return None if text == before or text.startswith("Running") else text

        return self.lesson.until(said)

    def slide(self, slider: Any, number: int) -> None:
        """Choose a slider's value by its place."""
        slider.locator(".noUi-handle").focus()
        self.page.keyboard.press("Home")
        for _ in range(number):
            self.page.keyboard.press("ArrowRight")
