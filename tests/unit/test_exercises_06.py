"""Lesson 06's exercises: the stub, the solution, and the mistakes people make."""

from functools import partial

import pytest
import torch
from exercise_rules import stub_and_solution
from torch import nn
from torch.utils.checkpoint import checkpoint

import labkit as lab
from labkit.exercises import Status
from labkit.exercises.lesson_06 import Block, roomy

test_stub_and_solution = stub_and_solution("06")


@pytest.mark.parametrize(
    ("answer", "says"),
    [(22.5, "forward pass alone"), (8.3333, "Not all of the forward"), (0.075, "factor of 100"),
     ("7.5 %", "A number"), (25, "share of the blocks"), (30, "all of the blocks")],
)  # fmt: skip
def test_price_mistakes(answer, says):
    outcome = lab.exercise("06-1").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def variant(wrap, rate=1e-2):
    def thrifty(device, batch_size=8, steps=3):
        torch.manual_seed(0)
        blocks = nn.Sequential(*[Block(128) for _ in range(16)]).to(device)
        for number, block in enumerate(blocks):
            if wrap(number):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        optimizer = torch.optim.SGD(blocks.parameters(), lr=rate)
        for _ in range(steps):
            loss = blocks(torch.randn(batch_size, 256, 128, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    return thrifty


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (roomy, "the target at most"),
        (variant(lambda number: True), "more arithmetic; the limit is"),
        (variant(lambda number: number % 2, rate=1.0), "loss"),
        (variant(lambda number: number < 3), "the target at most"),
        (variant(lambda number: number >= 8), "still kept"),
    ],
)
def test_target_mistakes(answer, says):
    outcome = lab.exercise("06-2").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def test_a_generator_instead_of_its_function():
    outcome = lab.exercise("06-2").check(roomy(torch.device("cpu")))
    assert outcome.status is Status.NOT_YET
    assert "without calling it" in outcome.message


def test_an_answer_that_runs_out_of_memory():
    def thrifty(device, batch_size=8, steps=3):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        yield

    outcome = lab.exercise("06-2").check(thrifty)
    assert outcome.status is Status.NOT_YET
    assert "did not fit" in outcome.message
