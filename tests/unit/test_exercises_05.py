"""Lesson 05's exercises: the stub, the solution, and the mistakes people make."""

import pytest
import torch
from exercise_rules import stub_and_solution

import labkit as lab
from labkit.exercises import Status
from labkit.exercises.lesson_05 import SMALL, forgetful, smallest_change

test_stub_and_solution = stub_and_solution("05")


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_change_is_where_bfloat16_turns(sign):
    w = torch.tensor(0.75, dtype=torch.bfloat16)
    for factor, moves in ((0.99, False), (1.01, True)):
        change = sign * factor * smallest_change()
        assert ((w.float() + change).bfloat16() != w) == moves


@pytest.mark.parametrize(
    ("answer", "says"),
    [(2**-8, "the whole gap"), (0.75 / 256, "A 256th of the weight is"), (2**-7, "from 1 to 2"),
     (2**-10, "seven bits"), (2**-12, "right for FP16"), (-(2**-8), "the whole gap"),
     (0.5, "less"), (True, "A number"), ("small", "A number")],
)  # fmt: skip
def test_change_mistakes(answer, says):
    outcome = lab.exercise("05-1").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def stochastic(w, change):
    bits = (w + change).view(torch.int32)
    bits += torch.randint_like(bits, 1 << 16)
    w.copy_((bits & -(1 << 16)).view(torch.float32))


def variant(write, dtype=torch.bfloat16, rate=0.003, start=0):
    """A training that stores each step through ``write(w, change, lost)``."""

    def frugal(device, seed=0, width=64):
        torch.manual_seed(seed + start)
        shape = SMALL | {"hidden_size": width, "intermediate_size": 3 * width}
        model = lab.model("SmolLM2-tiny", device=device, dtype=dtype, **shape)
        lost = {}
        for ids in lab.batches(device=device, batch_size=2, seq_len=64, seed=seed):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            with torch.no_grad():
                for w in model.parameters():
                    write(w, -rate * w.grad.float(), lost)
                    w.grad = None
            yield loss

    return frugal


def nearest(w, change, lost):
    w.copy_(w + change)


def at_random(w, change, lost):
    stochastic(w, change)


def kahan_in_pieces(w, change, lost):
    kept = lost.setdefault(w, torch.zeros_like(w))
    parts = (t.view(-1).split(1 << 18) for t in (w, change, kept))
    for piece, step, missed in zip(*parts, strict=True):
        step, before = step + missed, piece.float()
        piece.copy_(before + step)
        missed.copy_(step - (piece - before))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (forgetful, "Steps are still lost"),
        (variant(nearest), "Steps are still lost"),
        (variant(at_random), "How many numbers do you widen".lower()),
        (variant(kahan_in_pieces), "What do you keep besides"),
        (variant(nearest, dtype=torch.float32), "no longer BF16"),
        (variant(nearest, dtype=torch.float32, rate=0.006), "another training"),
        (variant(at_random, start=1), "Your first loss"),
    ],
    ids=["reference", "nearest", "whole tensors", "Kahan", "FP32", "other rate", "other model"],
)
def test_target_mistakes(answer, says):
    outcome = lab.exercise("05-2").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message
