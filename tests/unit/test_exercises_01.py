"""Lesson 01's exercises: the stub, the solution, and the mistakes people make."""

import pytest
import torch
from exercise_rules import stub_and_solution

import labkit as lab
from labkit.exercises import Status
from labkit.exercises.lesson_01 import crossing_batch, default_optimizer


@pytest.fixture(scope="module")
def right():
    return crossing_batch()


test_stub_and_solution = stub_and_solution("01")


def test_a_function_that_is_still_the_stub_is_no_attempt():
    def make_optimizer(parameters): ...

    assert lab.exercise("01-2").check(make_optimizer).status is Status.NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda right: 2 * right, "16 bytes per parameter"),
        (lambda right: 128 * right, "looks like tokens"),
        (lambda right: right // 4, "weights only"),
        (lambda right: right + 4, "too large"),
        (lambda right: right + 0.3, "Batches are whole"),
        (lambda right: 0, "1 to 10 000"),
        (lambda right: f"{right} texts", "A batch size is asked for"),
        (lambda right: True, "A batch size is asked for"),
    ],
)
def test_crossing_mistakes(right, wrong, says):
    outcome = lab.exercise("01-1").check(wrong(right))
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


def faster(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def of_the_wrong_kind(parameters):
    return "AdamW"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (default_optimizer, "are temporary"),
        (sgd, "it is to stay AdamW"),
        (faster, "Your loss at step"),
        (of_the_wrong_kind, "an optimizer is asked for"),
        (torch.optim.AdamW([torch.zeros(1)]), "the function itself"),
    ],
    ids=["default", "sgd", "faster", "text", "optimizer"],
)
def test_optimizer_mistakes(answer, says):
    outcome = lab.exercise("01-2").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message
