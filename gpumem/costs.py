"""The work of operators: floating-point operations, bytes moved, bytes sent to other ranks.

Fused attention that is told to be causal skips what the mask hides. It counts half, as in
FlashAttention's own benchmarks (Dao-AILab/flash-attention, benchmark_flash_attention.py). A mask in
a tensor of its own is applied to the whole product, which counts in full.

Collectives are counted as ring algorithms move them, which is what NCCL and gloo use for large
messages: of N ranks each sends (N − 1)/N of the whole in a gather or a scatter, and twice that in
an all-reduce, which is both (nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth").

Limits: headers, and the tree algorithms for small messages, are left out. Fractions of a byte are
dropped. A broadcast and a reduction to one rank are counted evenly for all; of a ``scatter`` only
its source sends, of a ``gather`` all but its target. What transformers computes for experts on GPUs
before Ampere, one after the other, is not counted.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

#: The namespaces whose operators' work is counted.
COUNTED = ("aten", "bitsandbytes")
#: bitsandbytes' products, whose inner dimension is the last of their first argument.
QUANTISED_PRODUCTS = ("gemm_4bit", "int8_linear_matmul")


def _attention_flops(query, key, value, *_, **__) -> int:
    return sdpa_flop_count(query.shape, *_as_many_heads(query, key, value))


def _attention_backward_flops(grad, query, key, value, *_, **__) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, *_as_many_heads(query, key, value))


def _as_many_heads(query: torch.Tensor, *shared: torch.Tensor) -> list[torch.Size]:
    """Return the shapes of keys and values as if each head of the query had its own."""
    return [torch.Size((*query.shape[:2], *each.shape[2:])) for each in shared]


_aten = torch.ops.aten
#: PyTorch's own table, with what it lacks: the CPU's flash attention before 2.15 (the same two
#: products forward and five backward as the CUDA kernel's entry), grouped heads before 2.12, and
#: products that are added in place, and experts' (each row of the first has one matrix).
FLOP_FORMULAS = {
    **flop_registry,
    _aten.addmm_: flop_registry[_aten.addmm],
    _aten.baddbmm_: flop_registry[_aten.baddbmm],
    _aten._scaled_dot_product_flash_attention: _attention_flops,
    _aten._scaled_dot_product_flash_attention_backward: _attention_backward_flops,
    _aten._scaled_dot_product_cudnn_attention: _attention_flops,
    _aten._scaled_dot_product_cudnn_attention_backward: _attention_backward_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
if hasattr(_aten, "_grouped_mm"):  # 2.7 has none
    FLOP_FORMULAS[_aten._grouped_mm] = lambda a, b, *_, **__: 2 * a.numel() * b.shape[-1]


def flops_of(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Return the floating-point operations of one call that returned ``out``."""
    formula = FLOP_FORMULAS.get(func._overloadpacket)
    if formula:
        # Some overloads are told the result's dtype, of which the formulas do not know.
        operands = [arg for arg in args if not isinstance(arg, torch.dtype)]
        full = formula(*operands, **kwargs, out_val=out)
        causal = (value for each, value in _given(func, args, kwargs) if each.name == "is_causal")
        return full // 2 if any(causal) else full
    if func.__name__.partition(".")[0] in QUANTISED_PRODUCTS:
        return 2 * out.numel() * args[0].shape[-1]
    return 0


def moved_bytes(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Return the bytes that one call reads and writes."""
    # What returns nothing writes into its arguments: `_foreach_` and fused updates.
    written = [out]
    if not func._schema.returns:
        given = _given(func, args, kwargs)
        written = [value for each, value in given if each.alias_info and each.alias_info.is_write]
    parts = (part for t in tensors_in((args, written)) for part in plain_tensors(t))
    return sum(part.numel() * part.element_size() for part in parts)


def _given(func: Any, args: tuple, kwargs: dict) -> Iterator[tuple[Any, Any]]:
    """Yield each argument of an operator's schema with what a call hands over for it."""
    for place, argument in enumerate(func._schema.arguments):
        yield argument, args[place] if place < len(args) else kwargs.get(argument.name)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested tuples, lists and dictionaries."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold memory for ``tensor``: itself, or what a wrapper is made of
    (DTensor, quantized tensors)."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, attribute)
        if isinstance(inner, torch.Tensor):  # a DTensor names its mesh of devices, too
            yield from plain_tensors(inner)


def with_scales(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a parameter, and the scales and tables that bitsandbytes keeps beside it."""
    carriers, names = [parameter], ("CB", "SCB")
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        carriers, names = [*carriers, state], ("CB", "SCB", "absmax", "code", "offset")
        state = getattr(state, "state2", None)
    yield parameter
    for carrier in carriers:
        yield from tensors_in([getattr(carrier, name, None) for name in names])


#: Namespaces of the operators that talk to other ranks.
COLLECTIVES = ("c10d", "_c10d_functional")

# From one rank to another, or all from or to one.
_DIRECT = ("send", "isend", "batch_p2p_ops", "gather_", "scatter_")

# How often the whole passes through each rank's link, in units of (N − 1)/N, by how the operator's
# name begins without underscores. The whole is the largest of the operands: an all-gather's result,
# a reduce-scatter's input.
_ROUNDS = {
    "allgather": 1,
    "reducescatter": 1,
    "alltoall": 1,
    "broadcast": 1,
    "reduce": 1,
    "allreduce": 2,
}


def sent_bytes(func: Any, args: tuple) -> int:
    """Return the bytes that one call of an operator of `COLLECTIVES` makes this rank send.

    A receive or a barrier sends none. ``args`` end with the process group or its name.
    """
    name = func.__name__.partition(".")[0].removesuffix("_out")  # the result is a keyword there
    if name in _DIRECT:
        return _sent_directly(name, args)
    rounds = _rounds(name)
    if not rounds:
        return 0
    ranks = _group_size(args)
    whole_bytes = max(_nbytes(arg) for arg in args if isinstance(arg, torch.Tensor | list | tuple))
    if name.startswith("all_gather"):  # the functional form is not handed its result
        whole_bytes *= ranks
    return rounds * whole_bytes * (ranks - 1) // ranks


def _rounds(name: str) -> int:
    plain = name.replace("_", "")
    return next((rounds for kind, rounds in _ROUNDS.items() if plain.startswith(kind)), 0)


def _sent_directly(name: str, args: tuple) -> int:
    if name == "batch_p2p_ops":
        kinds, *_, tensors, _ = args
        return sum(_nbytes(t) for kind, t in zip(kinds, tensors, strict=True) if kind == "isend")
    if name == "gather_":
        results, own, *_ = args
        return 0 if results else _nbytes(own)  # its target is handed a place for them
    if name == "scatter_":
        ranks = _group_size(args)
        return _nbytes(args[1]) * (ranks - 1) // ranks  # the others have nothing to hand out
    return _nbytes(args[0])


def _nbytes(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    return sum(map(_nbytes, tree)) if isinstance(tree, list | tuple) else 0


def _group_size(args: tuple) -> int:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            return dist.ProcessGroup.unbox(arg).size()  # the group precedes what else is boxed
    return _resolve_process_group(args[-1]).size()
