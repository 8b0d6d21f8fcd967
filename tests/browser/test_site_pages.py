"""The site as Sphinx renders it: complete in itself, still, and searchable from a disk."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

import browsing
import pytest
from browsing import NARROW, WIDE, hold_page, shot
from bs4 import BeautifulSoup
from lesson_files import MACHINE, result
from site_course import HOSTILE, PLAIN, WORD, write_course

from gpumem.inputs import InputError
from labkit.lesson import results

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
    recorded = result(machine={**MACHINE, "name": "NVIDIA H200"})
    results.save(recorded, folder / "recorded" / "h200" / "06.json")
    import make_site  # needs Sphinx

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "result_folders", lambda: [folder / "recorded"])
        assert make_site.make(folder / "course", folder / "out") == 0  # and no warning
    return folder / "out"


@pytest.fixture(scope="module")
def soups(site):
    """All pages, parsed, by path."""
    return {
        path.relative_to(site).as_posix(): BeautifulSoup(path.read_text(), "html.parser")
        for path in site.rglob("*.html")
        if "_downloads" not in path.parts
    }


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
    assert "Executed 2026-01-02 on Test CPU, torch 2.13.0." in article.get_text()


def test_links_lead_to_pages_where_there_are_pages_else_to_the_repository(site, soups):
    to = {link.get_text(): link["href"] for link in soups[LESSON].article.find_all("a")}
    assert to["the first"] == f"{PLAIN}.html"
    assert to["the course"] == "../index.html#lessons"
    assert to["how to train on many"] == "../docs/CLUSTER.html"
    assert to["another lesson"].endswith("/blob/main/notebooks/07_gradient_accumulation.ipynb")
    assert to["Notebook in the repository"].endswith(f"/blob/main/notebooks/{HOSTILE}.ipynb")
    download = site / "notebooks" / to["Download this notebook"]
    assert download.read_bytes() == (browsing.ROOT / "notebooks" / download.name).read_bytes()


def test_another_folder_is_not_replaced(site, tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    import make_site

    with pytest.raises(InputError, match="holds something else than a site"):
        make_site.make(site.parent / "course", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert make_site.main(["--course", str(tmp_path / "none")]) == 2


# --- in a browser --------------------------------------------------------------------------------


def test_no_page_makes_an_error_or_asks_another_host(page, site, soups):
    for name in soups:
        page.goto(f"{site.as_uri()}/{name}")
    assert not list(site.rglob("MathJax*"))


def test_a_word_is_searched_and_its_page_opened(page, site):
    page.goto(f"{site.as_uri()}/index.html")
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
        *("index.html", LESSON, f"search.html?q={WORD}", "verdicts.html"),
        *("results/README.html", "docs/CLOUDS.html"),
    ],
)
def test_a_page_is_held_to_axe_fits_its_window_and_runs_nothing(browser, site, name, size):
    with browsing.watched(browser, size=size) as page:
        page.goto(f"{site.as_uri()}/{name}")
        if "search" in name:
            page.locator("#search-results li a").first.wait_for()
        hold_page(page, f"site-{Path(name).stem}")
        assert page.evaluate("window.owned === undefined")
        pictures = page.locator("article img").evaluate_all(
            "all => all.map(e => e.complete && e.naturalWidth > 0)"
        )
        assert all(pictures)
