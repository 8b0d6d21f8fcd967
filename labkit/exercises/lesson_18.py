"""Exercises of lesson 18: how many GPUs a 70B takes, and smaller units.

Both simulate one rank of many, as the lesson does; neither starts a process.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import labkit as lab
from labkit.exercises.checks import Correct, NotAttempted, memory_target, train_steps, whole_number
from labkit.exercises.engine import check_of
from labkit.runs import Run
from labkit.values import GIB, format_bytes


def by_layer(net, **options):
    """The units of the lesson: each layer, and the rest with the root."""
    for layer in net.model.layers:
        fully_shard(layer, **options)


def one_rank(cut: Any, *, model: str, layers: int, seq_len: int, gpu: str, ranks: int) -> Run:
    """One of ``ranks`` GPUs in a training step with one row each, after ``cut(net, **options)``."""

    def train(device, layers):
        net = lab.model(model, layers=layers)
        lab.checkpointing(net)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True}
        cut(net, **options)
        fully_shard(net, **options)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        rows = lab.batches(device=device, batch_size=1, seq_len=seq_len)
        yield from train_steps(net, optimizer, rows)

    with lab.pretend():
        return lab.simulate(train, gpu=gpu, ranks=ranks, alike="layers", layers=layers)


MACHINE = 8  # GPUs to one


@cache
def seventy(ranks: int) -> Run:
    """Llama-2-70B on ``ranks`` GPUs of 24 GB."""
    size = {"model": "Llama-2-70B", "layers": 80, "seq_len": 2048}
    return one_rank(by_layer, gpu="rtx-4090", ranks=ranks, **size)


MOST_GPUS = 1024  # beyond it the simulation takes minutes


def fewest():
    # 16 bytes for each of 69 billion parameters: with 64 GPUs that is 16 GiB. Begin there.
    return next(ranks for ranks in range(64, 1024, 8) if seventy(ranks).fits)


@check_of(
    "18-1",
    fewest,
    "69 billion parameters, 16 bytes each, divided by N; and then the floor, which the "
    "shorter rows lower. Above which N is the sum below 23 GiB?",
    'Try `lab.simulate(sharded.train, gpu="rtx-4090", ranks=N, model="Llama-2-70B", layers=80, '
    'alike="layers", precision="amp-bf16", seq_len=2048).fits` for some N between 64 and 128.',
)
def check_fewest(answer):
    ranks = whole_number(answer, "the number of GPUs", most=MOST_GPUS)
    if ranks % MACHINE:
        return f"{ranks} GPUs do not fill machines of {MACHINE}."
    run = seventy(ranks)
    needed = format_bytes(max(run.peak_bytes, run.reserved_bytes))
    if not run.fits:
        return (
            f"With {ranks} each needs {needed}, and {format_bytes(run.capacity_bytes)} can be had: "
            "more are needed. (What the allocator *reserves* has to fit, not only the tensors.)"
        )
    if ranks > MACHINE and seventy(ranks - MACHINE).fits:
        return f"It fits with {ranks}: {needed} each. But one machine less would do, too."
    return Correct(
        f"Right: with {ranks} each needs {needed}, and with one machine less it does not fit."
    )


TARGET_BYTES = 11 * GIB // 2
MORE_TRAFFIC = 1.1
EIGHT = {"model": "Llama-3.1-8B", "layers": 32, "seq_len": 512, "gpu": "h100", "ranks": 64}


def cut(net, **options):
    for part in (*net.model.layers, net.model.embed_tokens, net.lm_head):
        fully_shard(part, **options)


@cache
def eight_by_layer() -> Run:
    return one_rank(by_layer, **EIGHT)


@check_of(
    "18-2",
    cut,
    "The root unit holds whatever no other unit does, and it is whole from the start of "
    "forward to its end, and again of backward. What is large and not in a layer?",
    "`net.model.embed_tokens` and `net.lm_head` have 525 million parameters each: make "
    "each a unit of its own, beside every one of `net.model.layers`.",
)
def check_cut(answer):
    def watched(net, **options):
        answer(net, **options)
        if not any(isinstance(parameter, DTensor) for parameter in net.parameters()):
            raise NotAttempted("No part is a unit yet: call `fully_shard(part, **options)`.")

    run = one_rank(watched, **EIGHT)
    usual = eight_by_layer()
    if problem := memory_target(run, TARGET_BYTES):
        whole = " Is there a unit that holds all layers? It is gathered whole."
        return problem + whole if run.peak_bytes > 2 * usual.peak_bytes else problem
    if run.sent_bytes > MORE_TRAFFIC * usual.sent_bytes:
        return (
            f"The peak is {format_bytes(run.peak_bytes)}, low enough, but each rank sends "
            f"{run.sent_bytes / 1e9:.1f} GB a step, and by layers {usual.sent_bytes / 1e9:.1f}."
        )
    return Correct(
        f"That is right: {format_bytes(run.peak_bytes)} in place of "
        f"{format_bytes(usual.peak_bytes)}, and {run.sent_bytes / 1e9:.1f} GB sent in place of "
        f"{usual.sent_bytes / 1e9:.1f}.",
    )
