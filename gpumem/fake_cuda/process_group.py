"""A process group without processes: the world that one simulated rank of many is part of.

PyTorch's fake process group answers every collective at once, with nothing in it. Shapes, and so
bytes, are those of a real group: what a rank holds among 512 can be seen on a machine with one.

Limits: every rank but the simulated one is imaginary, so nothing can wait for another and no
value is right. Buffers that NCCL and gloo keep for themselves are no tensors.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from gpumem.fake_cuda.cuda_names import GPU_DEVICE
from gpumem.inputs import InputError, positive_int


@contextmanager
def fake_ranks(ranks: int, rank: int, *, as_cuda: bool) -> Iterator[None]:
    """Be rank ``rank`` of ``ranks`` inside the block."""
    ranks = positive_int(ranks, "ranks", most=1 << 16)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < ranks:
        raise InputError(f"rank must be from 0 to {ranks - 1}, not {rank!r}")
    if dist.is_initialized():
        raise InputError("a process group is there already: ranks can be simulated without one")
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist.DeviceMesh, "__init__", _real_mesh))
        stack.enter_context(_joined(ranks, rank))
        if as_cuda:
            from torch.distributed.fsdp._fully_shard import _fully_shard

            # A mesh knows a kind of device, and takes the CPU to have no number; ours has one.
            stack.enter_context(mock.patch.object(_fully_shard, "_get_device_from_mesh", _gpu))
        yield


@contextmanager
def one_of(ranks: int) -> Iterator[None]:
    """Be the first of ``ranks`` on this machine's GPU. The others are imaginary, and send nothing:
    bytes are right, values are not."""
    with nullcontext() if ranks == 1 else _joined(ranks, 0):
        yield


@contextmanager
def _joined(ranks: int, rank: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Joining a group replaces it, for good, by one that names the rank before every line.
    with mock.patch.object(sys, "excepthook", sys.excepthook):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()


_MESH = dist.DeviceMesh.__init__


def _real_mesh(mesh: Any, device_type: str, *args: Any, **options: Any) -> None:
    """Who is where must be known, even among fake tensors: `DeviceMesh` reads it as numbers."""
    if device_type == "cuda":
        device_type = GPU_DEVICE.type
    with _disable_current_modes(), unset_fake_temporarily():
        if isinstance(places := options.get("_rank_map"), FakeTensor):
            # Only `init_device_mesh` makes one anew, and that is always 0, 1, 2, ...
            options["_rank_map"] = torch.arange(places.numel(), dtype=torch.int)
        _MESH(mesh, device_type, *args, **options)


def _gpu(mesh: Any) -> torch.device:
    return GPU_DEVICE
