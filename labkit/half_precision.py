"""Compute products of half-precision numbers on a CPU as tensor cores do: fast on any CPU.

A CPU without the instructions for it multiplies bfloat16 matrices a hundred times slower than
float32 ones. Inside the context the factors are widened to float32, which changes none of them,
multiplied and added there, and the result is rounded once to half precision. That is what a GPU's
tensor cores do (multiplication of the half-precision factors is exact, accumulation is in float32:
NVIDIA, *CUDA C++ Programming Guide*, "Warp Matrix Functions"), so training comes out as there but
for the order of the additions.

Limits: for losses and speed, not for bytes: the widened copies are real memory. Compiled code does
not run under it. On anything but a CPU the context does nothing.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
_HALVES = (torch.bfloat16, torch.float16)


def half_products(device: torch.device) -> "AbstractContextManager[_HalfProducts | None]":
    """Return the context for a CPU, and one that does nothing for other devices."""
    return _HalfProducts() if device.type == "cpu" else nullcontext()


class _HalfProducts(TorchDispatchMode):
    found = False  # a half-precision product so far
    left = False

    def leave_unless_needed(self) -> None:
        """Leave early if there was no such product yet: looking costs as much as a small operator.

        Not under another mode, which would be left instead.
        """
        if not self.found and _get_current_dispatch_mode() is self:
            super().__exit__(None, None, None)
            self.left = True

    def __exit__(self, *raised: Any) -> None:
        if not self.left:
            super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        half = args[0].dtype if func in _PRODUCTS else None
        if half not in _HALVES:
            return func(*args, **kwargs)
        self.found = True

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.float() if tensor.dtype in _HALVES else tensor

        def narrow(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(half)

        args, kwargs = tree_map_only(torch.Tensor, widen, (args, kwargs))  # a mask comes by name
        wide = func(*args, **kwargs)
        if func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
            return narrow(wide[0]), wide[1]  # the log-sum-exp is float32 in any precision
        return tree_map_only(torch.Tensor, narrow, wide)
