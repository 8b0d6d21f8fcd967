"""Names of training precisions as dtypes and autocast contexts."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gpumem.inputs import PRECISIONS, InputError, one_of


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"unknown device {device!r}: 'cpu' or 'cuda' would do") from error


_AUTOCAST_TO = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of the *weights* under ``precision``: autocast keeps them in float32.

    Raises:
        InputError: not one of ``PRECISIONS``.
    """
    precision = one_of(precision, PRECISIONS, "precision")
    return torch.bfloat16 if precision == "bf16" else torch.float32


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return what autocast computes in under ``precision``; None for those without it."""
    return _AUTOCAST_TO.get(one_of(precision, PRECISIONS, "precision"))


def autocast(device: torch.device | str, precision: str) -> AbstractContextManager[Any]:
    """Return ``torch.autocast`` for the ``amp-`` precisions, nothing for the others.

    Raises:
        InputError: unknown device or precision.
    """
    dtype = autocast_dtype(precision)
    return nullcontext() if dtype is None else torch.autocast(_device(device).type, dtype=dtype)
