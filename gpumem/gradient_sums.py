"""Gradients are written in place under a `TorchDispatchMode`, too.

Where a tensor goes into several operations, autograd adds up the gradients that come back. It does
so in place if nothing else holds the first of them (PyTorch, ``torch/csrc/autograd/
input_buffer.cpp``: ``can_accumulate_inplace``), but never while a mode is active: then each sum is
a new tensor. The backward of an index, and of what selects (``topk``, ``max``, ``gather``),
likewise fills zeros in place, but a copy of them where a mode is active (``FunctionsManual.cpp``:
``areAnyTensorSubclassLike``). What watches memory through a mode would see a block too many each
time, which the program does not take when it runs by itself.

Limits: a sum of two tensors that only C++ code holds, inside the backward of one operation, cannot
be told from autograd's own; PyTorch has none in what transformers train.
"""

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_aten = torch.ops.aten
_SUM = _aten.add.Tensor
#: Operators of a backward pass, and what runs in their place where no mode is active.
_IN_PLACE = {
    _SUM: _aten.add_.Tensor,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_add.default: _aten.index_add_.default,
    _aten.index_put.default: _aten.index_put_.default,
    _aten.logical_and.default: _aten.logical_and_.default,
}
#: Whose backward does so with these; that of ``scatter_reduce`` makes a new tensor.
_ONLY_OF = {
    _aten.scatter_add.default: "GatherBackward0",
    _aten.index_add.default: "IndexSelectBackward0",
}


def as_without_mode(func: Any, args: tuple) -> Any:
    """Return the operator that runs where no mode is active: one that writes in place where the
    backward pass alone holds the first of ``args``, else ``func``.

    To be called first in ``__torch_dispatch__``, before anything else holds one of ``args``.
    """
    if func not in _IN_PLACE or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return func
    if func is _SUM and (len(args) > 2 or not all(isinstance(arg, torch.Tensor) for arg in args)):
        return func
    if func is _aten.index_put.default and not (len(args) > 3 and args[3]):
        return func  # the gradient of a write: what was overwritten gets none
    if func in _ONLY_OF and torch._C._current_autograd_node().name() != _ONLY_OF[func]:
        return func
    in_cpp, in_python, of_memory = _holders(args)
    if func is not _SUM and in_cpp == _AUTOGRAD_ALONE[0] + 1:
        in_cpp -= 1  # the zeros are an argument of the function that fills them
    alone = (in_cpp, in_python, of_memory) == _AUTOGRAD_ALONE
    return _IN_PLACE[func] if alone and _aten.is_non_overlapping_and_dense(args[0]) else func


def _holders(args: tuple) -> tuple[int, int, int]:
    """Return how many hold the first argument in C++, how many in Python, and how many its memory,
    this call included."""
    first = args[0]
    memory = torch._C._storage_Use_Count(first.untyped_storage()._cdata)
    return first._use_count(), sys.getrefcount(first), memory


class _Sums(TorchDispatchMode):
    """Note the holders of each sum."""

    found: tuple[int, int, int]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _SUM:
            self.found = _holders(args)
        return func(*args, **(kwargs or {}))


def _autograd_alone() -> tuple[int, int, int]:
    """Return the `_holders` of a gradient that only autograd holds, as this PyTorch counts them."""
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        product = torch.ones(2, requires_grad=True) * 2
        loss = (product.sin() + product.cos()).sum()
        with _Sums() as sums:
            loss.backward()
    return sums.found


_AUTOGRAD_ALONE = _autograd_alone()
