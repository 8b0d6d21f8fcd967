"""What would lower a program's peak, by its own record: each change is tried on the log of blocks.

A change is named only where the program's own objects and its record say that it applies.

Limits: the log is of the program as it is, and the change is made to its blocks only: kernels that
would take other workspaces are not seen. Of a program that ran out of memory, the log ends there.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch

from gpumem.trace import WITHOUT_GRADIENTS, Category, Phase
from phantom_gpu.allocator_history import DDP_BUCKETS, Block, History
from phantom_gpu.report_records import Change

#: A block-wise 8-bit state has one byte a number, and four for each block of 256 (bitsandbytes).
EIGHT_BIT = (1 + 4 / 256) / 4
LEAST_SHARE = 0.02  # of the peak; less is not worth a change
MOST_CHANGES = 3
_CHECKPOINT = "/torch/utils/checkpoint.py"
_LAYER = re.compile(r"(.*?)\.\d+(?=\.|$)")
_ADAM = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
Share = Callable[[Block], float]


def changes(
    history: History,
    optimizers: Sequence[torch.optim.Optimizer],
    modules: Sequence[torch.nn.Module],
) -> list[Change]:
    """Return the changes that would lower the peak of ``history`` the most."""
    peak = history.peak_with(lambda block: 1)
    found = []
    for what, share in _candidates(history, optimizers, modules):
        saved = peak - history.peak_with(share)
        if saved > LEAST_SHARE * peak:
            found.append(Change(what, saved))
    return sorted(found, key=lambda change: -change.nbytes)[:MOST_CHANGES]


def _candidates(
    history: History,
    optimizers: Sequence[torch.optim.Optimizer],
    modules: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, Share]]:
    layers, stack = _layers(history)
    if layers > 1 and not _checkpoints(history, modules):
        yield (
            "recompute each layer in backward (gradient checkpointing)",
            lambda b: 1 / layers if _is(b, Category.ACTIVATIONS, stack) else 1,
        )
    if any(isinstance(optimizer, _ADAM) for optimizer in optimizers):
        yield (
            "keep Adam's states in 8 bits (bitsandbytes.optim.AdamW8bit)",
            lambda b: EIGHT_BIT if b.kind is Category.OPTIMIZER else 1,
        )
    if any(group.get("fused", True) is None for each in optimizers for group in each.param_groups):
        yield (
            "update all weights in one kernel (the optimizer's fused=True)",
            lambda b: float(b.kind is not Category.TEMPORARY or b.tag.phase is not Phase.OPTIMIZER),
        )
    yield (
        "let gradients be views of DDP's buckets (gradient_as_bucket_view=True)",
        lambda b: float(b.known_as != DDP_BUCKETS),
    )


def _layers(history: History) -> tuple[int, str]:
    """Return how many alike layers hold activations at the peak, and what contains them."""
    numbers: dict[str, set[str]] = defaultdict(set)
    if history.peak.tag.phase in WITHOUT_GRADIENTS:
        return 0, ""
    for block in history.peak_blocks:
        layer = _LAYER.match(block.tag.module)
        if layer and block.kind is Category.ACTIVATIONS and not block.tag.recomputing:
            numbers[layer[1]].add(layer[0])
    stack = max(numbers, key=lambda name: len(numbers[name]), default="")
    return len(numbers[stack]) if stack else 0, stack


def _checkpoints(history: History, modules: Sequence[torch.nn.Module]) -> bool:
    """Return whether activations are recomputed already, or the program has asked for it."""
    return (
        history.recomputes
        or any(getattr(module, "gradient_checkpointing", False) for module in modules)
        or any(
            frame["filename"].endswith(_CHECKPOINT)
            for block in history.peak_blocks
            for frame in block.frames
        )
    )


def _is(block: Block, category: Category, stack: str) -> bool:
    return block.kind is category and block.tag.module.startswith(f"{stack}.")
