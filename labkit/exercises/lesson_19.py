"""Exercises of lesson 19: how many GPUs a 70B takes, and smaller units; one rank simulated."""

from bisect import bisect_left
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import labkit as lab
from gpumem.runs import Run
from gpumem.units import GIB, format_bytes
from labkit.exercises.checks import Correct, NotAttempted, expect_limit, memory_target, train_steps
from labkit.exercises.engine import check_of

MACHINE = 8  # GPUs to one
MOST_GPUS = 1024  # beyond it the simulation takes minutes
TARGET_BYTES = 11 * GIB // 2
MORE_TRAFFIC = 1.1
EIGHT = {"model": "Llama-3.1-8B", "layers": 32, "seq_len": 512, "gpu": "h100", "ranks": 64}


def by_layer(net, **options):
    """The units of the lesson: each layer, and the rest with the root."""
    for layer in net.model.layers:
        fully_shard(layer, **options)


@cache
def one_rank(cut: Any, *, model: str, layers: int, seq_len: int, gpu: str, ranks: int) -> Run:
    """One of ``ranks`` GPUs in a training step with one row each, after ``cut(net, **options)``."""

    def train(device, layers):
        net = lab.model(model, layers=layers)
        lab.checkpointing(net)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True}
        cut(net, **options)
        if not isinstance(net, FSDPModule):
            fully_shard(net, **options)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        rows = lab.batches(device=device, batch_size=1, seq_len=seq_len)
        yield from train_steps(net, optimizer, rows)

    with lab.pretend():
        return lab.simulate(train, gpu=gpu, ranks=ranks, alike="layers", layers=layers)


def seventy(ranks: int) -> Run:
    """Llama-2-70B on ``ranks`` GPUs of 24 GB."""
    size = {"model": "Llama-2-70B", "layers": 80, "seq_len": 2048}
    return one_rank(by_layer, gpu="rtx-4090", ranks=ranks, **size)


def fewest():
    # 16 bytes for each of 69 billion parameters: with 64 GPUs that is 16 GiB. Halve from there.
    counts = range(64, 129, 8)
    return counts[bisect_left(counts, True, key=lambda ranks: seventy(ranks).fits)]


@check_of("19-1", fewest)
def check_fewest(answer):
    found = expect_limit(answer, "GPUs", seventy, most=MOST_GPUS, step=-MACHINE)
    if isinstance(found, str) and found.endswith("fit, too."):
        return found.split(" But ")[0] + " That fits, but it is not the fewest."
    return found


def cut(net, **options):
    for part in (*net.model.layers, net.model.embed_tokens, net.lm_head):
        fully_shard(part, **options)


@check_of("19-2", cut)
def check_cut(answer):
    def watched(net, **options):
        answer(net, **options)
        if not any(isinstance(parameter, DTensor) for parameter in net.parameters()):
            raise NotAttempted("No part is a unit yet: call `fully_shard(part, **options)`.")

    run = one_rank(watched, **EIGHT)
    usual = one_rank(by_layer, **EIGHT)
    if problem := memory_target(run, TARGET_BYTES):
        if run.peak_bytes > 2 * usual.peak_bytes:
            problem += " Is there a unit that holds all layers? It is gathered whole."
        return problem
    if run.sent_bytes > MORE_TRAFFIC * usual.sent_bytes:
        more = run.sent_bytes / usual.sent_bytes - 1
        return f"The peak is low enough, but each rank sends {more:.0%} more than by layers."
    return Correct(
        f"That is right: {format_bytes(run.peak_bytes)} in place of "
        f"{format_bytes(usual.peak_bytes)}."
    )
