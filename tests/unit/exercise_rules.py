"""What holds for the exercises of every lesson; each file of tests says it of its own."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from labkit.exercises import Status, of_lesson


def stub_and_solution(lesson: str, stubs: Mapping[str, Any] | None = None) -> Callable[..., None]:
    """A test of each exercise: its stub (``...`` unless named) is known, its solution is right."""

    @pytest.mark.parametrize("exercise", of_lesson(lesson), ids=lambda exercise: exercise.id)
    def test(exercise):
        stub = (stubs or {}).get(exercise.id, ...)
        assert exercise.check(stub).status is Status.NOT_ATTEMPTED
        outcome = exercise.check(exercise.right_answer)
        assert outcome.status is Status.CORRECT, outcome.message

    return test
