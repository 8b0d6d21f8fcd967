"""What fused attention takes from PyTorch's allocator beside its results.

Forward, flash divides the keys of a few queries among blocks of threads, as in decoding: each part
has its own result, and its log-sum-exp, in float32.

Backward, flash: a number for each row of the query, and the query's gradient summed in float32.
Where several query heads share a key head, the keys' and values' gradients for every query head
besides, before they are added up. Memory-efficient: the same number for each row, and tiles in
which the gradients are summed.

Sources, in PyTorch's ``aten/src/ATen/native/transformers/cuda``: ``mha_bwd`` in
``flash_attn/flash_api.cpp``, and for parts of the keys ``num_splits_heuristic`` and
``set_params_splitkv`` there; ``_flash_attention_backward`` and ``_efficient_attention_backward`` in
``attention_backward.cu``; ``workspace_size`` in ``mem_eff_attention/kernel_backward.h``; for cuDNN
``run_cudnn_SDP_bprop`` in ``aten/src/ATen/native/cudnn/MHA.cpp``. Which tiles the memory-efficient
kernels have was read from what they take on phantom GPUs, as tests/phantom/test_attention.py does
again.

Limits: flash without ``torch.use_deterministic_algorithms``; no bias that needs a gradient. Dropout
makes the memory-efficient kernel of GPUs with 99 KiB of shared memory another one for heads of 65
to 96, which is not seen.
"""

from typing import Any

import numpy as np
import torch

from gpumem.allocator.changes import Change, copies, held, up
from gpumem.hardware.catalogue import Gpu

aten = torch.ops.aten
Shape = tuple[int, ...]
#: With at least 163 KiB of shared memory for a block of threads.
_LARGE = ((8, 0), (9, 0), (10, 0))
_KEYS = 64  # in a tile
_MOST_SPLITS = 200
_MOST_PARTS = 128  # of the keys, in a forward pass


def _flash_forward(
    gpu: Gpu,
    query: torch.Tensor,
    key: torch.Tensor,
    _: Any,
    dropout: float = 0.0,
    *__: Any,
    **___: Any,
) -> list[Change]:
    batch, heads, tokens, size = query.shape
    if dropout or gpu.multiprocessors is None:
        return []
    if tokens == 1:  # those that share a head of the keys count as its queries
        heads, tokens = key.shape[1], heads // key.shape[1]
    blocks = -(-key.shape[2] // keys_in_block(size))
    parts = _key_parts(batch * heads * -(-tokens // 64), 2 * gpu.multiprocessors, blocks)
    row_bytes = 4 * parts * batch * heads * tokens
    return held(row_bytes, row_bytes * up(size, 32 if size <= 128 else 64)) if parts > 1 else []


def keys_in_block(size: int) -> int:
    """Return how many keys flash attention reads at a time, by the size of a head."""
    return 256 if size <= 64 else 128 if size <= 128 else 64


def divides_keys(rows: int, gpu: Gpu) -> bool:
    """Return whether flash may divide the keys among blocks of threads, for so many heads of the
    keys in a batch that is decoded."""
    newer = (gpu.compute_capability or (0, 0)) >= (8, 0) and gpu.multiprocessors
    return bool(newer) and _key_parts(rows, 2 * gpu.multiprocessors, 1 << 20) > 1


def _key_parts(rows: int, threads: int, blocks: int) -> int:
    """Return into how many parts ``blocks`` of keys are divided for ``rows`` of blocks of queries:
    the fewest that keep ``threads``, pairs of multiprocessors, almost as busy as any number can."""
    if rows >= np.float32(0.8) * np.float32(threads):
        return 1
    busy = {}
    for parts in range(1, min(_MOST_PARTS, threads, blocks) + 1):
        if parts == 1 or -(-blocks // parts) != -(-blocks // (parts - 1)):
            waves = np.float32(rows * parts) / np.float32(threads)
            busy[parts] = waves / np.ceil(waves)
    return next(parts for parts, share in busy.items() if share >= 0.85 * float(max(busy.values())))


def _flash(
    gpu: Gpu,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    _: Any,
    out: torch.Tensor,
    *__: Any,
    **___: Any,
) -> list[Change]:
    blocks = flash_backward(query.shape, key.shape, query.element_size())
    return _behind(_copies_by_token(grad, out), blocks)


def _efficient(
    gpu: Gpu, grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any
) -> list[Change]:
    if gpu.compute_capability is None:
        return []
    blocks = efficient_backward(query.shape, key.shape, query.element_size(), gpu)
    return _behind(_copies_by_token(grad), blocks)


def _cudnn(gpu: Gpu, grad: torch.Tensor, *_: Any, **__: Any) -> list[Change]:
    return held(*copies(grad)) if grad.stride(-1) != 1 else []


def _copies_by_token(*tensors: torch.Tensor) -> list[int]:
    """Return the bytes of the copies of what is not laid out [batch, tokens, heads, size]."""
    return copies(*(tensor.transpose(1, 2) for tensor in tensors))


def _behind(first: list[int], changes: list[Change]) -> list[Change]:
    """Return ``changes`` of a kernel that holds the ``first`` blocks all the while."""
    taken = held(*first)
    moved = [(block + len(first), nbytes) for block, nbytes in changes]
    return [*taken[: len(first)], *moved, *taken[len(first) :]]


def flash_backward(query: Shape, key: Shape, item_bytes: int) -> list[Change]:
    """Return what flash attention's backward takes and frees.

    ``query`` and ``key`` are shapes, [batch, heads, tokens, head size].
    """
    batch, heads, tokens, size = query
    rows = batch * heads * up(tokens, 128)
    blocks = [4 * rows, 4 * rows * up(size, 32 if size <= 128 else 64)]
    if key[1] != heads:
        blocks += 2 * [batch * heads * key[2] * size * item_bytes]
    return held(*blocks)


def efficient_backward(query: Shape, key: Shape, item_bytes: int, gpu: Gpu) -> list[Change]:
    """Return what memory-efficient attention's backward takes and frees; shapes as for flash."""
    batch, heads, tokens, size = query
    row_bytes = 4 * batch * heads * tokens
    tiles_bytes = batch * heads * _tiles_bytes(query, key, item_bytes, gpu)
    if item_bytes == 2:
        return [(0, row_bytes), (1, tiles_bytes), (0, -row_bytes), (1, -tiles_bytes)]
    # In float32 the product of gradient and result is summed, and the sums are brought in order.
    product_bytes = row_bytes * size
    changes = [(0, product_bytes), (1, row_bytes)]
    rows, tiles = 1, 2
    if heads > 1 and tokens > 1:
        changes += [(2, row_bytes), (1, -row_bytes)]
        rows, tiles = 2, 3
    changes += [(0, -product_bytes), (tiles, tiles_bytes)]
    return [*changes, (rows, -row_bytes), (tiles, -tiles_bytes)]


def _tiles_bytes(query: Shape, key: Shape, item_bytes: int, gpu: Gpu) -> int:
    """Return the bytes of one head's tiles: the query's, each with a lock, then keys and values."""
    batch, heads, tokens, size = query
    rows, columns, sums_keys = _tile(size, item_bytes, gpu)
    tile_bytes = 4 * rows * columns + 16
    nbytes = -(-tokens // rows) * -(-size // columns) * tile_bytes
    if sums_keys:
        splits = min(-(-key[2] // _KEYS), max(1, _MOST_SPLITS // (batch * heads)))
        nbytes += 2 * splits * 4 * _KEYS * up(size, rows)
    return nbytes


def _tile(size: int, item_bytes: int, gpu: Gpu) -> tuple[int, int, bool]:
    """Return rows and columns of a query's tile, and whether keys and values need sums, too."""
    if size <= 64:
        return 64, 64, False
    large = gpu.compute_capability in _LARGE
    if item_bytes == 4:
        return (128, 64, False) if large else (64, 64, False)
    if size > 128:
        return 128, 64, True
    if large:
        return 128, 128, False
    if gpu.compute_capability[0] == 7 or size <= 96:
        return 128, 64, False
    return 64, 64, True


RULES = {
    aten._scaled_dot_product_flash_attention.default: _flash_forward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn,
}
