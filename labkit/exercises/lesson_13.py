"""Lesson 13's exercises: the bytes of block-wise states, and a peak made mostly of states."""

from collections.abc import Callable
from typing import Any

import torch

import labkit as lab
from labkit.exercises import Exercise, expect_number, memory_target, run_experiment
from labkit.memory import Run

STEPS = 20
MOST_PEAK = 0.7
NOISE = 0.02


def bytes_per_parameter():
    # Two moments, each one byte and its share of the block's scale.
    return 2 * (1 + 4 / 256)


def check_bytes(answer: Any) -> str | None:
    near = {
        2.0: "The scales are missing: each block of 256 has one for each moment.",
        1 + 4 / 256: "That is one moment; AdamW has two.",
        2 + 4 / 256: "Each of the two moments has scales of its own.",
        8.0: "That is 32-bit AdamW.",
    }
    return expect_number(answer, bytes_per_parameter(), rel_tolerance=1e-3, slips=near)


def heavy(device, steps=STEPS):
    torch.manual_seed(0)
    model = lab.model("SmolLM2-tiny", device=device, layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for ids in lab.batches(device=device, batch_size=1, seq_len=64, steps=steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def light(device, steps=STEPS):
    import bitsandbytes as bnb

    torch.manual_seed(0)
    model = lab.model("SmolLM2-tiny", device=device, layers=4)
    optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-3)
    for ids in lab.batches(device=device, batch_size=1, seq_len=64, steps=steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def check_light(answer: Callable[..., Any]) -> str | None:
    reference = run_experiment(heavy, world="measure", steps=STEPS)
    run = run_experiment(answer, world="measure", steps=STEPS)
    return _as_good(run, reference) or memory_target(run, int(MOST_PEAK * reference.peak_bytes))


def _as_good(run: Run, reference: Run) -> str | None:
    """None if the first loss is the same and the mean of the last five within the noise."""
    if len(run.losses) != len(reference.losses):
        return f"Your run has {len(run.losses)} losses, {len(reference.losses)} are expected."
    if abs(run.losses[0] / reference.losses[0] - 1) > 1e-3:
        return (
            f"Your first loss is {run.losses[0]:.4g} instead of {reference.losses[0]:.4g}: "
            "keep the model, the seed and the data."
        )
    ours, theirs = (sum(each.losses[-5:]) / 5 for each in (run, reference))
    if abs(ours / theirs - 1) <= NOISE:
        return None
    return (
        f"Your last losses are {ours:.4g} on average, the original's {theirs:.4g}: that is more "
        f"than {NOISE:.0%} apart. It should remain the same optimizer, only lighter."
    )


EXERCISES = (
    Exercise(
        "13-1",
        question="How many bytes per parameter do AdamW8bit's states take?",
        hints=(
            "One byte for each of the two moments, and then the scales.",
            "4 bytes for 256 numbers, for each moment: 2 × (1 + 4 / 256).",
        ),
        solution=bytes_per_parameter,
        check=check_bytes,
    ),
    Exercise(
        "13-2",
        question="The same training at 70 % of the peak.",
        hints=(
            "Of what is the peak made? `lab.bars([lab.measure(heavy)])` shows it.",
            "Replace the optimizer by its 8-bit form, with the same learning rate.",
        ),
        solution=light,
        check=check_light,
    ),
)
