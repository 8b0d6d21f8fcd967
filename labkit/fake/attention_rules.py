"""Which attention kernel CUDA takes: the rules of PyTorch's choice, as one function.

``F.scaled_dot_product_attention`` chooses on CUDA among three fused kernels, flash,
memory-efficient and cuDNN, and the plain form, "math", which builds the matrix of scores. What each
of them refuses (a type, a mask, a head size, grouped heads) decides whether a step needs memory in
proportion to the context or to its square.

Source: PyTorch 2.10 to 2.13, ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``
(``can_use_flash_attention`` and its sisters) and ``transformers/sdp_utils_cpp.h``; from 2.14 on the
memory-efficient kernel takes grouped heads (pull request 191085 there).

Limits: cuDNN is preferred on compute capability 9 and 10, as where PyTorch comes with a cuDNN newer
than 9.15; its heads end at 128. NVIDIA only.
"""

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from labkit.values import InputError

FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
CUDNN, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
NAMES = {FLASH: "flash", EFFICIENT: "memory-efficient", CUDNN: "cuDNN", MATH: "math"}
#: PyTorch's own order, and the one that it takes where it prefers cuDNN.
ORDER = (FLASH, EFFICIENT, MATH, CUDNN)
CUDNN_FIRST = (CUDNN, FLASH, EFFICIENT, MATH)
#: Whether the memory-efficient kernel takes fewer heads of keys than of queries.
EFFICIENT_TAKES_GROUPS = torch.__version__ >= (2, 14)

HALVES = (torch.float16, torch.bfloat16)
_NEWEST = (12, 1)


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What CUDA looks at when it chooses.

    Attributes:
        dtype: of query, key and value.
        query, key, value: shapes, (batch, heads, tokens, head size) where a fused kernel may run.
        mask: the explicit mask's shape, None without one.
        dropout: probability.
        causal, grouped: the flags ``is_causal`` and ``enable_gqa``.
        needs_grad: whether autograd records the call.
        mask_needs_grad: whether the mask itself is trained.
        contiguous: the last dimension of query, key, value and mask is laid out without gaps.
    """

    dtype: torch.dtype
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    needs_grad: bool = True
    mask_needs_grad: bool = False
    contiguous: bool = True


def attention_kernel(
    call: AttentionCall,
    capability: tuple[int, int],
    allowed: frozenset[SDPBackend] = frozenset(ORDER),
    order: tuple[SDPBackend, ...] | None = None,
) -> SDPBackend:
    """Return the kernel that CUDA takes for ``call``: the first in order that may and can run it.

    Args:
        call: shapes, type and flags.
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
        reason = why_not(backend, call, capability)
        if reason is None:
            return backend
        reasons.append(f"{NAMES[backend]} {reason}")
    raise InputError(
        "no available attention kernel: on compute capability "
        f"{capability[0]}.{capability[1]} {'; '.join(reasons) or 'nothing is enabled'}. "
        "Allow SDPBackend.MATH too, or change the call."
    )


def why_not(backend: SDPBackend, call: AttentionCall, capability: tuple[int, int]) -> str | None:
    """Return why ``backend`` cannot run ``call`` there, as the end of a sentence; None: it can."""
    if backend is MATH:
        return None
    if not len(call.query) == len(call.key) == len(call.value) == 4:
        return "takes tensors of four dimensions only"
    if 0 in (call.query[2], call.key[2]):
        return "takes no empty sequence"
    if not call.contiguous:
        return "takes no gaps in the last dimension"
    return _wrong_heads(backend, call) or _RULES[backend](call, capability)


def _wrong_heads(backend: SDPBackend, call: AttentionCall) -> str | None:
    if not call.query[0] == call.key[0] == call.value[0]:
        return "takes one batch size for queries, keys and values"
    heads, key_heads, value_heads = call.query[1], call.key[1], call.value[1]
    if call.grouped and (backend is not EFFICIENT or EFFICIENT_TAKES_GROUPS):
        if backend is not CUDNN and key_heads != value_heads:
            return "takes as many heads of keys as of values"
        if heads % key_heads or heads % value_heads:
            return "takes query heads in whole groups only"
        return None
    if not heads == key_heads == value_heads:
        return "takes no grouped heads" if call.grouped else "takes equal numbers of heads only"
    return None


def _why_not_flash(call: AttentionCall, capability: tuple[int, int]) -> str | None:
    head = call.query[3]
    if call.mask is not None:
        return "takes no explicit mask"
    if not head == call.key[3] == call.value[3] or head > 256:
        return f"takes heads of one size up to 256, not {head}"
    if not (8, 0) <= capability <= _NEWEST:
        return "needs compute capability 8.0"
    small = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    trains = head <= 192 or (head > 224 and not call.dropout)
    if call.needs_grad and small and not trains:
        return f"does not train heads of {head} on this hardware"
    if call.causal and call.query[2] != call.key[2]:
        return "takes is_causal only for as many queries as keys"
    if call.dtype not in HALVES:
        return "takes float16 and bfloat16 only"
    return None


def _why_not_efficient(call: AttentionCall, capability: tuple[int, int]) -> str | None:
    half, ampere = call.dtype in HALVES, capability >= (8, 0)
    alignment = 8 if half else (4 if ampere else 1)
    if not (5, 0) <= capability <= _NEWEST:
        return "needs compute capability 5.0"
    if call.query[3] != call.key[3] or call.query[3] % alignment or call.value[3] % alignment:
        return f"takes head sizes in multiples of {alignment}, not {call.query[3]}"
    if call.dtype is torch.bfloat16 and not ampere:
        return "takes bfloat16 from compute capability 8.0 on"
    if not half and call.dtype is not torch.float32:
        return "takes float16, bfloat16 and float32 only"
    return None


def _why_not_cudnn(call: AttentionCall, capability: tuple[int, int]) -> str | None:
    head, value_head = call.query[3], call.value[3]
    if not (8, 0) <= capability <= _NEWEST:
        return "needs compute capability 8.0"
    if call.dtype not in HALVES:
        return "takes float16 and bfloat16 only"
    if call.mask is not None and (call.mask_needs_grad or not _fits(call.mask, call)):
        return "takes a fixed mask of two or four dimensions only"
    if call.dropout * 16 % 1:
        return "takes dropout in sixteenths only"
    longest = 192 if (head, value_head) == (192, 128) and capability[0] in (9, 10) else 128
    if max(head, value_head) > longest or head % 8 or value_head % 8:
        return f"takes head sizes in multiples of 8 up to {longest}, not {head}"
    if call.key[2] == 1 or (call.dropout and call.query[2] == 1):
        return "takes no sequence of one token"
    return None


def _fits(mask: tuple[int, ...], call: AttentionCall) -> bool:
    full = (*call.query[:3], call.key[2])
    return len(mask) in (2, 4) and all(
        size in (1, whole) for size, whole in zip(mask, full[-len(mask) :], strict=True)
    )


_RULES = {FLASH: _why_not_flash, EFFICIENT: _why_not_efficient, CUDNN: _why_not_cudnn}
