"""What PyTorch's CUDA kernels for sums, means and other reductions take from the allocator while
they run.

A sum of many numbers into few is divided among blocks of threads. Each writes what it has into a
buffer, and the last block to finish, which a counter tells it, adds the buffer up. Gradients of
biases and of norms' weights are such sums, also in a convolution's backward. Whole numbers and
truth values become whole numbers of 64 bits first.

Source: ``setReduceConfig``, ``global_memory_size`` and ``semaphore_size`` in PyTorch's
``aten/src/ATen/native/cuda/Reduce.cuh``; ``sum_functor`` in ``ReduceSumProdKernel.cu``;
``argmax_kernel_cuda_impl`` in ``ReduceArgMaxKernel.cu``, ``max_launch_kernel`` in
``ReduceMaxValuesKernel.cu``. Threads of
a multiprocessor: NVIDIA's CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability".

Limits: tensors that 32 bits can index. NVIDIA's GPUs only.
"""

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import torch

from gpumem.allocator.changes import Change, copies, held
from gpumem.hardware.catalogue import Gpu

WARP = 32
MOST_THREADS = 512
FEWEST_VALUES, MOST_VALUES = 16, 256  # that one thread adds up
THREADS_PER_MULTIPROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
INDEXED_BYTES = 1 << 31
PAIR_BYTES = 16  # a value of up to 64 bits and its index of 64

aten = torch.ops.aten


class _Axis(NamedTuple):
    size: int
    stride: int  # in elements


def _sum(
    gpu: Gpu, tensor: torch.Tensor, dims: Any = None, *_: Any, dtype: Any = None, **__: Any
) -> list[Change]:
    return _reduced(gpu, tensor, dims, dtype or tensor.dtype)


def _extreme(gpu: Gpu, tensor: torch.Tensor, dims: Any = None, *_: Any) -> list[Change]:
    return _reduced(gpu, tensor, dims, tensor.dtype) if tensor.is_floating_point() else []


def _index(gpu: Gpu, tensor: torch.Tensor, dim: int | None = None, *_: Any) -> list[Change]:
    """``argmax`` and the like: a block of threads passes on a value with its index."""
    if gpu.multiprocessors is None or not tensor.numel() or tensor.nbytes >= INDEXED_BYTES:
        return []
    dims = range(tensor.dim()) if dim is None else [dim % max(tensor.dim(), 1)]
    flattened = copies(tensor) if dim is None else []
    workspaces = sum_workspaces(tensor, dims, tensor.dtype, gpu, part_bytes=PAIR_BYTES)
    return held(*flattened, *workspaces)


def _bias_gradient(gpu: Gpu, grad: torch.Tensor, *rest: Any) -> list[Change]:
    if not rest[-1][2]:
        return []
    return _reduced(gpu, grad, [0, *range(2, grad.dim())], grad.dtype)  # all but the channels


def _reduced(gpu: Gpu, tensor: torch.Tensor, dims: Any, dtype: torch.dtype) -> list[Change]:
    if gpu.multiprocessors is None or not tensor.numel() or tensor.is_complex():
        return []
    copy = []
    if not tensor.is_floating_point():
        if tensor.dtype is not torch.int64:
            copy = [8 * tensor.numel()]  # it is made one of int64 first
        dtype = torch.int64
    item_bytes = dtype.itemsize if copy else tensor.element_size()
    if tensor.numel() * item_bytes >= INDEXED_BYTES:
        return held(*copy)
    dims = [dims] if isinstance(dims, int) else dims
    dims = range(tensor.dim()) if not dims else [dim % tensor.dim() for dim in dims]
    return held(*copy, *sum_workspaces(tensor, dims, dtype, gpu))


def sum_workspaces(
    tensor: torch.Tensor,
    dims: Iterable[int],
    dtype: torch.dtype,
    gpu: Gpu,
    *,
    part_bytes: int | None = None,
) -> tuple[int, ...]:
    """Return what a sum of ``tensor`` over ``dims`` into ``dtype`` takes besides its result.

    Another reduction if a block of threads passes on ``part_bytes`` for each result.
    """
    dims = set(dims)
    item_bytes = tensor.element_size() if dtype.is_floating_point else dtype.itemsize
    axes = [_Axis(*pair) for pair in zip(tensor.shape, tensor.stride(), strict=True)]
    summed = [axis for dim, axis in enumerate(axes) if dim in dims]
    summed = _joined(sorted(summed, key=lambda axis: axis.stride))
    # In the order of the result, which is contiguous.
    kept = _joined(axis for dim, axis in reversed(list(enumerate(axes))) if dim not in dims)
    outputs, inputs = (prod(axis.size for axis in axes) for axes in (kept, summed))
    along_input = not kept or (bool(summed) and summed[0].stride < kept[0].stride)
    vector = 1
    if not summed and not kept:
        width_of, height_of = 1, 1
    elif along_input:
        width_of, height_of = inputs, outputs
        if summed[0].stride == 1 and inputs >= 128 and len(summed) == 1:
            width_of //= 8 if item_bytes == 2 and part_bytes is None else 4
    else:
        width_of, height_of = outputs, inputs
        if kept[0].stride == 1:
            others = [axis.stride for axis in (*summed, *kept[1:])]
            vector = next(n for n in (4, 2, 1) if not any(x % n for x in (kept[0].size, *others)))
            width_of //= vector
    width, height = _block(width_of, height_of, MOST_THREADS // vector)
    step_input = width if along_input else 1
    step_output = 1 if along_input else width
    if _up(inputs, step_input) < min(height * FEWEST_VALUES, MOST_VALUES):
        return ()  # each row of threads has outputs of its own
    step_input *= height
    values = _up(inputs, step_input)
    blocks = _up(outputs // vector, step_output)
    threads = THREADS_PER_MULTIPROCESSOR.get(gpu.compute_capability, 2048)
    target = gpu.multiprocessors * (threads // (width * height))
    if values < MOST_VALUES or blocks > target:
        return ()
    parts = min(_up(target, blocks), _up(values, FEWEST_VALUES))
    parts = max(parts, _up(values, MOST_VALUES))
    if parts == 1:
        return ()
    part_bytes = part_bytes or max(4, item_bytes, dtype.itemsize)
    buffer_bytes = part_bytes * outputs * parts
    if not along_input:
        buffer_bytes *= width * vector
    return buffer_bytes, 4 * blocks


def _joined(axes: Iterable[_Axis]) -> list[_Axis]:
    """Join axes that follow each other in memory; those of one element count for none."""
    joined: list[_Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if joined and axis.stride == joined[-1].stride * joined[-1].size:
            joined[-1] = _Axis(joined[-1].size * axis.size, joined[-1].stride)
        else:
            joined.append(axis)
    return joined


def _block(width_of: int, height_of: int, most: int) -> tuple[int, int]:
    """Return width and height of a block of threads (``set_block_dimension``)."""
    width, height = min(_power(width_of), most), min(_power(height_of), most)
    rows = min(height, most // min(width, WARP))
    return min(width, most // rows), rows


def _power(n: int) -> int:
    return 1 << (max(1, n).bit_length() - 1)


def _up(a: int, b: int) -> int:
    return -(-a // b)


RULES = {
    **dict.fromkeys(
        [
            *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
            *(aten.prod.default, aten.prod.dim_int),
        ],
        _sum,
    ),
    **dict.fromkeys(
        (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default), _extreme
    ),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim), _index),
    aten.convolution_backward.default: _bias_gradient,
}
