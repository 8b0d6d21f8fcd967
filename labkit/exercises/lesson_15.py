"""Exercises of lesson 15: better levels than NF4's, and a memory target for the real model."""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from labkit.evaluation import held_out_loss
from labkit.exercises import Exercise
from labkit.exercises.checks import Feedback, call, quote
from labkit.memory import format_bytes
from labkit.models import pretrained
from labkit.text import batches

BLOCK, LEAST_GAIN = 64, 0.03
MOST_SHARE, MOST_PERPLEXITY = 1 / 3, 1.05
ROWS, SEQ_LEN = 8, 128


# --- 1: better than NF4 ------------------------------------------------------------------------


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


def check_levels(answer):
    try:
        ladder = torch.as_tensor(answer, dtype=torch.float32).detach().cpu().flatten()
    except (TypeError, ValueError, RuntimeError):
        return f"16 numbers are asked for, in a list or a tensor; you gave {quote(answer)}."
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
        zero = "" if 0 in ladder else " And yours have no zero: remember what that did."
        return Feedback(
            True,
            f"{found}: {gain:.1%} less. The smallest error, the most even use of levels and the "
            f"least damage to a model are three different aims.{zero}",
        )
    if gain > 0:
        return f"{found}: better, by {gain:.1%}. At least {LEAST_GAIN:.0%} are asked for."
    return f"{found}. Where are the weights, and how far apart are your levels there?"


# --- 2: a memory target ------------------------------------------------------------------------


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


def stored_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes by kind, FP32 as if in 16 bits, scales of quantised layers as they are.

    Every storage counts once and whole, however many views there are of it, or however small.
    """
    storages: dict[int, tuple[str, int]] = {}

    def add(kind: str, tensor: torch.Tensor, share: float = 1.0) -> None:
        storage = tensor.untyped_storage()
        counted = kind, int(share * storage.nbytes())
        storages[storage.data_ptr()] = max(
            counted, storages.get(storage.data_ptr(), counted), key=lambda found: found[1]
        )

    for tensor in _tensors(model, set()):
        state = getattr(tensor, "quant_state", None)
        if state is not None:
            add("4-bit matrices", tensor)
            add("their scales", state.absmax)
            if state.nested:
                add("their scales", state.state2.absmax)
            continue
        use = "trained" if tensor.requires_grad else "frozen"
        kind = f"{use} floats" if tensor.is_floating_point() else "integers"
        add(kind, tensor, 0.5 if tensor.dtype is torch.float32 else 1.0)
    found: dict[str, int] = {}
    for kind, nbytes in storages.values():
        found[kind] = found.get(kind, 0) + nbytes
    return found


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors of a module and of whatever modules, lists and dicts it holds."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen:
        return
    if isinstance(value, nn.Module):
        parts = vars(value).values()  # its parameters, buffers and modules are dicts among them
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple | set):
        parts = value
    else:
        return
    seen.add(id(value))
    for part in parts:
        yield from _tensors(part, seen)


def check_shrink(answer):
    model, tokenizer = pretrained()
    whole = 2 * sum(p.numel() for p in model.parameters())
    reference = _loss(model, tokenizer)
    small = call(answer, model, tokenizer)
    if not isinstance(small, nn.Module):
        return f"`shrink` should return the model; it returned {quote(small)}."
    parts = stored_bytes(small)
    share = sum(parts.values()) / whole
    if share > MOST_SHARE:
        listed = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in parts.items())
        return (
            f"Your model takes {share:.1%} of the 16-bit bytes; at most a third is asked for "
            f"({format_bytes(int(whole * MOST_SHARE))}). It holds: {listed}."
        )
    times = math.exp(_loss(small, tokenizer) - reference)
    if not times <= MOST_PERPLEXITY:
        return (
            f"{share:.1%} of the bytes is little enough, but the perplexity is {times - 1:+.1%} of "
            "the original's; at most +5 % is asked for. Which part did you round most, and what "
            "could still learn?"
        )
    return Feedback(True, f"That is right: {share:.1%} of the bytes, perplexity {times - 1:+.1%}.")


def _loss(model: nn.Module, tokenizer) -> float:
    return held_out_loss(model, tokenizer=tokenizer, rows=ROWS, seq_len=SEQ_LEN)


EXERCISES = (
    Exercise(
        "15-1",
        question="16 levels whose error on bell-shaped weights is 3 % below NF4's.",
        hints=(
            "Draw weights with torch.randn and divide each block of 64 by its largest magnitude. "
            "Which of the values are rounded to one level, and which single number represents "
            "them best?",
            "Their mean. Move every level there, round again, and repeat: Lloyd's algorithm, or "
            "k-means in one dimension.",
        ),
        solution=levels,
        check=check_levels,
    ),
    Exercise(
        "15-2",
        question="SmolLM2-135M at a third of the bytes, its perplexity within 5 %.",
        hints=(
            "Count: what is the largest part once the matrices are in four bits, and are their "
            "scales as small as they can be?",
            "The embedding is the output layer as well. In NF4 it loses too much, in 8 bits with "
            "a scale per row almost nothing. One module can serve both, and hold it once.",
            "Adapters of a small rank, one or two dozen steps on the training text, and double "
            "quantisation.",
        ),
        solution=shrink,
        check=check_shrink,
        kind="function",
    ),
)
