"""The calculator's page as `make app` serves it, driven in a real browser."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("voila")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
         "--disable-component-update", "--no-first-run"]  # fmt: skip
PATIENCE_SECONDS = 120  # machines that are busy

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]


@pytest.fixture(scope="module")
def address():
    """Where the page is served, by the recipe of the Makefile's target."""
    recipe = subprocess.run(
        ["make", "-n", "app"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    arguments = re.search(r"voila (.*)", recipe)[1].split()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [str(ROOT / "page"), os.environ.get("JUPYTER_PATH", "")]
    command = [sys.executable, "-m", "voila", *arguments, f"--port={port}"]
    server = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
             "JUPYTER_PATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    try:
        yield wait_for(f"http://127.0.0.1:{port}/", server)
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_for(url, server):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(url + "voila/static/voila.js", timeout=5):
                return url
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no page at {url}; the server ended with {server.poll()}")


@pytest.fixture(scope="module")
def page(address):
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        page.set_default_timeout(1000 * PATIENCE_SECONDS)
        page.asked = []
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(address)
        page.wait_for_selector("img[alt^=Stacked]")
        yield page
        browser.close()


def choose(page, label, value):
    """Set a menu, and wait for the answer: what it says."""
    status = page.locator("div[role=status]")
    before = status.inner_text()
    page.locator(f".widget-dropdown:has(label:text-is('{label}')) select").select_option(
        label=value
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        said = status.inner_text()
        if said != before and "Tracing" not in said:
            return said
        page.wait_for_timeout(50)
    raise AssertionError(f"no answer to {label} = {value}; it says {said!r}")


def test_the_page_shows_the_calculator_and_no_code(page):
    assert page.title().startswith("Memory calculator")
    text = page.inner_text("body")
    assert "Choose a model, a card and how to train" in text
    assert "Part by part" in text
    for absent in ("lab.", "import ", "Exercise", "Traceback"):
        assert absent not in text


def test_the_end_of_the_table_can_be_scrolled_to(page):
    last = page.locator("th:text-is('together')")
    last.scroll_into_view_if_needed()
    box = last.bounding_box()
    assert 0 <= box["y"] <= page.viewport_size["height"] - box["height"]
    page.locator("#page-head").scroll_into_view_if_needed()


def test_no_menu_is_blank(page):
    menus = page.locator(".widget-dropdown select")
    chosen = [menus.nth(i).evaluate("e => e.selectedIndex") for i in range(menus.count())]
    assert len(chosen) == 8
    assert min(chosen) >= 0


def test_a_change_answers_and_a_refusal_keeps_working(page):
    assert "It fits" in choose(page, "model", "SmolLM2-tiny")
    assert "SmolLM2-tiny" in page.locator("img[alt^=Stacked]").get_attribute("alt")
    assert "no bfloat16 in hardware" in choose(page, "card", "T4 (16 GB)")
    assert "NVIDIA T4" in choose(page, "precision", "fp32")
    page.wait_for_selector("img[alt*='fp32']")


def test_nothing_is_fetched_from_other_hosts(page):
    hosts = {re.match(r"\w+:(//[^/:]*)?", url)[0] for url in page.asked}
    assert hosts <= {"http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:"} | {
        host for host in hosts if host.startswith("blob:")
    }
