"""A browser, the servers that it looks at, and the rule that no page may make errors.

Limits: the browser lives as long as a module's tests, not longer: while it does, playwright keeps
an event loop running in this thread, and nothing else here could start one.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browsing
import pytest
from jupyterlab_page import LabPage, LabServer

# The unit tests' helper modules serve these tests too.
sys.path.insert(0, str(browsing.ROOT / "tests" / "unit"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """A test fails on what its pages did that they must not."""
    result = yield
    problems = [problem for watch in browsing.watches for problem in watch.take()]
    assert not problems, "\n".join(problems)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Any:
    """Where a test failed, what its pages showed then is kept."""
    report = yield
    if report.failed:
        for number, watch in enumerate(browsing.watches):
            if not watch.page.is_closed():
                path = browsing.shot(watch.page, f"failed-{item.name}-{number}")
                report.sections.append(("screenshot", str(path)))
    return report


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, without a window."""
    browsing.need()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browsing.chromium(), args=browsing.FLAGS
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that is watched, empty, 1360 × 900."""
    with browsing.watched(browser) as page:
        yield page


@pytest.fixture(scope="session")
def calculator_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where `make app` serves the calculator, with its token."""
    browsing.need("voila")
    folder = tmp_path_factory.mktemp("voila")
    address = f"http://127.0.0.1:{(port := browsing.free_port())}/"
    arguments = [*browsing.recipe("app", "voila"), f"--port={port}"]
    environment = browsing.lesson_environment(folder)
    environment["JUPYTER_PATH"] = str(browsing.ROOT / "page")
    with browsing.serving(
        [sys.executable, "-m", "voila", *arguments],
        answers=f"{address}voila/static/voila.js", cwd=browsing.ROOT, environment=environment,
        log=folder / "log",
    ):  # fmt: skip
        yield re.search(rf"{address}\?token=\w+", (folder / "log").read_text())[0]


@pytest.fixture(scope="module")
def lab_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """JupyterLab as `make lab` starts it, on a copy of the lessons."""
    browsing.need("jupyterlab")
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(
        browsing.ROOT / "notebooks", folder / "notebooks",
        ignore=shutil.ignore_patterns(".ipynb_checkpoints"),
    )  # fmt: skip
    answered = folder / "config/lab/user-settings/@jupyterlab/apputils-extension"
    answered.mkdir(parents=True)  # the question about news, which JupyterLab asks only once
    (answered / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )
    address = f"http://127.0.0.1:{(port := browsing.free_port())}/"
    arguments = [*browsing.recipe("lab", "jupyter"), "--no-browser", f"--ServerApp.port={port}"]
    with browsing.serving(
        [sys.executable, "-m", "jupyter", *arguments],
        answers=f"{address}api", cwd=folder, log=folder / "log",
        environment=browsing.lesson_environment(folder),
    ) as server:  # fmt: skip
        yield LabServer(address, browsing.token_of(server, folder), folder / "notebooks")


@pytest.fixture(scope="module")
def lesson_page(browser: Any, lab_server: LabServer) -> Iterator[LabPage]:
    """Lesson 00 in JupyterLab, all of its cells run on this page; a server for each module."""
    with LabPage.opened(browser, lab_server, "00_start_here.ipynb") as lesson:
        lesson.run_all()
        yield lesson


@pytest.fixture(scope="session")
def lesson_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report that `labkit run 00` writes."""
    browsing.need()
    folder = tmp_path_factory.mktemp("run")
    done = subprocess.run(
        [sys.executable, "-m", "labkit", "run", "00", "--out", str(folder / "course")],
        cwd=browsing.ROOT, env=browsing.lesson_environment(folder), capture_output=True, text=True,
        timeout=3 * browsing.PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return folder / "course" / "report.html"
