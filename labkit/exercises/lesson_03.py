"""Exercises of lesson 03: the loss by hand, a mended formula, a job that only seems to fit."""

import functools
from collections.abc import Mapping
from typing import Any

from labkit import models
from labkit.catalogue import gpu
from labkit.claims import plain_value
from labkit.estimates import Estimate, estimate
from labkit.exercises import Exercise
from labkit.exercises.checks import Feedback, NotAttempted, call, expect_number, quote
from labkit.formula import Part, envelope
from labkit.memory import format_bytes
from labkit.recipes import Recipe

# --- 1: the loss, by hand ------------------------------------------------------------------------

LOSS_MODEL, LOSS_BATCH, LOSS_LENGTH = "Qwen2.5-7B", 4, 2048


def loss_gib():
    one_copy = 4 * 4 * 2048 * 152_064  # FP32: four bytes for each token and word
    return 3 * one_copy / 1024**3  # the log-softmax, and two of its size for the gradients


def check_loss(answer):
    value, problem = plain_value(answer)
    if not problem and not isinstance(value, bool):
        slips = {
            1 / 3: "That is one copy, the formula's term. How many are alive in backward?",
            1 / 6: "That is one copy in 16 bits. The loss is calculated in FP32, and in copies.",
            1 / 2: "That is three copies in 16 bits. The loss is calculated in FP32.",
            2 / 3: "That is two copies. Look once more at what is alive in backward.",
            1 / LOSS_BATCH: "That is one text. The batch holds four.",
        }
        for factor, text in slips.items():
            if abs(value / (loss_gib() * factor) - 1) < 0.01:
                return f"You gave {value:g}. {text}"
    return expect_number(answer, loss_gib(), rel_tolerance=0.01, unit="GiB")


# --- 2: mend the formula -------------------------------------------------------------------------

#: Models of Llama's family, and lengths of their texts: grouped heads or not, narrow or wide.
TRIED = (("SmolLM2-135M", 2048), ("Llama-3.2-1B", 1024), ("Llama-2-7B", 2048))
TOLERANCE = 0.05
CARD = "a100-80gb"


def activations(L, h, f, groups, s, b):
    norms = 2 * (4 + 2 + 2) * h  # two norms: FP32 copy, normalised, times its weight
    attention = 2 * 2 * h + 2 * 2 * h / groups  # query and output; key and value, shared
    mlp = 4 * 2 * f  # gate, activated gate, up, their product
    return L * s * b * (norms + attention + mlp)


@functools.cache
def _traced_bytes(model: str, seq_len: int) -> int:
    found = estimate(model, gpu=CARD, precision="bf16", seq_len=seq_len)
    rows = envelope(model, precision="bf16", seq_len=seq_len).beside(found.run)
    return next(row.highest_bytes for row in rows if row.part is Part.ACTIVATIONS)


def check_activations(answer):
    for model, seq_len in TRIED:
        shape = models.config(model)
        groups = shape.num_attention_heads // shape.num_key_value_heads
        layers, h, f = shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
        given = call(answer, layers, h, f, groups, seq_len, 1)
        value, problem = plain_value(given)
        if problem or isinstance(value, bool):
            return f"Your function should return a number of bytes; it returned {quote(given)}."
        right = _traced_bytes(model, seq_len)
        if abs(value / right - 1) > TOLERANCE:
            tokens = layers * seq_len
            return (
                f"{model}, {seq_len} tokens: you calculate {format_bytes(value)}, the trace holds "
                f"{format_bytes(right)}. {_slip(value / tokens, right / tokens, h, f, groups)}"
            )
    return Feedback(True, "That is right: three models, one formula, within five percent.")


def _slip(value: float, right: float, h: int, f: int, groups: int) -> str:
    """A guess at what went wrong, from the bytes per token and layer."""
    slips = {
        34 * h: "That is still the paper's formula.",
        right - 8 * h: "Do the norms' FP32 copies count?",
        right - 2 * f: "Llama's MLP keeps four tensors of width f: do you have three?",
        right - 4 * f: "Llama's MLP keeps four tensors of width f: do you have two?",
        right + 4 * h - 4 * h / groups: "Key and value are shared by `groups` heads.",
        right - 4 * h / groups: "Attention keeps its key and value, too.",
        right - 2 * h: "Attention keeps its query and its output, two bytes each per channel.",
        right / 2: "BF16 takes two bytes.",
        right * 2: "BF16 takes two bytes.",
    }
    near = min(slips, key=lambda each: abs(value / each - 1))
    if abs(value / near - 1) < 0.02:
        return slips[near]
    return f"Per token and layer that is {value / h:.1f} h instead of {right / h:.1f} h."


# --- 3: the job that should fit ------------------------------------------------------------------

TARGET_MODEL, TARGET_CARD = "Llama-3.2-1B", "rtx-4090"
TARGET_LENGTH, LEAST_TOKENS = 4096, 16_384
FREE = ("batch_size", "accumulate", "checkpointing", "attention", "chunked_loss",
        "optimizer_in_backward")  # fmt: skip


def settings():
    # Logits of 1024 tokens at a time; accumulate=4 with batch_size=1 does it, too.
    return {"batch_size": 4, "checkpointing": True, "chunked_loss": True}


@functools.lru_cache(maxsize=32)
def _tried(recipe: Recipe) -> Estimate:
    return estimate(TARGET_MODEL, gpu=TARGET_CARD, recipe=recipe)


def check_settings(answer):
    if not isinstance(answer, Mapping):
        return f"Give the settings as a dictionary, {{'batch_size': 4}}; you gave {quote(answer)}."
    if not answer:
        raise NotAttempted("Put settings into the dictionary.")
    if unknown := [key for key in answer if key not in FREE]:
        return f"{unknown[0]!r} is not yours to change here. You can set {', '.join(FREE)}."
    fixed: dict[str, Any] = {"precision": "bf16", "seq_len": TARGET_LENGTH, **answer}
    recipe = Recipe(**fixed)
    if recipe.tokens < LEAST_TOKENS:
        return (
            f"Your step has {recipe.tokens} tokens; at least {LEAST_TOKENS} are wanted. A step "
            "may have several forward passes."
        )
    said, found = envelope(TARGET_MODEL, recipe=recipe).total_bytes, _tried(recipe)
    if found.fits:
        return Feedback(
            True,
            f"That is right: {format_bytes(found.peak_reserved_bytes)} of "
            f"{format_bytes(found.capacity_bytes)}, {recipe.tokens} tokens a step. "
            f"(The formula: {format_bytes(said)}.)",
        )
    return _rejected(recipe, said, found)


def _rejected(recipe: Recipe, said: int, found: Estimate) -> str:
    rows = envelope(TARGET_MODEL, recipe=recipe).beside(found.run)
    largest = max(rows, key=lambda row: row.peak_bytes)
    agrees = "agrees" if said > gpu(TARGET_CARD).budget_bytes else "says it would fit"
    if found.peak_allocated_bytes <= found.capacity_bytes:
        return (
            f"So close: your tensors take {format_bytes(found.peak_allocated_bytes)}, which would "
            f"fit, but the allocator cannot place them in {format_bytes(found.capacity_bytes)}. "
            f"The largest part is {largest.part}."
        )
    return (
        f"The formula ({format_bytes(said)}) {agrees}, the trace does not fit: its peak is "
        f"{format_bytes(found.peak_allocated_bytes)}. The largest part of it is {largest.part}, "
        f"{format_bytes(largest.peak_bytes)}."
    )


EXERCISES = (
    Exercise(
        "03-1",
        question="How many GiB do logits and loss hold at their highest moment?",
        hints=(
            "One number per token and word, in FP32, is the formula's term: 4 s b V.",
            "At the peak three tensors of that size are alive. GiB are 1024³ bytes.",
        ),
        solution=loss_gib,
        check=check_loss,
    ),
    Exercise(
        "03-2",
        question="The bytes of activations that a model of Llama's family keeps in BF16.",
        hints=(
            "Take the table of tensors at the peak: which have width h, which f, which format?",
            "MLP: four tensors of width f. Attention: query and output of width h, key and value "
            "of width h / groups. All two bytes.",
            "Each of the two norms keeps a tensor in FP32 and two in BF16, all of width h.",
        ),
        solution=activations,
        check=check_activations,
        kind="function",
    ),
    Exercise(
        "03-3",
        question="Settings for Llama-3.2-1B on an RTX 4090 that the trace accepts.",
        hints=(
            "Which part is the largest at the peak? Checkpointing cannot shrink that one.",
            "The logits grow with the tokens of one forward pass, not of one optimizer step.",
            "Either several small passes (`accumulate`), or the loss in pieces (`chunked_loss`).",
        ),
        solution=settings,
        check=check_settings,
    ),
)
