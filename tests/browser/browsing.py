"""What the browser tests share: servers that end, pages that are watched, screenshots.

A page that is watched remembers what no test asks for but none may have: errors on the console,
errors thrown in the page, and requests to any host other than this machine's own address. After
each test they are looked for on every page that is open (see conftest.py).

Limits: a server of its own is started for each process that runs tests.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from gpumem.processes import descendants, end_group

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 300  # machines that are busy
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-component-update",
    "--no-first-run",
]
EMPTY_PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="117" height="20"/>'
WIDE, NARROW = (1360, 900), (400, 800)
#: Of axe.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
RUN = """([context, off]) => axe.run(context, {
    runOnly: {type: 'tag', values: %s}, rules: off, preload: false, resultTypes: ['violations'],
}).then(found => found.violations.flatMap(rule => rule.nodes.map(
    node => `${rule.id}: ${node.target.join(' ')}: ${node.failureSummary} ${node.html}`)))"""

watches: list["Watch"] = []
"""Of the pages that are open now."""


def chromium() -> str | None:
    """The browser that the system has."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def need(*modules: str) -> None:
    """Skip the test where the browser or a module is missing; in continuous integration, fail."""
    lack = [module for module in ("playwright", *modules) if not importlib.util.find_spec(module)]
    if chromium() is None:
        lack.append("chromium")
    if lack and "CI" in os.environ:
        pytest.fail(f"these tests must run here, and there is no {', no '.join(lack)}")
    if lack:
        pytest.skip(f"there is no {', no '.join(lack)}")


@contextlib.contextmanager
def chromium_started() -> Iterator[Any]:
    """Chromium, without a window."""
    need()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield browser
        browser.close()


# --- servers -----------------------------------------------------------------------------------


def free_port() -> int:
    """A port of the loopback address on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def recipe(target: str, program: str) -> list[str]:
    """The arguments that the Makefile's target gives to a program of the environment."""
    lines = subprocess.run(
        ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.replace("\\\n", " ")
    return re.search(rf"bin/{program} ([^\n]*)", lines)[1].split()


def lesson_environment(folder: Path) -> dict[str, str]:
    """The variables for a server or a command whose own files all go below ``folder``."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    jupyter = {
        f"JUPYTER_{kind.upper()}_DIR": str(folder / kind) for kind in ("config", "runtime", "data")
    }
    return {
        **os.environ,
        **jupyter,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": str(folder / "ipython"),
    }


@contextlib.contextmanager
def serving(
    command: Sequence[str], *, answers: str, cwd: Path, environment: Mapping[str, str], log: Path
) -> Iterator[None]:
    """Start a server that answers at the address ``answers``; afterwards nothing of it is left."""
    with open(log, "wb") as output:
        server = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    started = set()
    try:
        _wait_for(answers, server, log)
        yield
        started = descendants(server)
        server.terminate()  # a server ends its kernels itself, given the time
        server.wait(timeout=PATIENCE_SECONDS)
        _, left = psutil.wait_procs(started, timeout=20)
        assert not left, f"the server ended, and these are left: {left}"
    finally:
        end_group(server, started)


def _wait_for(address: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError) and error.code == 403:
                return  # it is there, and asks for a token
            time.sleep(0.25)
    said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise AssertionError(f"nobody answers at {address}; it ended with {server.poll()}:\n{said}")


def token(log: Path) -> str:
    """What an address of a Jupyter server must end with, as the server logged it."""
    return re.search(r"\?token=\w+", log.read_text(encoding="utf-8"))[0]


# --- pages -------------------------------------------------------------------------------------


class Watch:
    """What a page did that it must not; it may ask for the ``pictures`` elsewhere."""

    def __init__(self, page: Any, pictures: Sequence[str] = ()) -> None:
        self.page = page
        self.problems: list[str] = []
        self._pictures = pictures
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.problems.append(f"thrown: {error}"))
        page.on("request", lambda request: self._asked(request.url))
        page.on("websocket", lambda socket: self._asked(socket.url))

    def _said(self, message: Any) -> None:
        if message.type == "error":
            self.problems.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _asked(self, address: str) -> None:
        parts = urlsplit(address)
        here = parts.scheme in ("data", "blob", "file", "about") or parts.hostname == "127.0.0.1"
        if not here and address not in self._pictures:
            self.problems.append(f"asked another host: {address[:200]}")

    def take(self) -> list[str]:
        """The problems since the last time."""
        if not self.page.is_closed():
            self.page.evaluate("0")  # what waits to be reported is reported before the answer
        problems, self.problems = self.problems, []
        return problems


@contextlib.contextmanager
def watched(
    browser: Any, *, size: tuple[int, int] = WIDE, pictures: Sequence[str] = ()
) -> Iterator[Any]:
    """A new page of its own context; ``pictures`` elsewhere are answered by an empty one."""
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, locale="en-GB")
    for address in pictures:
        context.route(
            address, lambda route: route.fulfill(content_type="image/svg+xml", body=EMPTY_PICTURE)
        )
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE_SECONDS)
    watch = Watch(page, pictures)
    watches.append(watch)
    try:
        yield page
    finally:
        watches.remove(watch)
        context.close()


def violations(page: Any, context: Any = None, *, off: Sequence[str] = ()) -> list[str]:
    """What axe finds on the page, or in the elements of ``context`` only."""
    need("axe_playwright_python")
    from axe_playwright_python.base import AXE_SCRIPT

    page.evaluate(AXE_SCRIPT)
    rules = {rule: {"enabled": False} for rule in off}
    return page.evaluate(RUN % json.dumps(RULES), [context or {"include": ["html"]}, rules])


def hold_page(page: Any, name: str) -> None:
    """Axe finds nothing on the page, and it is no wider than its window; a picture is kept."""
    shot(page, f"{name}-{page.viewport_size['width']}", whole=True)
    assert violations(page) == []
    element = "document.documentElement"
    assert page.evaluate(f"{element}.scrollWidth - {element}.clientWidth") <= 0


def shot(page: Any, name: str, *, whole: bool = False) -> Path:
    """Keep a picture of what the page shows, for people to look at; ``whole``: all of the page."""
    folder = Path(os.environ.get("LABKIT_SCREENSHOTS") or ROOT / "build" / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}.png"
    page.screenshot(path=path, animations="disabled", full_page=whole)
    return path
