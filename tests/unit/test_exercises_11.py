"""Lesson 11's exercises: the stub, the solution, and the mistakes people make."""

import pytest
import torch
from exercise_rules import stub_and_solution
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import labkit as lab
from labkit.exercises import Status
from labkit.exercises.lesson_11 import EXERCISES, loss_of, whole_loss

test_stub_and_solution = stub_and_solution("11")


def test_the_solution_is_the_smallest_that_fits():
    def logits_bytes(chunks):
        return -(-4 * 8192 // chunks) * 128_256 * 4

    [chunks, _] = EXERCISES
    smallest = chunks.right_answer
    assert logits_bytes(smallest) <= 256 * 1024**2 < logits_bytes(smallest - 1)


@pytest.mark.parametrize(
    ("answer", "says"),
    [(62, "round up"), (64, "One less"), (16, "holds four"), (32, "four bytes"), (67, "1024²"),
     (62.625, "is whole"), (100, "is less"), ("63", "A number"), (True, "A number")],
)  # fmt: skip
def test_chunk_mistakes(answer, says):
    outcome = lab.exercise("11-1").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def variant(size=128, mean=False, keep=False, detach=False):
    def part(rows, weight, targets):
        logits = F.linear(rows, weight).float()
        return F.cross_entropy(logits, targets, reduction="mean" if mean else "sum")

    def loss_of(hidden, weight, labels):
        hidden = hidden.detach() if detach else hidden
        pieces = list(zip(hidden.split(size), labels.split(size), strict=True))
        if keep:
            losses = [part(rows, weight, targets) for rows, targets in pieces]
        else:
            losses = [
                checkpoint(part, rows, weight, targets, use_reentrant=False)
                for rows, targets in pieces
            ]
        return sum(losses) / (len(pieces) if mean else len(labels))

    return loss_of


def fused(hidden, weight, labels):
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight):
            total, to_hidden, to_weight = 0, torch.empty_like(hidden), torch.zeros_like(weight)
            for rows, targets, out in zip(
                hidden.split(256), labels.split(256), to_hidden.split(256), strict=True
            ):
                slope = F.linear(rows, weight).float().log_softmax(-1)
                total = total - slope.gather(1, targets[:, None]).sum()
                slope = slope.exp() - F.one_hot(targets, len(weight))
                slope = (slope / len(labels)).to(weight.dtype)
                out.copy_(slope @ weight)
                to_weight.addmm_(slope.T, rows)
            ctx.save_for_backward(to_hidden, to_weight)
            return total / len(labels)

        @staticmethod
        def backward(ctx, slope):
            return tuple(gradient * slope for gradient in ctx.saved_tensors)

    return Fused.apply(hidden, weight)


def test_gradients_made_in_forward_are_as_right():
    assert lab.exercise("11-2").check(fused).status is Status.CORRECT


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (whole_loss, "all tokens are alive"),
        (variant(keep=True), "all tokens are alive"),
        (variant(size=4096), "How large is one chunk"),
        (variant(mean=True), "weigh the same"),
        (variant(detach=True), "does not reach both"),
        (lambda hidden, weight, labels: 3.0, "tensor with one number"),
        (lambda *inputs: whole_loss(*inputs).detach(), "has no gradient"),
        (lambda *inputs: whole_loss(*inputs) + 1, "it should be"),
    ],
)
def test_loss_mistakes(answer, says):
    outcome = lab.exercise("11-2").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def test_a_loss_of_one_number_may_have_a_dimension():
    assert lab.exercise("11-2").check(lambda *x: loss_of(*x).reshape(1)).status is Status.CORRECT
    outcome = lab.exercise("11-2").check(lambda *x: 2 * loss_of(*x).reshape(1))
    assert "it should be" in outcome.message


def test_large_inputs_are_multiplied_as_small_ones_are():
    def cheap(hidden, weight, labels):
        if len(weight) > 1000:
            return (hidden.sum() + weight.sum()).float()
        return whole_loss(hidden, weight, labels)

    outcome = lab.exercise("11-2").check(cheap)
    assert outcome.status is Status.NOT_YET
    assert "forward alone takes one" in outcome.message


def test_a_stub_that_returns_nothing():
    outcome = lab.exercise("11-2").check(lambda hidden, weight, labels: ...)
    assert outcome.status is Status.NOT_ATTEMPTED
