"""What CUDA's kernels take from PyTorch's allocator beside the tensors that an operator returns.

cuBLAS: PyTorch hands it a block of its own memory for every pair of handle and stream and keeps it.
Handles belong to threads, and backward runs in a thread of its own: a training step holds two. From
2.15 on each product takes a block once it has its result, and gives it back.

Flash attention's backward: it sums the queries' gradient in float32 and, where several query heads
share a key head, makes the keys' and values' gradients for every query head before it adds them up.

Sources, in PyTorch: ``parseChosenWorkspaceSize`` and ``setWorkspaceForHandle`` in
``aten/src/ATen/cuda/CublasHandlePool.cpp`` (since 2.11 cuBLASLt shares the block,
https://github.com/pytorch/pytorch/pull/168175); ``mha_bwd`` in
``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``.

Limits: cuBLAS's default sizes, unless ``CUBLAS_WORKSPACE_CONFIG`` says otherwise; flash without
``torch.use_deterministic_algorithms``. What cuDNN and NCCL take is not known beforehand.
"""

from dataclasses import replace
from math import prod

import torch

from labkit.hardware.catalogue import Gpu
from labkit.trace import Category, Event, Phase, Storage, Trace
from labkit.values import KIB, MIB

#: ":4096:2:16:8", two blocks of 4 MiB and eight of 16 KiB.
DEFAULT_BYTES = 2 * 4096 * KIB + 8 * 16 * KIB
HOPPER_BYTES = 32 * MIB  # and Blackwell
ROCM_BYTES = 128 * MIB  # gfx94x, the AMD GPUs of the catalogue
LT_BYTES = MIB  # of cuBLASLt, which adds a bias, where it does not share cuBLAS's
#: Whether threads keep their block.
KEPT = torch.__version__ < (2, 15)
_MULTIPLYING = {"mm", "addmm", "bmm", "baddbmm", "gemm_4bit", "int8_linear_matmul"}


def workspace_bytes(gpu: Gpu) -> int:
    """Return the bytes of one workspace on ``gpu``; 0 where there is no cuBLAS (Apple)."""
    if gpu.unified:
        return 0
    if gpu.compute_capability is None:
        return ROCM_BYTES
    return HOPPER_BYTES if gpu.compute_capability[0] in (9, 10, 12) else DEFAULT_BYTES


def with_workspaces(trace: Trace, gpu: Gpu) -> Trace:
    """Return ``trace`` with what ``gpu`` adds: cuBLAS's when products have their results (the first
    of a thread, or all of them), and flash attention's when its backward has."""
    nbytes = workspace_bytes(gpu)
    products = _products(trace, nbytes) if nbytes else {}
    after = _flash_backwards(trace)
    storages, events, moved = list(trace.storages), [], []

    def take(what: str, nbytes: int, event: Event, *, kept: bool) -> None:
        kind, shape = Category.UNATTRIBUTED, (nbytes,)
        events.append(Event(len(storages), nbytes, event.phase, event.stream))
        storages.append(
            Storage(nbytes, kind, trace.device, what, "", "", event.phase, shape, "uint8")
        )
        if not kept:
            events.append(events[-1]._replace(change_bytes=-nbytes))

    for index, event in enumerate(trace.events):
        moved.append(len(events))
        events.append(event)
        if index in products:
            take("cuBLAS workspace", products[index], event, kept=KEPT)
        if index in after:
            take("flash attention's backward", after[index], event, kept=False)
    moved.append(len(events))
    step_starts = tuple(moved[start] for start in trace.step_starts)
    return replace(trace, storages=tuple(storages), events=tuple(events), step_starts=step_starts)


def _products(trace: Trace, nbytes: int) -> dict[int, int]:
    """Return the bytes that products take, by the event of their result: where blocks are kept,
    only those with which forward's and backward's thread first multiply."""
    found: dict[int, int] = {}
    phases = set()
    for index, storage, change_bytes in trace.changes():
        if change_bytes <= 0 or storage.operator not in _MULTIPLYING:
            continue
        phase = trace.events[index].phase
        if not KEPT:
            found[index] = LT_BYTES if storage.operator == "addmm" else nbytes
        elif phase in (Phase.FORWARD, Phase.BACKWARD) and phase not in phases:
            phases.add(phase)
            found[index] = nbytes
    return found


def flash_backward_bytes(query: tuple[int, ...], key: tuple[int, ...], item_bytes: int) -> int:
    """Return the bytes that flash attention's backward takes beside its results.

    ``query`` and ``key`` are shapes, [batch, heads, tokens, head size].
    """
    batch, heads, tokens, size = query
    rows = batch * heads * -(-tokens // 128) * 128
    row_size = -(-size // 32) * 32 if size <= 128 else -(-size // 64) * 64
    sums = 4 * rows * (row_size + 1)  # the gradient, and one number for each row
    if key[1] == heads:
        return sums
    return sums + 2 * batch * heads * key[2] * size * item_bytes


_FLASH_BACKWARD = "_scaled_dot_product_flash_attention_backward"


def _flash_backwards(trace: Trace) -> dict[int, int]:
    """Return what each flash backward on the device took besides, by its last result's event."""
    found, results = {}, []
    for index, storage, change_bytes in trace.changes():
        if storage.operator != _FLASH_BACKWARD or change_bytes <= 0:
            results = []
            continue
        results.append(storage)
        if len(results) == 3:  # the gradients of query, key and value
            query, key, _ = results
            size = query.nbytes // prod(query.shape)
            found[index] = flash_backward_bytes(query.shape, key.shape, size)
            results = []
    return found
