"""What CUDA's kernels take from PyTorch's allocator beside the tensors that an operator returns.

cuBLAS: PyTorch hands it a block of its own memory for every pair of handle and stream and keeps it.
Handles belong to threads, and backward runs in a thread of its own: a training step holds two.

Flash attention's backward: it sums the queries' gradient in float32 and, where several query heads
share a key head, makes the keys' and values' gradients for every query head before it adds them up.

Sources, in PyTorch: ``parseChosenWorkspaceSize`` and ``setWorkspaceForHandle`` in
``aten/src/ATen/cuda/CublasHandlePool.cpp`` (since 2.11 cuBLASLt shares the block,
https://github.com/pytorch/pytorch/pull/168175); ``mha_bwd`` in
``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``.

Limits: cuBLAS's default sizes, unless ``CUBLAS_WORKSPACE_CONFIG`` says otherwise; flash without
``torch.use_deterministic_algorithms``. What cuDNN and NCCL take is not known beforehand.
"""

from collections.abc import Iterator
from math import prod

from labkit.catalogue import Gpu
from labkit.memory import KIB, MIB, Category, Event, Phase, Storage, Trace

#: ":4096:2:16:8", two blocks of 4 MiB and eight of 16 KiB.
DEFAULT_BYTES = 2 * 4096 * KIB + 8 * 16 * KIB
HOPPER_BYTES = 32 * MIB  # and Blackwell
ROCM_BYTES = 128 * MIB  # gfx94x, the AMD GPUs of the catalogue
_MULTIPLYING = {"mm", "addmm", "bmm", "baddbmm", "gemm_4bit", "int8_linear_matmul"}


def workspace_bytes(card: Gpu) -> int:
    """Bytes of one workspace on ``card``; 0 where there is no cuBLAS (Apple)."""
    if card.unified:
        return 0
    if card.compute_capability is None:
        return ROCM_BYTES
    return HOPPER_BYTES if card.compute_capability[0] in (9, 10, 12) else DEFAULT_BYTES


def with_workspaces(trace: Trace, card: Gpu) -> Trace:
    """``trace`` with what ``card`` adds: cuBLAS's just before the first products, and flash
    attention's when its backward has made its results."""
    nbytes = workspace_bytes(card)
    before = dict(_first_products(trace)) if nbytes else {}
    after = _flash_backwards(trace)
    storages, events, moved = list(trace.storages), [], {}

    def add(what: str, nbytes: int, phase: Phase, *, lasts: bool) -> None:
        storages.append(Storage(nbytes, Category.UNATTRIBUTED, trace.device, what, "", "", phase,
                                (nbytes,), "uint8"))  # fmt: skip
        number = len(storages) - 1
        events.extend(Event(number, n, phase) for n in ([nbytes] if lasts else [nbytes, -nbytes]))

    for index, event in enumerate(trace.events):
        moved[index] = len(events)
        if index in before:
            add("cuBLAS workspace", nbytes, before[index], lasts=True)
        events.append(event)
        if index in after:
            add("flash attention's backward", after[index], event.phase, lasts=False)
    moved[len(trace.events)] = len(events)
    marks = tuple(mark._replace(index=moved[mark.index]) for mark in trace.marks)
    return Trace(trace.device, tuple(storages), tuple(events), marks, trace.work)


def _first_products(trace: Trace) -> Iterator[tuple[int, Phase]]:
    """Where the forward's and the backward's thread first multiply on the device."""
    waiting = {Phase.FORWARD, Phase.BACKWARD}
    for index, storage, change_bytes in trace.changes():
        if not waiting:
            return
        phase = trace.events[index].phase
        if change_bytes > 0 and storage.operator in _MULTIPLYING and phase in waiting:
            waiting.remove(phase)
            yield index, phase


def flash_backward_bytes(query: tuple[int, ...], key: tuple[int, ...], item_bytes: int) -> int:
    """What flash attention's backward takes beside its results.

    Args:
        query: shape [batch, heads, tokens, head size].
        key: shape [batch, key heads, tokens, head size].
        item_bytes: of one element, 2.
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
    """For the last result of each flash backward on the device: what it took besides."""
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
