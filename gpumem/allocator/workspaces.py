"""What cuBLAS takes from PyTorch's allocator beside the tensors that an operator returns.

PyTorch hands it a block of its own memory for every pair of handle and stream and keeps it.
Handles belong to threads, and backward runs in a thread of its own: a training step holds two. From
2.15 on each product takes a block once it has its result, and gives it back.

Source, in PyTorch: ``parseChosenWorkspaceSize`` and ``setWorkspaceForHandle`` in
``aten/src/ATen/cuda/CublasHandlePool.cpp`` (since 2.11 cuBLASLt shares the block,
https://github.com/pytorch/pytorch/pull/168175).

Limits: cuBLAS's default sizes, unless ``CUBLAS_WORKSPACE_CONFIG`` says otherwise. What cuDNN and
NCCL take is not known beforehand.
"""

from dataclasses import replace

import torch

from gpumem.hardware.catalogue import Gpu
from gpumem.trace import Category, Event, Phase, Storage, Trace
from gpumem.units import KIB, MIB

#: ":4096:2:16:8", two blocks of 4 MiB and eight of 16 KiB.
DEFAULT_BYTES = 2 * 4096 * KIB + 8 * 16 * KIB
HOPPER_BYTES = 32 * MIB  # and Blackwell
ROCM_BYTES = 128 * MIB  # gfx94x, the AMD GPUs of the catalogue
LT_BYTES = MIB  # of cuBLASLt, which adds a bias, where it does not share cuBLAS's
#: Whether threads keep their block.
KEPT = torch.__version__ < (2, 15)
_MULTIPLYING = {
    *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot"),
    *("gemm_4bit", "int8_linear_matmul"),
}


def workspace_bytes(gpu: Gpu) -> int:
    """Return the bytes of one workspace on ``gpu``; 0 where there is no cuBLAS (Apple)."""
    if gpu.unified:
        return 0
    if gpu.compute_capability is None:
        return ROCM_BYTES
    return HOPPER_BYTES if gpu.compute_capability[0] in (9, 10, 12) else DEFAULT_BYTES


def with_workspaces(trace: Trace, gpu: Gpu) -> Trace:
    """Return ``trace`` with what ``gpu`` adds for cuBLAS when products have their results: the
    first of a thread, or all of them."""
    nbytes = workspace_bytes(gpu)
    products = _products(trace, nbytes) if nbytes else {}
    storages, events, moved = list(trace.storages), [], []

    def change(storage: int, change_bytes: int, what: str, event: Event) -> None:
        events.append(Event(storage, change_bytes, event.phase, event.stream))
        if storage == len(storages):
            kind, shape = Category.UNATTRIBUTED, (change_bytes,)
            storages.append(
                Storage(change_bytes, kind, trace.device, what, "", "", event.phase, shape, "uint8")
            )

    for index, event in enumerate(trace.events):
        moved.append(len(events))
        events.append(event)
        first = len(storages)
        if index in products:
            change(first, products[index], "cuBLAS workspace", event)
            if not KEPT:
                change(first, -products[index], "cuBLAS workspace", event)
    moved.append(len(events))
    step_starts = tuple(moved[start] for start in trace.step_starts)
    return replace(trace, storages=tuple(storages), events=tuple(events), step_starts=step_starts)


def _products(trace: Trace, nbytes: int) -> dict[int, int]:
    """Return the bytes that products take, by the event of their result: where blocks are kept,
    only those with which forward's and backward's thread first multiply."""
    found: dict[int, int] = {}
    threads = set()
    for index, storage, change_bytes in trace.changes():
        if change_bytes <= 0 or storage.operator not in _MULTIPLYING:
            continue
        in_backward = trace.events[index].phase is Phase.BACKWARD  # which has its own thread
        if not KEPT:
            found[index] = LT_BYTES if storage.operator == "addmm" else nbytes
        elif in_backward not in threads:
            threads.add(in_backward)
            found[index] = nbytes
    return found
