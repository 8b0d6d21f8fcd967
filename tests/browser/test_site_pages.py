"""The site as Sphinx renders it: complete in itself, still, and searchable from a disk."""

import functools
import http.server
import re
import threading
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browsing
import pytest
from browsing import NARROW, WIDE, hold_to_axe, shot
from bs4 import BeautifulSoup

from labkit.cheat_sheet import export
from labkit.course import results
from labkit.values import InputError
from tests.unit.lesson_files import MACHINE, result
from tests.unit.site_course import HOSTILE, PLAIN, SECTION, SHEET, WORD, site_modules, write_course

pytestmark = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore:'myst_parser"),  # what Sphinx 11 will take away
]
LESSON = f"notebooks/{HOSTILE}.html"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a site of two lessons, and of one GPU that has recorded."""
    browsing.need("sphinx", "myst_nb", "furo")
    folder = tmp_path_factory.mktemp("site")
    write_course(folder / "course")
    recorded = replace(result(), machine={**MACHINE, "name": "NVIDIA H200"})
    results.save(recorded, folder / "recorded" / "h200" / "06.json")
    with site_modules(), pytest.MonkeyPatch.context() as patch:
        import make_site

        patch.setattr(export, "sections", lambda sheet: (SECTION,))
        patch.setattr(results, "result_folders", lambda: [folder / "recorded"])
        assert make_site.make(folder / "course", folder / "out", SHEET) == 0  # and no warning
    return folder / "out"


@pytest.fixture(scope="module")
def soups(site):
    """All pages, parsed, by path."""
    return {path.relative_to(site).as_posix(): BeautifulSoup(path.read_text(), "html.parser")
            for path in site.rglob("*.html") if "_downloads" not in path.parts}  # fmt: skip


# --- without a browser ---------------------------------------------------------------------------


def test_every_link_inside_the_site_leads_to_something(site, soups):
    broken, seen = [], 0
    for name, soup in soups.items():
        for tag in soup.find_all(href=True) + soup.find_all(src=True):
            address = urlsplit(tag.get("href") or tag.get("src"))
            if address.scheme or address.netloc:
                continue
            seen += 1
            target = (site / name).parent / unquote(address.path) if address.path else site / name
            if not target.exists():
                broken.append(f"{name}: {tag.get('href') or tag.get('src')}")
            elif address.fragment and target.suffix == ".html":
                page = soups[target.resolve().relative_to(site).as_posix()]
                if address.fragment != "" and not page.find(id=unquote(address.fragment)):
                    broken.append(f"{name}: no part {address.fragment} in {address.path}")
    assert broken == []
    assert seen > 500


def test_nothing_is_fetched_from_elsewhere(site, soups):
    for soup in soups.values():
        for tag in soup.find_all(["script", "img", "iframe", "link", "source", "object", "embed"]):
            for name in ("src", "srcset", "data"):
                assert "//" not in tag.get(name, "") or tag[name].startswith("data:"), tag
            if tag.name == "link":
                assert "//" not in tag["href"], tag
    for sheet in site.rglob("*.css"):
        text = sheet.read_text()
        assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//", text), sheet
    assert not list(site.rglob("MathJax*"))


def test_a_lesson_shows_what_it_displayed_and_runs_nothing_of_it(soups):
    page = soups[LESSON]
    article = page.find("article")
    assert article.find("script") is None
    assert "elsewhere.example" not in str(article)
    assert not any(name.startswith("on") for tag in article.find_all(True) for name in tag.attrs)
    assert article.find("img", alt="Two bars")["src"].startswith("data:image/png")
    assert "held by a widget" in article.get_text()
    assert len(article.find_all("math")) == 2
    assert {tag.parent.get("tabindex") for tag in article.find_all("math", display="block")} == {
        "0"
    }
    assert all(tag.get("tabindex") == "0" for tag in article.find_all("pre"))
    assert {tag["aria-level"] for tag in page.find_all(role="heading")} == {"2"}
    assert article.h1.get_text().startswith("06 Gradient checkpointing: How much?")
    badge = article.find("a", string="Open in Colab")
    assert badge["href"] == "https://colab.example/lesson"


def test_links_lead_to_pages_where_there_are_pages_else_to_the_repository(soups):
    to = {link.get_text(): link["href"] for link in soups[LESSON].article.find_all("a")}
    assert to["the first"] == f"{PLAIN}.html"
    assert to["the course"] == "../index.html#lessons"
    assert to["how to train on many"] == "../docs/CLUSTER.html"
    assert to["another lesson"].endswith("/blob/main/notebooks/07_gradient_accumulation.ipynb")
    assert to["Notebook in the repository"].endswith(f"/blob/main/notebooks/{HOSTILE}.ipynb")
    assert Path(to["Download this notebook"]).name == f"{HOSTILE}.ipynb"


def test_another_folder_is_not_replaced(site, tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with site_modules():
        import make_site
    with pytest.raises(InputError, match="holds something else than a site"):
        make_site.make(site.parent / "course", tmp_path, SHEET)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert make_site.main(["--course", str(tmp_path / "none")]) == 2


# --- in a browser --------------------------------------------------------------------------------


@pytest.fixture(params=["disk", "server"])
def home(request, site):
    """The address of the home page."""
    if request.param == "disk":
        yield (site / "index.html").as_uri()
        return
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    handler = functools.partial(quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()
        thread.join()


def test_a_word_is_searched_and_its_page_opened(page, home):
    page.goto(home)
    page.get_by_role("textbox", name="Search").first.fill(WORD)
    page.keyboard.press("Enter")
    found = page.locator("#search-results li a")
    found.first.wait_for()
    assert found.count() == 1
    shot(page, "site-search")
    found.first.click()
    page.wait_for_url(f"**/{LESSON}*")
    assert WORD in page.locator("article").inner_text()


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize(
    "name",
    [
        *("index.html", LESSON, f"search.html?q={WORD}", "verdicts.html", "cheat-sheet.html"),
        *("results/README.html", "docs/CLOUDS.html"),
    ],
)
def test_a_page_is_held_to_axe_fits_its_window_and_runs_nothing(browser, site, name, size):
    with browsing.watched(browser, size=size) as page:
        page.goto(f"{site.as_uri()}/{name}")
        if "search" in name:
            page.locator("#search-results li a").first.wait_for()
        hold_to_axe(page)
        shot(page, f"site-{Path(name).stem}-{size[0]}")
        assert browsing.sideways(page) <= 0
        assert page.evaluate("window.owned === undefined")
        pictures = page.locator("article img").evaluate_all(
            "all => all.map(e => e.complete && e.naturalWidth > 0)"
        )
        assert all(pictures)
