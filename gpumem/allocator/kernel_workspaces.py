"""What PyTorch's CUDA kernels take from the allocator while they run, beside their results.

Softmax's backward multiplies gradient and result into a tensor of its own before it sums the rows.
A mean loss first computes the loss of each element. Scattering into a mask counts what is before
each place. Group norm computes a scale and a shift for every channel of every image. Drawing from a
distribution divides it by random numbers. ``unfold`` first makes room for as much as it reads. The
gradient of distances is first that of each pair. ``isin`` compares each pair. A number that a
tensor is the power of becomes a tensor. Sums, sorts and attention have modules of their own.

Sources, in PyTorch's ``aten/src/ATen/native/cuda``: ``softmax_backward_cuda_out`` in
``SoftMax.cu``; ``launch_masked_scatter_kernel`` in ``IndexKernel.cu``;
``GroupNormKernelImplInternal`` and ``GroupNormBackwardKernelImplInternal`` in
``group_norm_kernel.cu``; ``multinomial_out`` in ``../Distributions.cpp``;
``im2col_cuda`` in ``Im2Col.cu``; ``_pdist_backward`` in ``../Distance.cpp``;
``isin_default_kernel_gpu`` in ``TensorCompare.cpp``; ``pow_Scalar_out`` in ``../Pow.cpp``.

Limits: GPUs with memory of their own. What a kernel takes before its results is logged after them.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from gpumem.allocator import attention_workspaces, reductions, sorting
from gpumem.allocator.changes import Change, held
from gpumem.hardware.catalogue import Gpu

aten = torch.ops.aten


def kernel_workspaces(
    func: Any, args: tuple, kwargs: Mapping[str, Any], *, gpu: Gpu
) -> list[Change]:
    """Return what the operator takes and frees on ``gpu``; nothing if it runs on the host."""
    rule = _RULES.get(func)
    if rule is None or gpu.unified:
        return []
    first = next(each for each in args if isinstance(each, torch.Tensor))
    return [] if first.device.index is None else rule(gpu, *args, **kwargs)


def _first_again(gpu: Gpu, first: torch.Tensor, *_: Any, **__: Any) -> list[Change]:
    return held(first.nbytes)


def _mean_loss(gpu: Gpu, losses: torch.Tensor, target: Any, reduction: int = 1, *_: Any, **__: Any):
    return held(losses.nbytes) if reduction else []


def _masked_scatter(gpu: Gpu, tensor: torch.Tensor, *_: Any) -> list[Change]:
    return held(8 * tensor.numel(), tensor.numel())


def _masked_scatter_backward(gpu: Gpu, grad: torch.Tensor, _: Any, shape: Any) -> list[Change]:
    return held(prod(shape) * grad.element_size())


def _group_norm(
    gpu: Gpu,
    image: torch.Tensor,
    weight: Any,
    bias: Any,
    n: int,
    c: int,
    pixels: int,
    groups: int,
    *_: Any,
) -> list[Change]:
    half, affine = image.element_size() == 2, weight is not None or bias is not None
    item_bytes = 4 if half else image.element_size()
    blocks = half * [item_bytes * n * groups] * 2
    return held(*blocks, *(affine and pixels > 1) * [item_bytes * n * c] * 2)


def _group_norm_backward(
    gpu: Gpu,
    grad: torch.Tensor,
    image: Any,
    mean: Any,
    deviation: Any,
    weight: Any,
    n: int,
    c: int,
    pixels: int,
    groups: int,
    wanted: list[bool],
) -> list[Change]:
    item_bytes = max(4, grad.element_size())
    of_channels, of_groups = item_bytes * n * c, item_bytes * n * groups
    of_results = 2 * [of_groups] + (pixels > 1 and weight is not None) * [of_channels]
    return held(of_channels, of_channels, *(of_results if wanted[0] else []))


def _distances_gradient(gpu: Gpu, grad: Any, points: torch.Tensor, *_: Any) -> list[Change]:
    return held((points.shape[0] - 1) * points.nbytes)


def _multinomial(
    gpu: Gpu, weights: torch.Tensor, draws: int, replacement: bool = False, **_: Any
) -> list[Change]:
    return [] if replacement and draws > 1 else held(weights.nbytes)


def _isin(gpu: Gpu, elements: torch.Tensor, wanted: torch.Tensor, **_: Any) -> list[Change]:
    return held(elements.numel() * wanted.numel(), elements.numel())


def _power_of_number(gpu: Gpu, base: float, exponent: torch.Tensor, **_: Any) -> list[Change]:
    return [] if base == 1 else held(torch.tensor(base).itemsize)


_RULES = {
    aten.isin.Tensor_Tensor: _isin,
    aten.pow.Scalar: _power_of_number,
    aten._softmax_backward_data.default: _first_again,
    aten.mse_loss.default: _mean_loss,
    aten.smooth_l1_loss.default: _mean_loss,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.multinomial.default: _multinomial,
    aten._pdist_backward.default: _distances_gradient,
    aten.im2col.default: _first_again,
    **reductions.RULES,
    **sorting.RULES,
    **attention_workspaces.RULES,
}
