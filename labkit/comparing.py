"""Two numbers that several lessons compare by: a relative error, and an exponent of growth."""

import math
from collections.abc import Iterable, Mapping

import torch

from labkit.memory import InputError


def relative_error(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    reference: torch.Tensor | Iterable[torch.Tensor],
) -> float:
    """Norm of the difference over norm of the reference, all tensors taken as one long vector.

    Args:
        tensors: one tensor, or several: a model's gradients.
        reference: as many, of the same shapes in the same order.

    Returns:
        0.0 for equal tensors; the sums are float64, so that the comparison rounds nothing away.

    Raises:
        InputError: not as many tensors as references, a shape that differs, complex numbers, or a
            reference that is zero throughout.
    """
    ours, theirs = _as_list(tensors), _as_list(reference)
    if len(ours) != len(theirs):
        raise InputError(
            f"{len(ours)} tensors cannot be compared with {len(theirs)}: there must be as many"
        )
    for number, (tensor, right) in enumerate(zip(ours, theirs, strict=True), 1):
        if tensor.shape != right.shape:
            raise InputError(
                f"tensor {number} of {len(ours)} has the shape {tuple(tensor.shape)}, its "
                f"reference {tuple(right.shape)}: they must be of the same shapes"
            )
        if tensor.is_complex() or right.is_complex():
            raise InputError("complex tensors are not compared: give torch.view_as_real of them")
    difference = sum(_square(t.double() - r.double()) for t, r in zip(ours, theirs, strict=True))
    size = sum(_square(r.double()) for r in theirs)
    if size == 0:
        raise InputError("the reference is zero throughout: nothing is relative to it")
    return math.sqrt(difference / size)


def _as_list(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return (
        [tensors.detach()] if isinstance(tensors, torch.Tensor) else [t.detach() for t in tensors]
    )


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.square().sum())


def exponent(points: Mapping[float, float]) -> float:
    """The power with which ``y`` grows with ``x``: 1 is linear, 2 quadratic.

    Args:
        points: ``{x: y}``, all above zero, at least two.

    Returns:
        The slope of log ``y`` over log ``x`` by least squares.

    Raises:
        InputError: fewer than two points, or a number that is not above zero and finite.
    """
    numbers = [number for point in points.items() for number in point]
    if len(points) < 2 or not all(math.isfinite(n) and n > 0 for n in numbers):
        raise InputError(f"an exponent needs two points or more, all above zero, not {points}")
    xs, ys = ([math.log(n) for n in values] for values in (points.keys(), points.values()))
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    shared = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return shared / sum((x - x_mean) ** 2 for x in xs)
