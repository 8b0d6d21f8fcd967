"""Every lesson of the course through the real `labkit run`: executed, checked, reported."""

import re

import psutil
import pytest

from labkit import cli, lessons, outcomes
from labkit.memory import GIB

pytestmark = pytest.mark.lessons
LESSONS = [lessons.lesson_at(path) for path in sorted(lessons.default_folder().glob("*.ipynb"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("course")


@pytest.mark.timeout(0)  # each lesson has its own limit
def test_all_lessons_pass(folder, capsys):
    code = cli.main(["run", "--jobs", "2", "--out", str(folder)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    for lesson in LESSONS:
        row = rf"^{lesson.name}\s+passed\s+[\d.]+\s+[\d.]+ [MG]iB$"
        assert re.search(row, printed, re.MULTILINE)
    assert f"Report: {folder.resolve() / 'report.html'}" in printed


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_its_result_is_valid_and_possible(folder, lesson):
    outcome = outcomes.read_outcome(folder / f"{lesson.name}.json")
    result = outcomes.stored_result(outcome, folder)
    assert result is not None
    assert result.broken_invariants() == []
    assert result.lesson == lesson.number
    assert result.parameters.keys() >= {"batch_size", "precision", "seed"}


@pytest.mark.skipif(psutil.virtual_memory().total < 5 * GIB, reason="needs 5 GiB of memory")
def test_where_there_is_memory_lesson_14_trains_all_weights_too(folder):
    [path] = folder.glob("14_*.ipynb")
    [cell] = [cell for cell in lessons.read_notebook(path).cells if cell.id == "14-plot-3"]
    curves = cell.outputs[0].data["text/plain"]
    assert "all weights: from" in curves, curves


def test_the_report_shows_every_lesson_and_fetches_nothing(folder):
    page = (folder / "report.html").read_text(encoding="utf-8")
    for lesson in LESSONS:
        assert f'id="{lesson.name}"' in page
    assert "<script" not in page
    assert not re.search(r"""<link|src=["'](?!data:)|@import|url\((?!data:)""", page)
