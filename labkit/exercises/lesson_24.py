"""Exercises of lesson 24: a memory target on another job, and the greedy order of adoption."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from itertools import takewhile

from gpumem.estimation.recipe import Recipe
from gpumem.estimation.recipes_to_try import changes
from gpumem.estimation.search import link_and_bound
from gpumem.estimation.weight_shapes import shapes_of
from gpumem.inputs import shown
from gpumem.models.config import find_config
from gpumem.units import GIB, format_bytes
from labkit.exercises.checks import Correct, call, estimated, settings_of
from labkit.exercises.engine import check_of

MODEL, GPU = "SmolLM2-135M", "t4"
PLAIN = Recipe(batch_size=16, seq_len=512, attention="eager")
MOST_BYTES, MOST_SECONDS = 4 * GIB, 1.05
Measure = Callable[[Sequence[str]], tuple[float, float]]
SECONDS = {"a": 0.2, "b": 0.1, "c": -0.1, "d": 0.3, "e": -0.3}
#: Jobs by what each is to find out: the peaks of backward and of the optimizer's step, in GiB, and
#: how much of each a technique saves.
ORDER_JOBS = {
    "independent savings": (
        (40, 0),
        {"a": (10, 0), "b": (6, 0), "c": (3, 0), "d": (9, 0), "e": (1, 0)},
    ),
    "a peak that moves": (
        (40, 30),
        {"a": (15, 0), "b": (0, 12), "c": (4, 0), "d": (9, 0), "e": (0, 0)},
    ),
    "one that saves nothing": (
        (20, 18),
        {"a": (8, 0), "b": (0, 1), "c": (-2, 0), "d": (0, 9), "e": (0, 0)},
    ),
    "nothing to save": ((20, 20), dict.fromkeys(SECONDS, (5, 0))),
}


def fields():
    # A T4 has no kernel for this model's shared heads: fused attention would copy them, and take
    # longer. Checkpointing leaves the loss as the peak, which the chunks cut.
    return {"precision": "amp-fp16", "checkpointing": True, "chunked_loss": True}


@check_of("24-1", fields)
def check_fields(answer):
    names = [field.name for field in fields_of(Recipe)]
    recipe = answer if isinstance(answer, Recipe) else PLAIN.but(**settings_of(answer, names))
    if (recipe.tokens, recipe.seq_len, recipe.ranks) != (PLAIN.tokens, PLAIN.seq_len, 1):
        return "A step must train on the same 16 texts of 512 tokens, on one GPU."
    if others := set(changes(recipe)) - set(changes(PLAIN)):
        return f"That is another training: {'; '.join(sorted(others))}."
    found = estimated(MODEL, GPU, recipe)
    _, seconds = link_and_bound(found, shapes_of(find_config(MODEL)[1]))
    reserved_bytes = found.peak_reserved_bytes
    text = f"a step reserves {format_bytes(reserved_bytes)}, and takes at least {seconds:.2f} s"
    if reserved_bytes > MOST_BYTES:
        largest = max(found.run.by_category, key=found.run.by_category.get)
        return f"So {text}. That is too much memory. The largest part of the peak is {largest}."
    if seconds > MOST_SECONDS:
        return (
            f"So {text}. That is too long. Switch one field at a time: what does it cost, and what "
            "does it save on this job?"
        )
    return Correct(f"That is right: {text}.")


def order(measure, names):
    adopted = []
    peak, seconds = measure(adopted)
    while True:
        best = None
        for name in names:
            if name in adopted:
                continue
            new_peak, new_seconds = measure([*adopted, name])  # on top of what is there already
            saved, added = peak - new_peak, new_seconds - seconds
            if saved <= 0:
                continue
            worth = (True, saved) if added <= 0 else (False, saved / added)
            if best is None or worth > best[0]:
                best = worth, name, new_peak, new_seconds
        if best is None:
            return adopted
        _, name, peak, seconds = best
        adopted.append(name)


def _measure_of(peaks: tuple[int, int], savings: Mapping[str, tuple[int, int]]) -> Measure:
    def measure(adopted: Sequence[str]) -> tuple[float, float]:
        backward, step = peaks
        for name in set(adopted):
            backward, step = backward - savings[name][0], step - savings[name][1]
        return max(backward, step), 1.0 + sum(SECONDS[name] for name in set(adopted))

    return measure


@check_of("24-2", order)
def check_order(answer):
    for title, job in ORDER_JOBS.items():
        measure = _measure_of(*job)
        given, right = call(answer, measure, list(SECONDS)), order(measure, SECONDS)
        if not isinstance(given, list | tuple) or not all(name in SECONDS for name in given):
            return f"A list of the names given is asked for; you return {shown(given)}."
        if list(given) != right:
            advice = _order_advice(list(given), right, measure)
            return f"With {title}: you return {list(given)}. {advice}"
    return None


def _order_advice(given: list[str], right: list[str], measure: Measure) -> str:
    """Compare the first choice that is wrong with the right one, on top of what was adopted."""
    pairs = zip(given, right, strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    peak, seconds = measure(right[:same])
    texts = []
    for choice in (given[same : same + 1], right[same : same + 1]):
        new_peak, new_seconds = measure(right[:same] + choice)
        saving = f"saves {peak - new_peak:g} GiB for {new_seconds - seconds:+.1f} s"
        texts.append(f"'{choice[0]}' {saving}" if choice else "nothing more")
    return f"After {right[:same]} you take: {texts[0]}. Better: {texts[1]}."
