"""What would lower a program's peak, by its own record: each change is tried on the log of blocks.

Limits: the log is of the program as it is, and the change is made to its blocks only: kernels that
would take other workspaces are not seen. Of a program that ran out of memory, the log ends there.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

from gpumem.trace import Category, Phase
from phantom_gpu.allocator_history import Block, History
from phantom_gpu.report_records import Change

#: A block-wise 8-bit state has one byte a number, and four for each block of 256 (bitsandbytes).
EIGHT_BIT = (1 + 4 / 256) / 4
LEAST_SHARE = 0.02  # of the peak; less is not worth a change
MOST_CHANGES = 3
_LAYER = re.compile(r"(.*?)\.\d+(?=\.|$)")
_ADAM = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
Share = Callable[[Block], float]


def changes(history: History, optimizers: list[torch.optim.Optimizer]) -> list[Change]:
    """Return the changes that would lower the peak of ``history`` the most."""
    peak = history.peak_with(lambda block: 1)
    found = []
    for what, share in _candidates(history, optimizers):
        saved = peak - history.peak_with(share)
        if saved > LEAST_SHARE * peak:
            found.append(Change(what, saved))
    return sorted(found, key=lambda change: -change.nbytes)[:MOST_CHANGES]


def _candidates(
    history: History, optimizers: list[torch.optim.Optimizer]
) -> Iterator[tuple[str, Share]]:
    layers, stack = _layers(history)
    if layers > 1 and not history.recomputes:
        yield (
            "recompute each layer in backward (gradient_checkpointing_enable)",
            lambda b: 1 / layers if _is(b, Category.ACTIVATIONS, stack) else 1,
        )
    yield (
        "half the rows in a forward pass, and twice as many passes a step",
        lambda b: 0.5 if b.kind is Category.ACTIVATIONS or b.tag.phase is Phase.BACKWARD else 1,
    )
    if any(isinstance(optimizer, _ADAM) for optimizer in optimizers):
        yield (
            "keep Adam's states in 8 bits (bitsandbytes.optim.AdamW8bit)",
            lambda b: EIGHT_BIT if b.kind is Category.OPTIMIZER else 1,
        )
    yield (
        "update one weight after the other (foreach=False, or fused=True)",
        lambda b: float(b.kind is not Category.TEMPORARY or b.tag.phase is not Phase.OPTIMIZER),
    )
    yield (
        "train adapters only (LoRA, with PEFT)",
        lambda b: float(
            b.kind not in (Category.GRADIENTS, Category.OPTIMIZER)
            and b.tag.phase is not Phase.OPTIMIZER
        ),
    )


def _layers(history: History) -> tuple[int, str]:
    """Return how many alike layers hold activations at the peak, and what contains them."""
    numbers: dict[str, set[str]] = defaultdict(set)
    for block in history.peak_blocks:
        layer = _LAYER.match(block.tag.module)
        if layer and block.kind is Category.ACTIVATIONS and not block.tag.recomputing:
            numbers[layer[1]].add(layer[0])
    stack = max(numbers, key=lambda name: len(numbers[name]), default="")
    return len(numbers[stack]) if stack else 0, stack


def _is(block: Block, category: Category, stack: str) -> bool:
    return block.kind is category and block.tag.module.startswith(f"{stack}.")
