"""Exercises of lesson 03: a mended formula, and a job that only seems to fit."""

from gpumem.estimation.recipe import Recipe
from gpumem.estimation.textbook_formula import Part, formula_estimate
from gpumem.models import catalogue
from gpumem.units import format_bytes
from labkit.exercises.checks import Correct, call, estimated, expect_number, settings_of
from labkit.exercises.engine import check_of

#: Models of Llama's family, lengths and numbers of texts: grouped heads or not, narrow or wide.
TRIED = (("SmolLM2-135M", 2048, 1), ("Llama-3.2-1B", 1024, 3), ("Llama-2-7B", 2048, 1))
TOLERANCE = 0.05
GPU = "a100-80gb"
TARGET_MODEL, TARGET_GPU = "Llama-3.2-1B", "rtx-4090"
TARGET_LENGTH, LEAST_TOKENS = 4096, 16_384
FREE = ("batch_size", "accumulate", "checkpointing", "attention", "chunked_loss")
FREE += ("optimizer_in_backward",)


def activations(L, h, f, groups, s, b):
    norms = 2 * (4 + 2 + 2) * h  # two norms: FP32 copy, normalised, times its weight
    attention = 2 * 2 * h + 2 * 2 * h / groups  # query and output; key and value, shared
    mlp = 4 * 2 * f  # gate, activated gate, up, their product
    return L * s * b * (norms + attention + mlp)


@check_of("03-1", activations)
def check_activations(answer):
    for model, seq_len, batch_size in TRIED:
        shape = catalogue.config(model)
        groups = shape.num_attention_heads // shape.num_key_value_heads
        layers, h, f = shape.num_hidden_layers, shape.hidden_size, shape.intermediate_size
        given = call(answer, layers, h, f, groups, seq_len, batch_size)
        recipe = Recipe(precision="bf16", seq_len=seq_len, batch_size=batch_size)
        parts = formula_estimate(model, recipe=recipe).beside(estimated(model, GPU, recipe).run)
        right = next(each.highest_bytes for each in parts if each.part is Part.ACTIVATIONS)
        tokens = seq_len * batch_size
        slips = {layers * tokens * each: text for each, text in _slips(h, f, groups).items()}
        if batch_size > 1:
            one_text = activations(layers, h, f, groups, seq_len, 1)
            slips[one_text] = "That is one text. The batch has `b`."
        problem = expect_number(given, right, rel_tolerance=TOLERANCE, unit="bytes", slips=slips)
        if problem:
            texts = f"{batch_size} × {seq_len} tokens"
            return f"{model}, {texts}: the trace holds {format_bytes(right)}. {problem}"
    return Correct("That is right: three models, one formula, within five percent.")


def _slips(h: int, f: int, groups: int) -> dict[float, str]:
    """What known mistakes give, in bytes per token and layer."""
    right = activations(1, h, f, groups, 1, 1)
    return {
        34 * h: "That is still the paper's formula.",
        right - 8 * h: "Do the norms' FP32 copies count?",
        right - 2 * f: "Llama's MLP keeps four tensors of width f: do you have three?",
        right + 4 * h - 4 * h / groups: "Key and value are shared by `groups` heads.",
        right / 2: "BF16 takes two bytes.",
    }


def settings():
    # Logits of 1024 tokens at a time; accumulate=4 with batch_size=1 does it, too.
    return {"batch_size": 4, "checkpointing": True, "chunked_loss": True}


@check_of("03-2", settings)
def check_settings(answer):
    recipe = Recipe(precision="bf16", seq_len=TARGET_LENGTH, **settings_of(answer, FREE))
    if recipe.tokens < LEAST_TOKENS:
        return f"Your step has {recipe.tokens} tokens; at least {LEAST_TOKENS} are wanted."
    found = estimated(TARGET_MODEL, TARGET_GPU, recipe)
    formula = formula_estimate(TARGET_MODEL, recipe=recipe)
    reserved, room = format_bytes(found.peak_reserved_bytes), format_bytes(found.capacity_bytes)
    said = f"The formula says {format_bytes(formula.total_bytes)}"
    if found.fits:
        return Correct(
            f"That is right: {reserved} of {room}, {recipe.tokens} tokens a step. ({said}.)"
        )
    largest = max(formula.beside(found.run), key=lambda row: row.peak_bytes)
    return (
        f"{said}, of {room}. The trace does not fit: its tensors take "
        f"{format_bytes(found.peak_allocated_bytes)}, the allocator's blocks {reserved}. The "
        f"largest part is {largest.part}, {format_bytes(largest.peak_bytes)}."
    )
