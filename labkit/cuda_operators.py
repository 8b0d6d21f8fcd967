"""Operators that keep other tensors on CUDA than on the CPU, for tensors on the simulated GPU.

- Dropout: CUDA's kernel keeps one byte per element, the CPU a mask in the input's own type.
- Pinning: a pinned tensor is another copy in host memory; without CUDA there is no kernel for it.

Source: ``dropout`` in PyTorch's ``aten/src/ATen/native/Dropout.cpp`` (it takes the fused kernel for
CUDA tensors), ``_pin_memory`` in ``aten/src/ATen/native/Memory.cpp``.

Limits: only what training steps of the course were found to use.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Inside, the simulated GPU's tensors (CPU devices with an index) use CUDA's kernels."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # two of them replace PyTorch's own
            library.impl("dropout", _dropout, "AutogradCPU")
            library.impl("pin_memory", _pinned, "CompositeImplicitAutograd")
            library.impl("is_pinned", _is_pinned, "CompositeImplicitAutograd")
        yield
    finally:
        library._destroy()


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and 0 < p < 1 and tensor.device.index is not None:
        return torch.native_dropout(tensor, p, True)[0]
    # PyTorch's own for the CPU; its Python decomposition keeps bytes, as CUDA's kernel does.
    return _aten.dropout.default._op_dk(_COMPOSITE, tensor, p, train)


def _pinned(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    return tensor.clone()


def _is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    return False
