"""CUDA's choice of attention kernel for tensors on the CPU, so that a simulation takes the GPU's.

Inside `cuda_attention_choice` the choice is the GPU's (see `attention_rules`), and so is
the form that runs: the CUDA kernels' own operators, whose shapes fake tensors know, or the plain
form with every matrix that it makes.

Source: ``scaled_dot_product_attention`` and ``_scaled_dot_product_attention_math`` in PyTorch's
``aten/src/ATen/native/transformers/attention.cpp``.

Exact: what a kernel keeps for backward, which is its inputs, its output and the log-sum-exp (one
float32 per query, rounded up to 32 queries by the memory-efficient kernel), head sizes padded to 8
for flash, masks made additive and padded to 8, and every tensor of the plain form.

Limits: a fused kernel's workspace is no tensor: `gpumem.allocator.attention_workspaces` says what
its backward takes. GPUs without a compute capability (AMD, Apple) keep the CPU's fused kernel.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends.cuda import SDPAParams
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from gpumem.fake_cuda.attention_rules import (
    CUDNN,
    EFFICIENT,
    FLASH,
    HALVES,
    MATH,
    ORDER,
    attention_kernel,
    needs_grad,
)
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError

_aten = torch.ops.aten


@contextmanager
def cuda_attention_choice(gpu: Gpu) -> Iterator[None]:
    """Inside, attention on the simulated GPU's tensors runs the kernel that ``gpu`` would.

    Tensors on plain ``"cpu"`` are the host's and keep the CPU's kernel. The choice is made by
    PyTorch's dispatcher, below autocast and above autograd.
    """
    capability = gpu.compute_capability
    if capability is None:
        yield
        return
    operator = _aten.scaled_dot_product_attention.default

    def chosen(query, key, value, mask=None, dropout=0.0, causal=False, **options):
        if query.device.index is None:
            return operator.decompose(query, key, value, mask, dropout, causal, **options)
        grouped = options.get("enable_gqa", False)
        call = SDPAParams(query, key, value, mask, dropout, causal, grouped)
        backend = attention_kernel(call, capability, *_preferences())
        return _RUN[backend](call, options.get("scale"))

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", chosen, "AutogradCPU")
        yield


def _preferences() -> tuple[frozenset[SDPBackend], tuple[SDPBackend, ...] | None]:
    """Return the kernels that ``sdpa_kernel`` left on, and their order if it was given one."""
    on = {
        FLASH: torch.backends.cuda.flash_sdp_enabled(),
        EFFICIENT: torch.backends.cuda.mem_efficient_sdp_enabled(),
        CUDNN: torch.backends.cuda.cudnn_sdp_enabled(),
        MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    known = {int(backend): backend for backend in on}
    order = tuple(known[i] for i in torch._C._get_sdp_priority_order() if i in known)
    return frozenset(b for b, enabled in on.items() if enabled), None if order == ORDER else order


def _flash(call: SDPAParams, scale: float | None) -> torch.Tensor:
    query, key, value, head = call.query, call.key, call.value, call.query.shape[-1]
    scale = 1 / math.sqrt(head) if scale is None else scale
    if head % 8:
        query, key, value = (F.pad(t, (0, 8 - head % 8)) for t in (query, key, value))
    out = _aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout, call.is_causal, scale=scale
    )[0]
    return out if out.shape[-1] == head else out[..., :head]


def _efficient(call: SDPAParams, scale: float | None) -> torch.Tensor:
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    if mask is not None:
        mask = _additive(mask, query.dtype)
        if any(stride % 8 for stride in mask.stride()[:-1]):
            mask = F.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
        mask = mask.expand(*query.shape[:3], key.shape[2])
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs_grad(call), call.dropout, call.is_causal, scale=scale
    )[0]


def _cudnn(call: SDPAParams, scale: float | None) -> torch.Tensor:
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    if mask is not None:
        mask = _additive(mask, query.dtype, masked=-65504.0)
    return _aten._scaled_dot_product_cudnn_attention(
        query, key, value, mask, needs_grad(call), call.dropout, call.is_causal, scale=scale
    )[0]


def _math(call: SDPAParams, scale: float | None) -> torch.Tensor:
    """Compute ``_scaled_dot_product_attention_math``, in float32 for half precision.

    Written out because PyTorch's own adds the mask to a copy when a mode is looking, and because
    its softmax is one operator whose insides no mode sees. What it names lives until it returns.
    """
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    dtype, heads = query.dtype, query.shape[-3] if query.dim() > 2 else 1
    mask = None if mask is None else _additive(mask, dtype)
    if dtype in HALVES and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(abs(scale))
    scaled = query * math.copysign(root, scale)
    if call.is_causal:
        if mask is not None:
            raise InputError("attention takes is_causal=True or an explicit attn_mask, not both")
        square = (query.shape[-2], key.shape[-2])
        mask = torch.ones(square, dtype=torch.bool, device=query.device).tril()
        mask = _additive(mask, query.dtype)
    keys, values = key, value
    if call.enable_gqa and not heads == key.shape[-3] == value.shape[-3]:
        keys = key.repeat_interleave(heads // key.shape[-3], dim=-3)
        values = value.repeat_interleave(heads // value.shape[-3], dim=-3)
    scores = scaled @ (keys.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    scores = _SafeSoftmax.apply(scores)
    if call.dropout > 0:
        scores = torch.native_dropout(scores, call.dropout, True)[0]  # CUDA's own, a byte each
    weights = scores.to(dtype)  # the second result, made first, which nobody takes
    out = (scores @ values).to(dtype)
    # As C++ leaves them, the last first; what it returns, and nobody takes, goes when it is back.
    del scores, values, keys, scaled, mask, value, key, query, weights
    return out


class _SafeSoftmax(torch.autograd.Function):
    """``_safe_softmax`` with its insides to be seen: zeros, not NaN, where all is masked."""

    @staticmethod
    def forward(ctx, scores):
        out = scores.softmax(-1)
        masked = scores.eq(-math.inf)
        out.masked_fill_(masked.all(-1, keepdim=True), 0)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return _aten._softmax_backward_data(grad, out, -1, out.dtype)


def _additive(mask: torch.Tensor, dtype: torch.dtype, masked: float = -math.inf) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), masked)


_RUN = {FLASH: _flash, EFFICIENT: _efficient, CUDNN: _cudnn, MATH: _math}
