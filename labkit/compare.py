"""The relative error by which several lessons compare."""

import math
from collections.abc import Iterable

import torch

from gpumem.inputs import InputError, shown


def relative_error(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    reference: torch.Tensor | Iterable[torch.Tensor],
) -> float:
    """Return the norm of the difference over the norm of the reference, summed in float64.

    Several tensors (a model's gradients) are taken as one long vector.

    Raises:
        InputError: numbers of tensors or shapes differ, or the reference is zero throughout.
    """
    ours, theirs = _as_list(tensors), _as_list(reference)
    shapes = [[tuple(tensor.shape) for tensor in each] for each in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise InputError(f"shapes {shown(shapes[0])} cannot be compared with {shown(shapes[1])}")
    difference = size = 0.0
    for tensor, right in zip(ours, theirs, strict=True):
        difference += float((tensor.double() - right.double()).square().sum())
        size += float(right.double().square().sum())
    if size == 0:
        raise InputError("the reference is zero throughout: nothing is relative to it")
    return math.sqrt(difference / size)


def _as_list(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    return [tensor.detach() for tensor in tensors]
