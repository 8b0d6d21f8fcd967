"""The pages of the site before Sphinx renders them; how the site is built and published."""

import re
import shutil
from dataclasses import replace

import nbformat
import pytest

from labkit.cheat_sheet import export
from labkit.course import results
from labkit.course.outcomes import Outcome, store
from labkit.values import InputError
from tests.unit.lesson_files import MACHINE, result
from tests.unit.site_course import (
    EVIL,
    HOSTILE,
    PLAIN,
    ROOT,
    SECTION,
    SHEET,
    site_modules,
    write_course,
)

with site_modules():
    import course_pages


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A function that writes the pages of the small course; returns their folder."""
    monkeypatch.setattr(export, "sections", lambda sheet: (SECTION,))
    write_course(tmp_path / "course")

    def write():
        folder = tmp_path / "pages"
        assert course_pages.write_pages(tmp_path / "course", folder, SHEET) == [PLAIN, HOSTILE]
        return folder

    return write


def test_every_markdown_file_for_people_is_a_page_that_the_sidebar_lists(pages):
    folder = pages()
    home = (folder / "index.md").read_text()
    listed = set(re.findall(r"^(?:.* <)?([\w/.-]+)>?$", home[home.index("```{toctree}") :], re.M))
    there = {path.relative_to(folder).with_suffix("").as_posix()
             for path in [*folder.rglob("*.md"), *folder.glob("notebooks/*.ipynb")]}  # fmt: skip
    assert there - {"index"} == listed & there
    assert listed >= {"docs/CLUSTER", "CHANGELOG", "verdicts", "cheat-sheet", f"notebooks/{PLAIN}"}
    assert f"06 Gradient checkpointing <notebooks/{HOSTILE}>" in home
    assert home.startswith((ROOT / "README.md").read_text()[:500])


def test_a_lesson_keeps_what_can_be_shown_and_says_where_it_ran(pages):
    book = nbformat.read(pages() / "notebooks" / f"{HOSTILE}.ipynb", as_version=4)
    assert book.cells[0].source.startswith("# 06 Gradient checkpointing: How much?\n")
    assert "Executed 2026-01-02 on Test CPU, torch 2.13.0." in book.cells[1].source
    assert f"blob/main/notebooks/{HOSTILE}.ipynb" in book.cells[1].source
    kinds = {kind for cell in book.cells for out in cell.get("outputs", [])
             for kind in out.get("data", {})}  # fmt: skip
    assert kinds == {"text/html", "text/plain"}
    assert set(book.metadata) == {"language_info"}
    [drawn] = [cell for cell in book.cells if cell.source == "draw()"]
    assert "held by a widget" in str(drawn.outputs)
    assert "the course](../index.md#lessons)" in str(book.cells)
    download = pages() / "downloads" / f"{HOSTILE}.ipynb"
    assert download.read_bytes() == (ROOT / "notebooks" / download.name).read_bytes()


def test_a_notebook_of_ones_own_has_no_page(pages, tmp_path):
    course = tmp_path / "course"
    shutil.copy(course / f"{PLAIN}.ipynb", course / "partial")
    store(Outcome("", "mine", "Mine", "passed"), course / "partial", course)
    folder = pages()
    assert not (folder / "notebooks" / "mine.ipynb").exists()
    assert "mine" not in (folder / "index.md").read_text().split()


def test_where_nobody_has_recorded_it_says_so(pages, monkeypatch, tmp_path):
    monkeypatch.setattr(results, "result_folders", lambda: [tmp_path / "none"])
    folder = pages()
    for page in ("results/README.md", "verdicts.md"):
        text = (folder / page).read_text()
        assert "No GPU has recorded yet: yours can be the first." in text
        assert "CONTRIBUTING.md#add-your-gpu" in text


def test_a_recorded_gpu_is_shown_by_name_versions_and_date(pages, monkeypatch, tmp_path):
    machine = {**MACHINE, "name": f"NVIDIA {EVIL}", "versions": {"driver": "580.1"}}
    results.save(replace(result(), machine=machine), tmp_path / "recorded" / "h200" / "06.json")
    monkeypatch.setattr(results, "result_folders", lambda: [tmp_path / "recorded"])
    folder = pages()
    text = (folder / "results/README.md").read_text()
    assert "NVIDIA &lt;script&gt;" in text
    assert "driver 580.1" in text
    assert "2026-01-02" in text
    assert "<script" not in text + (folder / "verdicts.md").read_text()
    assert "### h200" in (folder / "verdicts.md").read_text()


def test_a_run_without_a_lesson_that_passed_makes_no_site(tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        course_pages.write_pages(tmp_path / "none", tmp_path / "pages", SHEET)
    write_course(tmp_path / "course")
    for name in (PLAIN, HOSTILE):
        (tmp_path / "course" / f"{name}.json").unlink()
    with pytest.raises(InputError, match=r"no lesson in .* has passed"):
        course_pages.write_pages(tmp_path / "course", tmp_path / "pages", SHEET)
