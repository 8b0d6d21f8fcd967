"""What PyTorch's CUDA kernels that sort take from the allocator while they run.

More than 4,096 numbers in a row are sorted by CUB, digit by digit of eight bits: from one buffer to
another if there are two digits or more, with counts of each digit's 256 values, for all and for
each block of threads. The gradient of an index, and that of an embedding of more than 3,072 tokens,
first sorts the indices. The embedding's then sums up to ten rows of one token at a time in float32,
with room for the case that no token comes twice.

Sources: ``InvokeOnesweep`` in CUB's ``device/dispatch/dispatch_radix_sort.cuh``; in PyTorch's
``aten/src/ATen/native/cuda``: ``Sort.cpp`` and ``Sort.cu``, ``index_put_with_sort_kernel`` in
``Indexing.cu``, ``embedding_dense_backward_cuda`` in ``Embedding.cu``,
``embedding_backward_cuda_kernel`` in ``EmbeddingBackwardKernel.cu``. How many numbers a block of
threads sorts was read from what CUB takes on phantom GPUs, as tests/phantom/test_sorting.py does
again.

Limits: before compute capability 9.0 numbers of 16 bits have another kernel, whose counts, 1.5 MB
at most, are left out, as are those with which CUB finds indices that differ. Since 8.0 the gradient
of an embedding of few rows, each met more than ten times, takes less than is counted.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from gpumem.allocator.changes import Change, copies, held, up
from gpumem.hardware.catalogue import Gpu

aten = torch.ops.aten
#: The most that are sorted without CUB, in one row; without a sort, by an embedding; by CUB in one
#: block of threads.
SMALL_ROW, FEW_TOKENS, ONE_BLOCK = 4096, 3072, 2304
#: Rows of one token that an embedding's gradient sums at a time.
SUMMED_ROWS = 10
#: Rows from which each is sorted by itself.
MANY_ROWS = 128
#: Numbers that a block of threads sorts, by the bytes of a number, before 8.0, 9.0 and since.
TILES = {8: (2816, 3840, 4608), 4: (2816, 3072, 5376), 2: (None, None, 5632)}
_INDEX = 8  # bytes


def radix_sort_bytes(count: int, key_bytes: int, bits: int, gpu: Gpu) -> int:
    """Return what CUB takes to sort ``count`` keys of so many ``bits``, each with an index."""
    digits = -(-bits // 8)
    buffers = up(count * key_bytes, 256) + up(count * _INDEX, 256) if digits > 1 else 0
    major = gpu.compute_capability[0] if gpu.compute_capability else 9
    tile = TILES.get(key_bytes, TILES[2])[(major >= 8) + (major >= 9)]
    counts = up(8 * digits * 256 + 4 * -(-count // tile) * 256 + 4 * digits, 256) if tile else 0
    return buffers + counts + 255


def _sort(gpu: Gpu, tensor: torch.Tensor, dim: int = -1, *_: Any, **__: Any) -> list[Change]:
    length = tensor.shape[dim] if tensor.dim() else 1
    if length <= SMALL_ROW:
        return held(_INDEX * length) if length > 1 else []
    rows, indices = tensor.numel() // length, _INDEX * tensor.numel()
    item_bytes = tensor.element_size()
    in_rows = tensor.stride(dim) == 1 and aten.is_non_overlapping_and_dense(tensor)
    # The rows, and both results, in the order of which CUB needs them.
    copied = [] if in_rows else [tensor.numel() * item_bytes, tensor.numel() * item_bytes, indices]
    whole = radix_sort_bytes(tensor.numel(), item_bytes, 8 * item_bytes, gpu)
    if rows == 1:
        return held(*copied, indices, whole)
    if rows < MANY_ROWS:
        return held(*copied, indices, indices, tensor.numel() * item_bytes, whole)
    return held(*copied, indices, up(tensor.numel() * item_bytes, 256) + up(indices, 256) + 255)


def _median(gpu: Gpu, tensor: torch.Tensor) -> list[Change]:
    sort = _sort(gpu, tensor.reshape(-1))
    return held(tensor.nbytes, _INDEX * tensor.numel(), *(n for _, n in sort if n > 0))


def _index_gradient(
    gpu: Gpu,
    tensor: torch.Tensor,
    indices: Sequence[Any],
    values: torch.Tensor,
    accumulate: bool = False,
    *_: Any,
) -> list[Change]:
    if not accumulate:
        return []
    given = [dim for dim, index in enumerate(indices) if index is not None]
    count = prod(torch.broadcast_shapes(*(indices[dim].shape for dim in given)))
    together = given[-1] - given[0] < len(given)
    moved = [] if together and tensor.is_contiguous() else [tensor.numel() * tensor.element_size()]
    behind = range(given[-1] + 1, tensor.dim()) if together else set(range(tensor.dim())) - {*given}
    places = tensor.numel() // max(1, prod(tensor.shape[dim] for dim in behind))
    sort = radix_sort_bytes(count, _INDEX, (places - 1).bit_length(), gpu)
    blocks = [*moved, *copies(values), *4 * [_INDEX * count]]
    return held(*blocks, sort if count > ONE_BLOCK else 1)


def _embedding_gradient(
    gpu: Gpu, grad: torch.Tensor, indices: torch.Tensor, rows: int, _: int, by_count: bool
) -> list[Change]:
    copied = copies(grad, indices)
    if indices.numel() <= FEW_TOKENS and not by_count:
        return held(*copied)
    return _sorted_sums(copied, grad, indices, rows, by_count, gpu)


def _bag_gradient(gpu: Gpu, grad: torch.Tensor, indices: torch.Tensor, *rest: Any) -> list[Change]:
    rows, by_count, mode = rest[4:7]
    return _sorted_sums([], grad, indices, rows, by_count, gpu) if mode != 2 else []  # 2: "max"


def _sorted_sums(
    copied: list[int],
    grad: torch.Tensor,
    indices: torch.Tensor,
    rows: int,
    by_count: bool,
    gpu: Gpu,
) -> list[Change]:
    """Return the changes while indices are sorted, while those that differ are found, and while
    rows of one token are summed, which needs the most unless rows are very short."""
    count, item_bytes = indices.numel(), indices.element_size()
    each, different = item_bytes * count, min(count, rows)
    sums = count // SUMMED_ROWS + different
    sort = radix_sort_bytes(count, item_bytes, rows.bit_length(), gpu) if count > ONE_BLOCK else 1
    of_different = [8, *2 * [item_bytes * different], 8]
    sum_bytes = sums * grad.shape[-1] * max(4, grad.element_size())
    steps = [
        [each, each, each, sort],
        [*(4 + by_count) * [each], 8],
        [*(3 + by_count) * [each], *of_different, item_bytes * sums, sum_bytes],
    ]
    changes: list[Change] = []
    for blocks in steps:
        first = len(changes) // 2
        changes += [(first + block, nbytes) for block, nbytes in held(*copied, *blocks)]
    return changes


RULES = {
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.median.default: _median,
    aten.index_put.default: _index_gradient,
    aten.index_put_.default: _index_gradient,
    aten._index_put_impl_.default: _index_gradient,
    aten.embedding_dense_backward.default: _embedding_gradient,
    aten._embedding_bag_backward.default: _bag_gradient,
}
