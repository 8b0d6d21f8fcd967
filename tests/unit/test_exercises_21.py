"""Lesson 21's exercises: the stub, the solution, and the mistakes people make."""

import pytest
from exercise_rules import stub_and_solution

import labkit as lab
from labkit.exercises import Status
from labkit.exercises.lesson_21 import JOBS, MOST_BYTES, STACK, factor, leaner, simulated

test_stub_and_solution = stub_and_solution("21", {"21-1": lambda *job: None})


def refused(id, answer):
    outcome = lab.exercise(id).check(answer)
    assert outcome.status is Status.NOT_YET
    return outcome.message


# --- 1 --------------------------------------------------------------------------------------------


def test_amdahl_is_the_case_where_the_moment_stays():
    weights, _, states, activations, k = JOBS[0]
    before = weights + states + activations
    share = activations / before
    assert factor(*JOBS[0]) == pytest.approx(1 / (1 - share + share / k))
    assert factor(*JOBS[2]) == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda w, g, s, a, k: k, "do not shrink with the activations"),
        (lambda w, g, s, a, k: (w + s + a) / (w + s + a / k), "another moment"),
        (lambda w, g, s, a, k: (w + s + a) / (w + s + max(a / k, g)), "Before it, too"),
        (lambda w, g, s, a, k: (w + s + g + a) / (w + s + g + a / k), "of two moments"),
        (lambda *job: 1 / factor(*job), "the share that is left"),
        (
            lambda w, g, s, a, k: max(w + a, w + s + g) / max(w + a / k, w + s + g),
            "from step to step",
        ),
        (lambda *job: 17.0, "the larger of the two moments"),
        (lambda *job: "4", "A number is asked for"),
        (lambda *job: True, "A number is asked for"),
        (lambda *job: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_wrong_factors(wrong, says):
    assert says in refused("21-1", wrong)


# --- 2 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (STACK, "Which switch makes gradients wait"),
        ({key: value for key, value in STACK.items() if key != "micro"}, "temporary bytes"),
        (STACK | {"micro": 1, "chunk": 256}, "Which switch makes gradients wait"),
        (leaner() | {"on_host": False}, "States on the card"),
        (leaner() | {"on_host": False, "eight_bit": True}, "States on the card"),
        (leaner() | {"precision": "bf16"}, "another training"),
        (leaner() | {"precision": "fp64"}, "precision"),
        (leaner() | {"lora": 8}, "setting"),
        (leaner() | {"recompute": "yes"}, "True or False"),
        (leaner() | {"chunk": 0}, "a whole number from 1"),
        (leaner() | {"micro": 2.0}, "a whole number from 1"),
        ([("chunk", 256)], "A dictionary"),
    ],
)
def test_wrong_settings(settings, says):
    assert says in refused("21-2", settings)


def test_either_change_alone_is_not_enough():
    assert simulated(**leaner()).peak_bytes <= MOST_BYTES
    for undo in ({"micro": 2}, {"chunk": 1024}):
        assert simulated(**leaner() | undo).peak_bytes > MOST_BYTES
