"""Exercises of lesson 06: what checkpointing costs, and a memory target with a price limit."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.exercises import checks
from labkit.exercises.engine import check_of

MOST_PEAK, MOST_EXTRA_FLOPS = 0.60, 0.10


def extra_percent():
    forward = 1.0
    step = forward + 2 * forward  # backward costs two forwards
    repeated = 6 / 24 * 0.90 * forward  # the checkpointed share of one forward, once more
    return 100 * repeated / step


@check_of(
    "06-1",
    extra_percent,
    "Call the arithmetic of one forward pass 1. What does a whole step cost?",
    "A step is 1 forward + 2 for backward = 3. Which share of the 1 is done once more?",
)
def check_price(answer):
    slips = {
        100 * 6 / 24 * 0.90: "That is the growth of the forward pass alone; backward is part of "
        "the step too, and costs two forwards.",
        100 * 6 / 24 / 3: "Not all of the forward pass is in the blocks: 90 % is.",
        25: "That is the share of the blocks. Which share of a whole step is that?",
    }
    return checks.expect_number(answer, extra_percent(), rel_tolerance=0.005, slips=slips)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def roomy(device, batch_size=8, steps=3):
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


@check_of(
    "06-2",
    thrifty,
    "Measure what checkpointing all blocks costs. Which share of them is affordable?",
    "Half the blocks cost half as much. `block.forward = partial(checkpoint, "
    "block.forward, use_reentrant=False)` wraps one block.",
)
def check_thrifty(answer):
    run, reference = checks.run_both(answer, roomy, mode="measure", batch_size=8, steps=2)
    if problem := checks.same_losses(run, reference):
        return problem
    if problem := checks.memory_target(run, int(MOST_PEAK * reference.peak_bytes)):
        if run.flops > reference.flops:
            problem += " Where do recomputed activations meet those that are still kept?"
        return problem
    if problem := checks.arithmetic_limit(run, reference, MOST_EXTRA_FLOPS):
        return f"{problem} Which blocks could keep what they compute?"
    peak, extra = run.peak_bytes / reference.peak_bytes, run.flops / reference.flops - 1
    return checks.Correct(
        f"That is right: {peak:.0%} of the peak for {extra:+.1%} arithmetic, equal losses."
    )
