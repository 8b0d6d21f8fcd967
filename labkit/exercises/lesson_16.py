"""Exercises of lesson 16: better levels than NF4's, and a memory target for the real model."""

import functools
import math
from collections import Counter

import torch
from torch import nn

from labkit.exercises.checks import Correct, call
from labkit.exercises.engine import check_of
from labkit.models.catalogue import pretrained
from labkit.models.text import batches
from labkit.toolbox.losses import held_out_loss
from labkit.values import format_bytes, shown

BLOCK, LEAST_GAIN = 64, 0.03
MOST_SHARE, MOST_PERPLEXITY = 1 / 3, 1.05
ROWS, SEQ_LEN = 8, 128


def levels():
    # Lloyd's algorithm: each level moves to the mean of the weights that are rounded to it.
    import torch

    blocks = torch.randn(8192, 64, generator=torch.Generator().manual_seed(1))
    values = (blocks / blocks.abs().amax(1, keepdim=True)).flatten()
    found = torch.linspace(-1, 1, 16)
    for _ in range(40):
        code = torch.bucketize(values, (found[1:] + found[:-1]) / 2)
        total = torch.zeros(16).index_add(0, code, values)
        found = total / torch.bincount(code, minlength=16)
    return found.tolist()


def rounding_error(ladder: torch.Tensor, blocks: torch.Tensor) -> float:
    """Norm of the errors over norm of the weights; ``blocks`` is [number of blocks, BLOCK]."""
    scale = blocks.abs().amax(1, keepdim=True)
    code = torch.bucketize(blocks / scale, (ladder[1:] + ladder[:-1]) / 2)
    return float((ladder[code] * scale - blocks).norm() / blocks.norm())


@functools.cache
def _bell_and_nf4() -> tuple[torch.Tensor, float]:
    from bitsandbytes.functional import get_4bit_type

    blocks = torch.randn(8192, BLOCK, generator=torch.Generator().manual_seed(0))
    return blocks, rounding_error(get_4bit_type("nf4", device="cpu"), blocks)


@check_of(
    "16-1",
    levels,
    "Draw weights with torch.randn and divide each block of 64 by its largest magnitude. Which of "
    "the values are rounded to one level, and which single number represents them best?",
    "Their mean. Move every level there, round again, and repeat: Lloyd's algorithm, or "
    "k-means in one dimension.",
)
def check_levels(answer):
    try:
        ladder = torch.as_tensor(answer, dtype=torch.float32).detach().cpu().flatten()
    except (TypeError, ValueError, RuntimeError):
        return f"16 numbers are asked for, in a list or a tensor; you gave {shown(answer)}."
    if not ladder.isfinite().all() or ladder.numel() == 0 or ladder.abs().max() > 1:
        return "Levels lie between −1 and 1: a block is divided by its largest magnitude."
    ladder = ladder.unique()  # sorted
    if len(ladder) != 16:
        return f"You gave {len(ladder)} different levels. Four bits name exactly 16."
    blocks, nf4 = _bell_and_nf4()
    error = rounding_error(ladder, blocks)
    gain = 1 - error / nf4
    found = f"Your levels' error is {error:.2%}, NF4's {nf4:.2%}"
    if gain >= LEAST_GAIN:
        return Correct(f"{found}: {gain:.1%} less.")
    if gain > 0:
        return f"{found}: better, by {gain:.1%}. At least {LEAST_GAIN:.0%} are asked for."
    return f"{found}. Where are the weights, and how far apart are your levels there?"


class EightBits(nn.Module):
    """A matrix in int8, one scale per row: an embedding for ids, an output layer for vectors."""

    def __init__(self, weight):
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (weight / scale).round().to(torch.int8))

    def forward(self, x):
        if not x.is_floating_point():
            return self.codes[x].float() * self.scale[x]
        return nn.functional.linear(x, self.codes.float() * self.scale)


def shrink(model, tokenizer):
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model

    kind = {"quant_type": "nf4", "compress_statistics": True}  # double quantisation
    for name, old in list(model.named_modules()):
        if isinstance(old, nn.Linear) and old is not model.lm_head:
            new = bnb.nn.Linear4bit(
                old.in_features, old.out_features, bias=False, compute_dtype=torch.float32, **kind
            )
            new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, **kind)
            new.support_avx512bf16_for_cpu = False
            model.set_submodule(name, new)
    # What is left is the embedding, which is the output layer, too: one matrix, now in 8 bits.
    model.model.embed_tokens = model.lm_head = EightBits(model.lm_head.weight.detach())
    model.is_loaded_in_4bit = True
    device = next(model.parameters()).device
    torch.manual_seed(0)
    few = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model.to(device), few)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    texts = {"batch_size": 2, "seq_len": 128, "steps": 16}
    for ids in batches(device=device, tokenizer=tokenizer, **texts):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def stored_bytes(model: nn.Module) -> Counter[str]:
    """Return bytes by kind: floats as if in 16 bits, all else as it is.

    A tensor counts whether a module registered it or not, and once however often it is used.
    """
    counted: dict[int, tuple[str, int]] = {}  # by address: views share a storage

    def count(kind: str, tensor: torch.Tensor, divisor: int = 1) -> None:
        storage = tensor.untyped_storage()
        counted[storage.data_ptr()] = (kind, storage.nbytes() // divisor)

    for module in model.modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        for tensor in filter(torch.is_tensor, held.values()):
            state = getattr(tensor, "quant_state", None)
            if state is not None:
                count("4-bit matrices", tensor)
                count("their scales", state.absmax)
                if state.nested:  # then those are codes of one byte, with scales of their own
                    count("their scales", state.state2.absmax)
            elif tensor.is_floating_point():
                count("floats", tensor, divisor=2 if tensor.dtype is torch.float32 else 1)
            else:
                count("integers", tensor)
    found: Counter[str] = Counter()
    for kind, nbytes in counted.values():
        found[kind] += nbytes
    return found


@check_of(
    "16-2",
    shrink,
    "Count: what is the largest part once the matrices are in four bits, and are their "
    "scales as small as they can be?",
    "The embedding is the output layer as well: one module in 8 bits, a scale per row, can serve "
    "both. Adapters of a small rank, a dozen steps and double quantisation do the rest.",
)
def check_shrink(answer):
    model, tokenizer = pretrained()
    whole = 2 * sum(p.numel() for p in model.parameters())
    reference = _loss(model, tokenizer)
    small = call(answer, model, tokenizer)
    if not isinstance(small, nn.Module):
        return f"`shrink` should return the model; it returned {shown(small)}."
    parts = stored_bytes(small)
    share = sum(parts.values()) / whole
    if share > MOST_SHARE:
        listed = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in parts.items())
        return f"Your model takes {share:.1%} of the 16-bit bytes, not a third. It holds: {listed}."
    times = math.exp(_loss(small, tokenizer) - reference)
    if not times <= MOST_PERPLEXITY:
        return (
            f"{share:.1%} of the bytes is little enough, but the perplexity is {times - 1:+.1%} "
            "off. Which part did you round most, and what could still learn?"
        )
    return Correct(f"That is right: {share:.1%} of the bytes, perplexity {times - 1:+.1%}.")


def _loss(model: nn.Module, tokenizer) -> float:
    return held_out_loss(model, tokenizer=tokenizer, rows=ROWS, seq_len=SEQ_LEN)
