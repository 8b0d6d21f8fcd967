"""Lessons on a phantom GPU: they pass, and judge nothing that needs values or seconds from it."""

import pytest

from labkit.course import runner
from labkit.course.lessons import find
from labkit.course.outcomes import stored_result

#: Beside the nightly ones: attention's kernels, and a recipe that is measured and predicted.
EACH_TIME = ("08", "22")
LESSONS = [
    pytest.param(
        lesson, id=lesson.number, marks=() if lesson.number in EACH_TIME else pytest.mark.nightly
    )
    for lesson in find([])
]


@pytest.mark.parametrize("lesson", LESSONS)
def test_lessons_pass(lesson, tmp_path):
    course = runner.run([lesson], folder=tmp_path, timeout_seconds=900)
    [outcome] = course.outcomes
    assert outcome.passed, outcome.problems
    result = stored_result(outcome, tmp_path)
    assert result.machine["phantom"]
    for entry in result.judgements:
        assert "measured on" not in (entry.get("mode") or ""), entry["id"]
