"""Exercises of lesson 06: what checkpointing costs, and a memory target with a price limit."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.exercises import Exercise
from labkit.exercises.checks import (
    Feedback,
    expect_number,
    memory_target,
    run_experiment,
    same_losses,
)
from labkit.memory import Run

MOST_PEAK, MOST_EXTRA_FLOPS = 0.60, 0.10


# --- 1: the price, on paper --------------------------------------------------------------------


def extra_percent():
    forward = 1.0
    step = forward + 2 * forward  # backward costs two forwards
    repeated = 6 / 24 * 0.90 * forward  # the checkpointed share of one forward, once more
    return 100 * repeated / step


def check_price(answer):
    slips = {
        100 * 6 / 24 * 0.90: "That is the growth of the forward pass alone; backward is part of "
        "the step too, and costs two forwards.",
        100 * 6 / 24 / 3: "Not all of the forward pass is in the blocks: 90 % is.",
        25: "That is the share of the blocks. Which share of a whole step is that?",
        30: "That is the price of checkpointing all of the blocks; we take 6 of 24.",
    }
    return expect_number(answer, extra_percent(), rel_tolerance=0.005, slips=slips)


# --- 2: a memory target with a price limit -----------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def roomy(device, batch_size=8, steps=3):
    """The reference that the notebook shows."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block(128) for _ in range(16)]).to(device)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=1e-2)
    for _ in range(steps):
        x = torch.randn(batch_size, 256, 128, device=device)
        loss = blocks(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def thrifty(device, batch_size=8, steps=3):
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block(128) for _ in range(16)]).to(device)
    for block in blocks[::2]:  # every other block: half the price, 59 % of the peak
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=1e-2)
    for _ in range(steps):
        x = torch.randn(batch_size, 256, 128, device=device)
        loss = blocks(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def check_thrifty(answer):
    reference = run_experiment(roomy, world="measure", batch_size=8, steps=3)
    run = run_experiment(answer, world="measure", batch_size=8, steps=3)
    problem = same_losses(run, reference) or _too_high(run, reference) or _price(run, reference)
    if problem:
        return problem
    peak, extra = run.peak_bytes / reference.peak_bytes, run.flops / reference.flops - 1
    return Feedback(
        True, f"That is right: {peak:.0%} of the peak for {extra:+.1%} arithmetic, equal losses."
    )


def _too_high(run: Run, reference: Run) -> str | None:
    problem = memory_target(run, int(MOST_PEAK * reference.peak_bytes))
    if problem and run.flops > reference.flops:
        problem += (
            " You do recompute some blocks. Where do recomputed activations meet those that are "
            "still kept?"
        )
    return problem


def _price(run: Run, reference: Run) -> str | None:
    extra = run.flops / reference.flops - 1
    if extra <= MOST_EXTRA_FLOPS:
        return None
    return (
        f"The peak is low enough, but your step does {extra:.0%} more arithmetic; the limit is "
        f"{MOST_EXTRA_FLOPS:.0%}. Which blocks could keep what they compute?"
    )


EXERCISES = (
    Exercise(
        "06-1",
        question="By how many percent does the arithmetic of a training step grow?",
        hints=(
            "Call the arithmetic of one forward pass 1. What does a whole step cost?",
            "A step is 1 forward + 2 for backward = 3. Which share of the 1 is done once more?",
        ),
        solution=extra_percent,
        check=check_price,
    ),
    Exercise(
        "06-2",
        question="The same training at 60 % of the peak for at most 10 % more arithmetic.",
        hints=(
            "Measure what checkpointing all blocks costs. Which share of them is affordable?",
            "Half the blocks cost half as much. `block.forward = partial(checkpoint, "
            "block.forward, use_reentrant=False)` wraps one block.",
        ),
        solution=thrifty,
        check=check_thrifty,
    ),
)
