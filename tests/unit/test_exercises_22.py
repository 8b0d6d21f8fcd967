"""Lesson 22's exercises: the stub, the solution, and the mistakes people make."""

import pytest
from exercise_rules import stub_and_solution

import labkit as lab
from labkit.exercises import Status
from labkit.exercises.lesson_22 import (
    MOST_SECONDS,
    estimated,
    longest,
    seconds,
    thrifty_fields,
)

test_stub_and_solution = stub_and_solution("22")


def not_yet(id, answer, says):
    outcome = lab.exercise(id).check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message, outcome.message


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("20480", "A whole number of tokens"), (True, "A whole number of tokens"),
        (20, "not thousands"), (20_000, "nearest below is 19456"), (-1024, "no multiple"),
        (1 << 18, "knows 131072 positions"),
    ],
)  # fmt: skip
def test_a_length_that_is_none(answer, says):
    not_yet("22-1", answer, says)


def test_too_long_and_too_short():
    answer = longest()
    assert answer % 1024 == 0
    not_yet("22-1", answer - 1024, "a longer text")
    not_yet("22-1", answer + 1024, "do fit, but leave")
    not_yet("22-1", answer + 8192, "too much: a shorter text")


def fields(**changes):
    kept = {**thrifty_fields(), **changes}
    return {name: value for name, value in kept.items() if value is not None}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (5, "A dictionary"),
        ({1: 2}, "A dictionary"),
        ({"optimiser": "sgd"}, "Did you mean 'optimizer'"),
        (fields(precision="fp16"), "cannot be used: fp16 weights"),
        (fields(accumulate=2), "none left to accumulate"),
        (fields(lora=16), "every weight is trained"),
        (fields(optimizer_in_backward=None, offload="optimizer"), "keeps optimizer on the host"),
        (fields(optimizer="paged-adamw8bit"), "paged optimizer"),
        (fields(seq_len=512), "at least 1024"),
        (fields(batch_size=64), "at most 16384"),
        ({}, "floor alone"),
        (fields(checkpointing=False), "a schedule can help: at the peak stand"),
        (fields(batch_size=2), "the target is 20.0 GiB. It does fit"),
        (fields(optimizer="adafactor"), "Moving bytes takes that long"),
    ],
)  # fmt: skip
def test_recipes_that_miss(answer, says):
    not_yet("22-2", answer, says)


def test_a_recipe_is_as_good_as_its_fields():
    recipe = lab.Recipe(**thrifty_fields())
    assert lab.exercise("22-2").check(recipe).status is Status.CORRECT
    assert seconds(estimated(recipe)) <= MOST_SECONDS


def test_small_enough_but_too_slow(monkeypatch):
    monkeypatch.setattr("labkit.exercises.lesson_22.MOST_SECONDS", 0.01)
    not_yet("22-2", thrifty_fields(), "which saver computes things twice")
