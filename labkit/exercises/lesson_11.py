"""Exercises of lesson 11: what a compiler drops in a large model, and a budget for it."""

from functools import partial

import torch
from torch._functorch import config as partitioner

from gpumem.measurement import allocator_peak, cpu_record
from gpumem.units import format_bytes
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

MOST_PEAK, MOST_PRODUCTS = 0.45, 1.12  # of the eager step's
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
Block = from_notebook("11", "Block", globals())
train_blocks = from_notebook("11", "train_blocks", globals())


def fewer_gib():
    width, inner, tokens, layers = 4096, 14336, 2 * 4096, 32
    return (width + inner) * 2 * tokens * layers / 1024**3  # x / rms, and silu(gate)


@check_of("11-1", fewer_gib)
def check_fewer(answer):
    slips = {
        18: "Numbers in BF16 take two bytes, not four.",
        4.5: "Is that one row? A batch holds two.",
        9 / 32: "That is one layer. There are 32.",
        7: "That is `silu(gate)` alone. The norm drops a tensor, too.",
        16: "`product` stays at the default: the next matrix product needs it whole.",
        9.664: "That is in GB. A GiB is 1024³ bytes.",
    }
    return checks.expect_number(answer, fewer_gib(), rel_tolerance=0.01, unit="GiB", slips=slips)


def frugal(blocks):
    partitioner.activation_memory_budget = 0.5
    for block in blocks:
        block.compile(backend="aot_eager_decomp_partition")
    return blocks


@check_of("11-2", frugal)
def check_frugal(answer):
    ours_losses, ours_bytes, ours_flops = _on_the_cpu(partial(checks.call, answer))
    losses, most_bytes, flops = _on_the_cpu(None)
    for loss, right in zip(ours_losses, losses, strict=True):
        if not abs(loss - right) <= 1e-4 * right:  # also true of NaN
            return f"Your loss is {loss:.5g}, it should still be {right:.5g}."
    text = (
        f"Your peak is {format_bytes(ours_bytes)}, {ours_bytes / most_bytes:.0%} of the eager "
        f"step's, with {ours_flops / flops - 1:+.0%} arithmetic in matrix products."
    )
    if ours_flops > MOST_PRODUCTS * flops:
        return f"{text} At most {MOST_PRODUCTS - 1:.0%} more is allowed: what is computed twice?"
    if ours_bytes > MOST_PEAK * most_bytes:
        return f"{text} At most {MOST_PEAK:.0%} is allowed: what does backward still find?"
    return checks.Correct(f"That is right. {text}")


def _on_the_cpu(prepare):
    """Return two losses, and what the second step takes: its peak beyond the weights, by the
    allocator's count, and the FLOPs of its matrix products. The budget stays as it was."""
    torch._dynamo.reset()
    with partitioner.patch(activation_memory_budget=partitioner.activation_memory_budget):
        steps = train_blocks("cpu", prepare)
        first = next(steps).item()  # compiles
        with cpu_record(with_flops=True) as record:
            second = next(steps).item()
    torch._dynamo.reset()
    flops = sum(event.flops for event in record.key_averages() if event.key in PRODUCTS)
    return (first, second), allocator_peak(record), flops
