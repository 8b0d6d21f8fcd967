"""Lesson 08's exercises: the stub, the solution, and the mistakes people make."""

import pytest
import torch
from exercise_rules import stub_and_solution
from torch.utils.checkpoint import checkpoint

import labkit as lab
from labkit.exercises import Status
from labkit.exercises.lesson_08 import capped, thrifty

STUBS = {"08-1": {"eager": ..., "repeated": ...}, "08-2": ...}


test_stub_and_solution = stub_and_solution("08", STUBS)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (4096, "lengths of"),
        ({"eager": 2048}, "lengths of"),
        ({"eager": 100, "repeated": 8192}, "eager: a length in tokens"),
        ({"eager": float("inf"), "repeated": 8192}, "eager: a length in tokens"),
        ({"eager": 2048, "repeated": "8192"}, "repeated: a length in tokens"),
        ({"eager": 2000, "repeated": 8192}, "no multiple of 512"),
        ({"eager": 1536.0, "repeated": 8192}, "so do 2048"),
        ({"eager": 2560, "repeated": 8192}, "eager: 2560 tokens do not fit"),
        ({"eager": 1536, "repeated": 8192}, "so do 2048"),
        ({"eager": 1 << 20, "repeated": 8192}, "1048576 tokens do not fit. Even 65536 need"),
    ],
)
def test_length_mistakes(answer, says):
    outcome = lab.exercise("08-1").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def by_rows(keep_graph=False, cap=True, shift=0, rows=128):
    """The solution with one thing wrong: everything saved, no cap, a mask shifted, long blocks."""

    def some_rows(q, k, v, start):
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        scores = 5 * torch.tanh(scores / 5) if cap else scores
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        return scores.masked_fill(future.triu(start + 1 + shift), -torch.inf).softmax(-1) @ v

    def thrifty(q, k, v):
        out = []
        for start in range(0, q.shape[-2], rows):
            block = q[..., start : start + rows, :]
            if keep_graph:
                out.append(some_rows(block, k, v, start))
            else:
                out.append(checkpoint(some_rows, block, k, v, start, use_reentrant=False))
        return torch.cat(out, dim=-2)

    return thrifty


def detached(q, k, v):
    return thrifty(q, k.detach(), v)


def no_graph(q, k, v):
    with torch.no_grad():
        return capped(q, k, v)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (capped, "the target at most"),
        (by_rows(keep_graph=True), "saved of each block"),
        (by_rows(rows=1024), "How many rows"),
        (by_rows(cap=False), "Check the cap"),
        (by_rows(shift=1), "which keys"),
        (detached, "gets no gradient"),
        (no_graph, "cannot be differentiated"),
        (lambda q, k, v: thrifty(q, k, v)[:, :1], "a tensor of shape"),
        (lambda q, k, v: 3, "a tensor of shape"),
    ],
)
def test_target_mistakes(answer, says):
    outcome = lab.exercise("08-2").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def test_a_function_that_returns_nothing_is_no_attempt():
    assert lab.exercise("08-2").check(lambda q, k, v: None).status is Status.NOT_ATTEMPTED


def test_other_blocks_are_right_too():
    assert lab.exercise("08-2").check(by_rows(rows=64)).status is Status.CORRECT
