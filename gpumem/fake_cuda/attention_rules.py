"""Which attention kernel CUDA takes: the rules of PyTorch's choice, as one function.

``F.scaled_dot_product_attention`` chooses on CUDA among three fused kernels, flash,
memory-efficient and cuDNN, and the plain form, "math", whose matrix of scores grows with the square
of the context.

Source: PyTorch 2.10 to 2.13, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``
(``can_use_flash_attention`` and its sisters) and ``transformers/sdp_utils_cpp.h``; from 2.14 on the
memory-efficient kernel takes grouped heads (pull request 191085 there).

Limits: cuDNN is preferred on compute capability 9 and 10, as where PyTorch comes with a cuDNN newer
than 9.15; its heads end at 128. NVIDIA only.
"""

import torch
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend

from gpumem.inputs import InputError
from gpumem.torch_release import follows

FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
CUDNN, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
NAMES = {FLASH: "flash", EFFICIENT: "memory-efficient", CUDNN: "cuDNN", MATH: "math"}
#: PyTorch's own order, and the one that it takes where it prefers cuDNN.
ORDER = (FLASH, EFFICIENT, MATH, CUDNN)
CUDNN_FIRST = (CUDNN, FLASH, EFFICIENT, MATH)

HALVES = (torch.float16, torch.bfloat16)
_NEWEST = (12, 1)


def attention_kernel(
    call: SDPAParams,
    capability: tuple[int, int],
    allowed: frozenset[SDPBackend] = frozenset(ORDER),
    order: tuple[SDPBackend, ...] | None = None,
) -> SDPBackend:
    """Return the kernel that CUDA takes for ``call``: the first in order that may and can run it.

    Args:
        call: the arguments of ``F.scaled_dot_product_attention``, on any device.
        capability: compute capability, ``(7, 5)`` for a T4.
        allowed: what ``torch.nn.attention.sdpa_kernel`` leaves on.
        order: which to try first; by default PyTorch's order on that hardware.

    Raises:
        InputError: none of the allowed kernels can run it ("No available kernel" on CUDA).
    """
    if order is None:
        order = CUDNN_FIRST if capability[0] in (9, 10) else ORDER
    reasons = []
    for backend in order:
        if backend not in allowed:
            continue
        reason = _why_not(backend, call, capability)
        if reason is None:
            return backend
        reasons.append(f"{NAMES[backend]} {reason}")
    raise InputError(
        "no available attention kernel: on compute capability "
        f"{capability[0]}.{capability[1]} {'; '.join(reasons) or 'nothing is enabled'}. "
        "Allow SDPBackend.MATH too, or change the call."
    )


def needs_grad(call: SDPAParams) -> bool:
    """Return whether autograd records the call."""
    tensors = (call.query, call.key, call.value)
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _why_not(backend: SDPBackend, call: SDPAParams, capability: tuple[int, int]) -> str | None:
    """Return why ``backend`` cannot run ``call`` there, as the end of a sentence; None: it can."""
    if backend is MATH:
        return None
    tensors = [call.query, call.key, call.value]
    if any(tensor.dim() != 4 for tensor in tensors):
        return "takes tensors of four dimensions only"
    if 0 in (call.query.shape[2], call.key.shape[2]):
        return "takes no empty sequence"
    if call.attn_mask is not None:
        tensors.append(call.attn_mask)
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        return "takes no gaps in the last dimension"
    return _wrong_heads(backend, call) or _RULES[backend](call, capability)


def _wrong_heads(backend: SDPBackend, call: SDPAParams) -> str | None:
    batch, heads = call.query.shape[:2]
    key_batch, key_heads = call.key.shape[:2]
    value_batch, value_heads = call.value.shape[:2]
    if not batch == key_batch == value_batch:
        return "takes one batch size for queries, keys and values"
    if call.enable_gqa and (backend is not EFFICIENT or follows("2.14")):
        if backend is not CUDNN and key_heads != value_heads:
            return "takes as many heads of keys as of values"
        if heads % key_heads or heads % value_heads:
            return "takes query heads in whole groups only"
        return None
    if not heads == key_heads == value_heads:
        return "takes no grouped heads" if call.enable_gqa else "takes equal numbers of heads only"
    return None


def _why_not_flash(call: SDPAParams, capability: tuple[int, int]) -> str | None:
    head = call.query.shape[3]
    if call.attn_mask is not None:
        return "takes no explicit mask"
    if not head == call.key.shape[3] == call.value.shape[3] or head > 256:
        return f"takes heads of one size up to 256, not {head}"
    if not (8, 0) <= capability <= _NEWEST:
        return "needs compute capability 8.0"
    small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    trains = head <= 192 or (head > 224 and not call.dropout)
    if needs_grad(call) and small and not trains:
        return f"does not train heads of {head} on this hardware"
    if call.is_causal and call.query.shape[2] != call.key.shape[2]:
        return "takes is_causal only for as many queries as keys"
    if call.query.dtype not in HALVES:
        return "takes float16 and bfloat16 only"
    return None


def _why_not_efficient(call: SDPAParams, capability: tuple[int, int]) -> str | None:
    dtype, head, value_head = call.query.dtype, call.query.shape[3], call.value.shape[3]
    half, ampere = dtype in HALVES, capability >= (8, 0)
    alignment = 8 if half else (4 if ampere else 1)
    if not (5, 0) <= capability <= _NEWEST:
        return "needs compute capability 5.0"
    if head != call.key.shape[3] or head % alignment or value_head % alignment:
        return f"takes head sizes in multiples of {alignment}, not {head}"
    if dtype is torch.bfloat16 and not ampere:
        return "takes bfloat16 from compute capability 8.0 on"
    if not half and dtype is not torch.float32:
        return "takes float16, bfloat16 and float32 only"
    return None


def _why_not_cudnn(call: SDPAParams, capability: tuple[int, int]) -> str | None:
    (*rows, head), keys, value_head = call.query.shape, call.key.shape[2], call.value.shape[3]
    if not (8, 0) <= capability <= _NEWEST:
        return "needs compute capability 8.0"
    if call.query.dtype not in HALVES:
        return "takes float16 and bfloat16 only"
    mask = call.attn_mask
    if mask is not None and (mask.requires_grad or not _fits(mask.shape, (*rows, keys))):
        return "takes a fixed mask of two or four dimensions only"
    if call.dropout * 16 % 1:
        return "takes dropout in sixteenths only"
    longest = 192 if (head, value_head) == (192, 128) and capability[0] in (9, 10) else 128
    if max(head, value_head) > longest or head % 8 or value_head % 8:
        return f"takes head sizes in multiples of 8 up to {longest}, not {head}"
    if keys == 1 or (call.dropout and rows[2] == 1):
        return "takes no sequence of one token"
    return None


def _fits(mask: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    return len(mask) in (2, 4) and all(
        size in (1, whole) for size, whole in zip(mask, scores[-len(mask) :], strict=True)
    )


_RULES = {FLASH: _why_not_flash, EFFICIENT: _why_not_efficient, CUDNN: _why_not_cudnn}
