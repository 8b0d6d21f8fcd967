"""The pages of the site before Sphinx renders them, which warns of a page that no list names."""

import shutil

import course_pages
import pytest
from lesson_files import MACHINE, result
from site_course import EVIL, HOSTILE, PLAIN, write_course

from gpumem.inputs import InputError
from labkit.course.outcomes import Outcome, store
from labkit.lesson import results


@pytest.fixture
def pages(tmp_path):
    """A function that writes the pages of the small course; returns their folder."""
    write_course(tmp_path / "course")

    def write():
        folder = tmp_path / "pages"
        assert course_pages.write_pages(tmp_path / "course", folder) == [PLAIN, HOSTILE]
        return folder

    return write


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
    results.save(result(machine=machine), tmp_path / "recorded" / "h200" / "06.json")
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
        course_pages.write_pages(tmp_path / "none", tmp_path / "pages")
    write_course(tmp_path / "course")
    for name in (PLAIN, HOSTILE):
        (tmp_path / "course" / f"{name}.json").unlink()
    with pytest.raises(InputError, match=r"no lesson in .* has passed"):
        course_pages.write_pages(tmp_path / "course", tmp_path / "pages")
