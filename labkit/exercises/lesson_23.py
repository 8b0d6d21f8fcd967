"""Exercises of lesson 23: the longest text that fits, and a memory target with a bound on time."""

from functools import partial

from gpumem.estimation.advice import MARGIN
from gpumem.estimation.estimate import Estimate
from gpumem.estimation.recipe import Recipe
from gpumem.hardware.least_seconds import least_seconds
from gpumem.units import GIB, format_bytes
from labkit.exercises import checks
from labkit.exercises.checks import Correct, settings_of, whole_number
from labkit.exercises.engine import check_of

MODEL, GPU = "Llama-3.1-8B", "rtx-4090"
QLORA = Recipe(
    precision="bf16", lora=16, quantize="nf4-double", checkpointing=True, chunked_loss=True
)
MULTIPLE, POSITIONS = 1024, 131_072
MOST_BYTES, MOST_SECONDS = 20 * GIB, 0.40
LEAST_TOKENS, MOST_TOKENS = 1024, 16_384
estimated = partial(checks.estimated, MODEL, GPU)


def longest():
    # Memory is close to a straight line in the length: two estimates say where it meets the card.
    def needs(tokens):
        return estimated(QLORA.but(seq_len=tokens)).peak_reserved_bytes

    room = (1 - MARGIN) * estimated(QLORA.but(seq_len=8192)).capacity_bytes
    per_token = (needs(16_384) - needs(8192)) / 8192
    tokens = int(8192 + (room - needs(8192)) / per_token) // 1024 * 1024
    # The allocator hands out whole segments, so the line is no ruler: look left and right.
    while needs(tokens) > room:
        tokens -= 1024
    while needs(tokens + 1024) <= room:
        tokens += 1024
    return tokens


@check_of("23-1", longest)
def check_longest(answer):
    tokens = whole_number(answer, "the number of tokens", most=POSITIONS)
    if tokens % MULTIPLE:
        return f"{tokens} is no multiple of {MULTIPLE}."
    found = estimated(QLORA.but(seq_len=tokens))
    room_bytes = int((1 - MARGIN) * found.capacity_bytes)
    text = (
        f"{tokens} tokens need {format_bytes(found.peak_reserved_bytes)}; {1 - MARGIN:.0%} of the "
        f"memory is {format_bytes(room_bytes)}"
    )
    if found.peak_reserved_bytes > room_bytes:
        return f"{text}: a shorter text."
    longer = estimated(QLORA.but(seq_len=tokens + MULTIPLE))
    if longer.peak_reserved_bytes <= room_bytes:
        return f"{text}, and {tokens + MULTIPLE} tokens would still fit: a longer text."
    return Correct(f"That is right. {text}, and {MULTIPLE} tokens more would not fit.")


def thrifty_fields():
    # bf16 weights are 15 GiB; nothing else may stay for each of them. SGD keeps no state, and in
    # backward no gradient stays either. One text's activations go by checkpointing.
    return {
        "precision": "bf16",
        "optimizer": "sgd",
        "optimizer_in_backward": True,
        "checkpointing": True,
        "chunked_loss": True,
        "batch_size": 1,
        "seq_len": 1024,
    }


@check_of("23-2", thrifty_fields)
def check_fields(answer):
    recipe = Recipe().but(**settings_of(answer))
    if recipe.lora:
        return "Your recipe trains adapters. Here every weight is trained: leave lora out."
    if recipe.offload != "none" or recipe.optimizer == "paged-adamw8bit":
        return "Nothing may live in CPU memory, and a paged optimizer can keep its state there."
    if not LEAST_TOKENS <= recipe.tokens <= MOST_TOKENS:
        return f"Your step has {recipe.tokens} tokens; {LEAST_TOKENS} to {MOST_TOKENS} are allowed."
    found = estimated(recipe)
    needed, floor = format_bytes(found.peak_reserved_bytes), format_bytes(found.floor_bytes)
    bound = _seconds(found, moved_bytes=found.run.moved_bytes)
    if found.peak_reserved_bytes > MOST_BYTES:
        advice = "a schedule can help"
        if found.floor_bytes > MOST_BYTES:
            advice = "no batch and no schedule helps: take away bytes per parameter"
        largest = max(found.by_category, key=found.by_category.get)
        return (
            f"Your recipe needs {needed}, the target is {format_bytes(MOST_BYTES)}. Its floor is "
            f"{floor}, so {advice}. The largest part of the peak is {largest}."
        )
    if bound > MOST_SECONDS:
        reason = "moving bytes: which optimizer reads and writes the most?"
        if bound == _seconds(found, moved_bytes=0):
            reason = "its arithmetic: which technique computes things twice?"
        return (
            f"It is small enough, but takes at least {bound:.2f} s per 1000 tokens; the limit is "
            f"{MOST_SECONDS:.2f} s. What takes that long is {reason}"
        )
    return Correct(f"That is right: {needed}, and at least {bound:.2f} s per 1000 tokens.")


def _seconds(found: Estimate, *, moved_bytes: int) -> float:
    """Return the lesson's bound, per 1000 tokens, without a link: nothing is on the host here."""
    recipe = found.recipe
    bound = least_seconds(found.gpu, {recipe.precision: found.run.flops}, moved_bytes)
    return 1000 / recipe.tokens * bound
