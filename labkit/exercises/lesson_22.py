"""Exercises of lesson 22: the longest text that fits, and a memory target with a bound on time."""

import functools
from collections.abc import Mapping
from numbers import Integral

from labkit.catalogue import GPUS
from labkit.estimates import Estimate, estimate
from labkit.exercises import Exercise
from labkit.exercises.checks import Feedback, quote
from labkit.memory import GIB, format_bytes
from labkit.recipes import Recipe

MODEL, GPU = "Llama-3.1-8B", "rtx-4090"
QLORA = Recipe(
    precision="bf16", lora=16, quantize="nf4-double", checkpointing=True, chunked_loss=True
)
MULTIPLE, POSITIONS = 1024, 131_072
MARGIN = 0.05  # of the capacity, as in lab.advise
MOST_BYTES, MOST_SECONDS = 20 * GIB, 0.40
LEAST_TOKENS, MOST_TOKENS = 1024, 16_384


@functools.cache
def estimated(recipe: Recipe) -> Estimate:
    """The estimate of ``recipe``; nothing is simulated twice."""
    return estimate(MODEL, gpu=GPU, recipe=recipe)


# --- 1: how long a text? -----------------------------------------------------------------------


def longest():
    # Memory is close to a straight line in the length: two estimates say where it meets the card.
    def needs(tokens):
        return estimated(QLORA.but(seq_len=tokens)).peak_reserved_bytes

    room = 0.95 * estimated(QLORA.but(seq_len=8192)).capacity_bytes
    per_token = (needs(16_384) - needs(8192)) / 8192
    tokens = int(8192 + (room - needs(8192)) / per_token) // 1024 * 1024
    # The allocator hands out whole segments, so the line is no ruler: look left and right.
    while needs(tokens) > room:
        tokens -= 1024
    while needs(tokens + 1024) <= room:
        tokens += 1024
    return tokens


def check_longest(answer):
    if isinstance(answer, bool) or not isinstance(answer, Integral):
        return f"A whole number of tokens is asked for; you gave {quote(answer)}."
    if 1 <= answer <= POSITIONS // MULTIPLE:
        return (
            f"You gave {answer}. Tokens are asked for, not thousands of them: {answer} × 1024 is "
            f"{answer * 1024}."
        )
    if answer % MULTIPLE or answer < 1:
        return f"{answer} is no multiple of {MULTIPLE}. The nearest below is {_below(answer)}."
    if answer > POSITIONS:
        return f"{MODEL} knows {POSITIONS} positions, so {answer} tokens are no text for it."
    found = estimated(QLORA.but(seq_len=int(answer)))
    spare = found.capacity_bytes - found.peak_reserved_bytes
    if not found.fits:
        return (
            f"{answer} tokens need {format_bytes(found.peak_reserved_bytes)}, which is "
            f"{format_bytes(max(-spare, 0))} too much: a shorter text."
        )
    if not _with_margin(found):
        return (
            f"{answer} tokens do fit, but leave {format_bytes(spare)} free; {MARGIN:.0%} of the "
            f"card is {format_bytes(_margin_bytes(found))}. A shorter text."
        )
    longer = estimated(QLORA.but(seq_len=int(answer) + MULTIPLE))
    if _with_margin(longer):
        more = longer.peak_reserved_bytes - found.peak_reserved_bytes
        slope = f" The next {MULTIPLE} tokens take {format_bytes(more)}." if more > 0 else ""
        return (
            f"{answer} tokens leave {format_bytes(spare)} free, and with {answer + MULTIPLE} the "
            f"margin is still there: a longer text.{slope}"
        )
    return Feedback(
        True,
        f"That is right: {answer} tokens leave {format_bytes(spare)} free, and {MULTIPLE} more "
        f"would leave less than the margin of {format_bytes(_margin_bytes(found))}.",
    )


def _with_margin(found: Estimate) -> bool:
    return found.fits and found.peak_reserved_bytes <= (1 - MARGIN) * found.capacity_bytes


def _margin_bytes(found: Estimate) -> float:
    return MARGIN * found.capacity_bytes


def _below(answer: int) -> int:
    return max(answer // MULTIPLE, 1) * MULTIPLE


# --- 2: a memory target with a bound on time ---------------------------------------------------


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


def check_fields(answer):
    if isinstance(answer, Recipe):
        recipe = answer
    elif isinstance(answer, Mapping) and all(isinstance(key, str) for key in answer):
        recipe = Recipe().but(**answer)  # what contradicts itself is refused with the reason
    else:
        return f"A dictionary of a recipe's fields is asked for; you gave {quote(answer)}."
    problem = _other_training(recipe) or _tokens(recipe)
    if problem:
        return problem
    found = estimated(recipe)
    problem = _too_large(found) or _too_slow(found)
    return problem or Feedback(
        True,
        f"That is right: all weights of {MODEL} in {format_bytes(found.peak_reserved_bytes)}, and "
        f"at least {seconds(found):.2f} s per 1000 tokens.",
    )


def _other_training(recipe: Recipe) -> str | None:
    if recipe.lora:
        return "Your recipe trains adapters. Here every weight is trained: leave lora out."
    if recipe.offload != "none":
        return (
            f"Your recipe keeps {recipe.offload} on the host, which is not allowed here. What else "
            "takes bytes per parameter away?"
        )
    if recipe.optimizer == "paged-adamw8bit":
        return (
            "A paged optimizer keeps its state in host memory whenever the card is short, and here "
            "it always would be. Nothing may live on the host."
        )
    return None


def _tokens(recipe: Recipe) -> str | None:
    if recipe.tokens < LEAST_TOKENS:
        return f"Your step has {recipe.tokens} tokens; at least {LEAST_TOKENS} are asked for."
    if recipe.tokens > MOST_TOKENS:
        return (
            f"Your step has {recipe.tokens} tokens. To answer soon, this check simulates at most "
            f"{MOST_TOKENS}; fewer will do."
        )
    return None


def _too_large(found: Estimate) -> str | None:
    needed = found.peak_reserved_bytes
    if needed <= MOST_BYTES:
        return None
    text = f"Your recipe needs {format_bytes(needed)}, the target is {format_bytes(MOST_BYTES)}."
    if found.floor_bytes > MOST_BYTES:
        return (
            f"{text} Its floor alone is {format_bytes(found.floor_bytes)}: no batch and no "
            "schedule helps. Take away bytes per parameter: weights, optimizer state."
        )
    largest = sorted(found.by_category, key=found.by_category.get)[-2:]
    parts = " and ".join(
        f"{name} ({format_bytes(found.by_category[name])})" for name in reversed(largest)
    )
    fits = " It does fit the card." if found.fits else ""
    return (
        f"{text}{fits} Its floor is {format_bytes(found.floor_bytes)}, so a schedule can help: at "
        f"the peak stand {parts}."
    )


def _too_slow(found: Estimate) -> str | None:
    bound = seconds(found)
    if bound <= MOST_SECONDS:
        return None
    arithmetic, moving = parts_of_bound(found)
    reason = (
        "Its arithmetic takes that long: which saver computes things twice?"
        if arithmetic >= moving
        else "Moving bytes takes that long, not arithmetic: which optimizer reads and writes the "
        "most, and do more tokens share one step?"
    )
    return (
        f"It is small enough, but takes at least {bound:.2f} s per 1000 tokens; the limit is "
        f"{MOST_SECONDS:.2f} s. {reason}"
    )


def parts_of_bound(found: Estimate) -> tuple[float, float]:
    """Seconds per 1000 tokens of arithmetic and of moving bytes, at the card's published rates."""
    card = GPUS[found.gpu]
    rate = card.bf16_tflops * 1e12 / (2 if found.recipe.precision == "fp32" else 1)
    share = 1000 / found.recipe.tokens
    moving = found.moved_bytes * share / (card.bandwidth_gb_per_s * 1e9)
    return found.flops * share / rate, moving


def seconds(found: Estimate) -> float:
    """The bound of the lesson, without a link: nothing is on the host here."""
    return max(parts_of_bound(found))


EXERCISES = (
    Exercise(
        "22-1",
        question="The longest text, a multiple of 1024, of a QLoRA step that leaves 5 % free.",
        hints=(
            "With checkpointing and the loss in chunks, what grows with the length grows evenly: "
            "memory is close to a straight line in it.",
            "Estimate two lengths, 8192 and 16384 say. How many bytes does a token take?",
            "95 % of `estimate(...).capacity_bytes`, less the need, divided by the bytes per "
            "token: so many more tokens there is room for. Round down, and try its neighbours.",
        ),
        solution=longest,
        check=check_longest,
        kind="value",
    ),
    Exercise(
        "22-2",
        question="All weights of an 8B in 20 GiB of the card, at most 0.40 s per 1000 tokens.",
        hints=(
            "Eight billion weights: how many GiB do they take in each precision, and how many "
            "bytes per parameter does that leave for optimizer state and gradients?",
            "Almost none. Which optimizers keep (almost) no state, and when can a gradient go?",
            "`optimizer_in_backward` lets each gradient go at once. Activations go by "
            "checkpointing. Of the two optimizers without state, one moves far fewer bytes.",
        ),
        solution=thrifty_fields,
        check=check_fields,
        kind="value",
    ),
)
