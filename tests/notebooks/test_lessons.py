"""Every lesson of the course through the real `labkit run`: executed, checked, reported."""

import re

import pytest

from labkit import cli, lessons, outcomes

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


def test_the_report_shows_every_lesson_and_fetches_nothing(folder):
    page = (folder / "report.html").read_text(encoding="utf-8")
    for lesson in LESSONS:
        assert f'id="{lesson.name}"' in page
    assert "<script" not in page
    assert not re.search(r"""<link|src=["'](?!data:)|@import|url\((?!data:)""", page)
