"""Exercises of lesson 07: how much the mean of means misweighs, and a large batch in little memory.

Limits: the second check tells a wrong update from a right one by losses after plain SGD steps; an
answer whose error is below their tolerance passes.
"""

import torch

from labkit import models
from labkit.exercises import Exercise
from labkit.exercises.checks import (
    Feedback,
    expect_number,
    memory_target,
    reference_run,
    run_experiment,
    same_losses,
)
from labkit.memory import Category, Run

MOST_PEAK = 0.25


# --- 1: a token of a short piece, on paper -----------------------------------------------------


def factor():
    tokens = 1000 + 10 + 10 + 10
    in_the_batch = 1 / tokens
    in_its_piece = 1 / 4 * 1 / 10
    return in_its_piece / in_the_batch


SLIPS = {
    100: "That compares it with a token of the long piece, which counts less than it should.",
    103: "That is without the division by four.",
    2.575: "A short piece holds 10 tokens, and its mean divides by 10, not by 100.",
    1030 / 4000: "That is the factor for a token of the long piece.",
    4 / 103: "Upside down: how much more does it count, not how much less?",
    25: "Nearly. The batch holds the short pieces' tokens, too.",
}


def check_factor(answer):
    return expect_number(answer, factor(), rel_tolerance=0.01, slips=SLIPS)


# --- 2: 64 rows in little memory, the same training ----------------------------------------------


def ragged(ids):
    """Labels for rows of growing length: -100 beyond each row's end."""
    rows, width = ids.shape
    ends = torch.linspace(2, width, rows, device=ids.device)[:, None]
    return ids.masked_fill(torch.arange(width, device=ids.device) >= ends, -100)


def whole(device, batch_size=64, steps=3):
    """The reference that the notebook shows."""
    torch.manual_seed(0)
    model = models.model("SmolLM2-tiny", device=device, vocab_size=256, layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids in models.batches(device=device, batch_size=batch_size, seq_len=64, steps=steps):
        loss = model(input_ids=ids, labels=ragged(ids)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def in_pieces(device, batch_size=64, steps=3):
    import labkit as lab

    torch.manual_seed(0)
    model = lab.model("SmolLM2-tiny", device=device, vocab_size=256, layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids in lab.batches(device=device, batch_size=batch_size, seq_len=64, steps=steps):
        labels = ragged(ids)  # of the whole batch: pieces would be told other lengths
        n = (labels[:, 1:] != -100).sum()
        total = 0.0
        for some, theirs in zip(ids.split(4), labels.split(4), strict=True):
            loss = model(input_ids=some, labels=theirs, num_items_in_batch=n).loss
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        yield total


def check_in_pieces(answer):
    reference = reference_run(whole, world="measure", batch_size=64, steps=3)
    run = run_experiment(answer, world="measure", batch_size=64, steps=3)
    problem = _wrong_training(run, reference) or _too_high(run, reference)
    share = run.peak_bytes / reference.peak_bytes
    return problem or Feedback(
        True, f"That is right: {share:.0%} of the peak, and the same losses after every update."
    )


def _wrong_training(run: Run, reference: Run) -> str | None:
    problem = same_losses(run, reference)
    if problem is None or len(run.losses) != len(reference.losses):
        return problem
    first = run.losses[0] / reference.losses[0]
    if abs(first - 1) > 1e-4:
        cause = (
            "Before the first update the weights are the same, so it is the sum of the pieces' "
            "losses that differs. "
        )
        if first > 1.5:
            return f"{problem} {cause}It is {first:.3g} times too large: what divides it?"
        return f"{problem} {cause}Is each piece weighed by the labels it holds?"
    return (
        f"{problem} The first loss is right, and the first update is not. Do all pieces reach the "
        "optimizer, each with the weight that it has in the loss, before one single step?"
    )


def _too_high(run: Run, reference: Run) -> str | None:
    problem = memory_target(run, int(MOST_PEAK * reference.peak_bytes))
    if problem and run.by_category.get(Category.ACTIVATIONS, 0) > 0.75 * reference.by_category.get(
        Category.ACTIVATIONS, 0
    ):
        return (
            f"{problem} That is nearly the whole batch's: is some piece's graph still alive when "
            "the next one runs? A sum of losses holds on to them all, unless they are detached."
        )
    return f"{problem} The piece sets the peak." if problem else None


EXERCISES = (
    Exercise(
        "07-1",
        question="By which factor does a token of a short piece count too much?",
        hints=(
            "In the uncut batch every token counts 1 / (number of all tokens).",
            "In its piece a token counts 1/10 of the piece's mean, and that mean 1/4 of the sum.",
        ),
        solution=factor,
        check=check_factor,
    ),
    Exercise(
        "07-2",
        question="The same training on 64 rows per update, at a quarter of the peak.",
        hints=(
            "Make the labels of the whole batch first, count them, then split ids and labels.",
            "`num_items_in_batch=n` divides each piece's sum by n = (labels[:, 1:] != -100).sum(), "
            "counted over the whole batch. The pieces' losses then add up to the batch's.",
            "Yield the sum of the detached losses, after one optimizer step. A smaller piece "
            "takes less memory.",
        ),
        solution=in_pieces,
        check=check_in_pieces,
    ),
)
