"""Lesson 07's exercises: the stub, the solution, and the mistakes people make."""

import pytest
import torch
from exercise_rules import stub_and_solution

import labkit as lab
from labkit.exercises import Status
from labkit.exercises.checks import reference_run
from labkit.exercises.lesson_07 import factor, in_pieces, ragged, whole

test_stub_and_solution = stub_and_solution("07")


def test_the_factor_is_that_of_two_gradients():
    tokens = torch.ones(1030, requires_grad=True)
    means = [piece.mean() for piece in tokens.split([1000, 10, 10, 10])]
    [cut] = torch.autograd.grad(sum(means) / 4, tokens)
    [uncut] = torch.autograd.grad(tokens.mean(), tokens)
    assert factor() == pytest.approx(float(cut[-1] / uncut[-1]), rel=1e-5)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (100, "token of the long piece, which counts less"),
        (103, "without the division by four"),
        (0.2575, "factor for a token of the long piece"),
        (0.0388, "Upside down"),
        (25, "short pieces' tokens, too"),
        (2575, "factor of 100"),
        (12, "more"),
        ("25.75 times", "A number"),
    ],
)
def test_factor_mistakes(answer, says):
    outcome = lab.exercise("07-1").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def variant(rows=4, loss_of=None, zero_each=False, step_each=False, ids_only=False, keep=False):
    """``in_pieces`` with one thing wrong."""

    def by_tokens(model, ids, labels, n, pieces):
        return model(input_ids=ids, labels=labels, num_items_in_batch=n).loss

    def attempt(device, batch_size=64, steps=3):
        torch.manual_seed(0)
        model = lab.model("SmolLM2-tiny", device=device, vocab_size=256, layers=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for ids in lab.batches(device=device, batch_size=batch_size, seq_len=64, steps=steps):
            labels = ragged(ids)
            n, pieces, total = (labels[:, 1:] != -100).sum(), batch_size // rows, 0.0
            for some, theirs in zip(ids.split(rows), labels.split(rows), strict=True):
                if zero_each:
                    optimizer.zero_grad()
                own = ragged(some) if ids_only else theirs
                loss = (loss_of or by_tokens)(model, some, own, n, pieces)
                total = total + (loss if keep else loss.detach())
                if not keep:
                    loss.backward()
                if step_each:
                    optimizer.step()
                    optimizer.zero_grad()
            if keep:
                total.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield total

    return attempt


def mean_of_means(model, ids, labels, n, pieces):
    return model(input_ids=ids, labels=labels).loss / pieces


def sum_of_means(model, ids, labels, n, pieces):
    return model(input_ids=ids, labels=labels).loss


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (whole, "nearly the whole batch's"),
        (variant(rows=32), "The piece sets the peak"),
        (variant(keep=True), "unless they are detached"),
        (variant(loss_of=mean_of_means), "weighed by the labels"),
        (variant(loss_of=sum_of_means), "what divides it"),
        (variant(ids_only=True), "the sum of the pieces' losses"),
        (variant(zero_each=True), "the first update is not"),
        (variant(step_each=True), "the sum of the pieces' losses"),
    ],
    ids=["whole", "large", "kept", "means", "undivided", "other labels", "zeroed", "stepped"],
)
def test_target_mistakes(answer, says):
    outcome = lab.exercise("07-2").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def test_a_generator_instead_of_its_function():
    outcome = lab.exercise("07-2").check(in_pieces(torch.device("cpu")))
    assert outcome.status is Status.NOT_YET
    assert "without calling it" in outcome.message


def test_a_budget_does_not_spoil_the_checks_that_follow():
    reference_run.cache_clear()
    with lab.pretend(budget_bytes=1 << 20):
        outcome = lab.exercise("07-2").check(in_pieces)
    assert outcome.status is Status.NOT_YET
    assert "Your run did not fit" in outcome.message
    assert lab.exercise("07-2").check(in_pieces).status is Status.CORRECT
