"""Lesson 13's exercises: stubs, solutions, and the mistakes that people make."""

import inspect

import pytest
from exercise_rules import stub_and_solution

from labkit.exercises import Status, exercise, lesson_13


def outcome(id, answer):
    return exercise(id).check(answer)


def not_yet(id, answer):
    found = outcome(id, answer)
    assert found.status is Status.NOT_YET
    return found.message


test_stub_and_solution = stub_and_solution("13")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (2, "scales are missing"),
        (1.015625, "AdamW has two"),
        (2.015625, "scales of its own"),
        (8, "32-bit AdamW"),
        (3, "less"),
        ("two", "number"),
    ],
)
def test_wrong_bytes(answer, says):
    assert says in not_yet("13-1", answer)


def changed(old, new):
    source = inspect.getsource(lesson_13.light)
    assert old in source
    space = dict(vars(lesson_13))
    exec(source.replace(old, new), space)
    return space["light"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("lr=1e-3", "lr=1e-5", "more than 2% apart"),
        ("manual_seed(0)", "manual_seed(1)", "keep the model, the seed and the data"),
        ("layers=4", "layers=2", "keep the model, the seed and the data"),
        ("bnb.optim.AdamW8bit", "torch.optim.AdamW", "largest part of your peak is optimizer"),
    ],
)
def test_other_training_and_half_measures(old, new, says):
    assert says in not_yet("13-2", changed(old, new))
