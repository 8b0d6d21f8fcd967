"""Exercises of lesson 23: which technique a job needs, and the greedy order of adoption."""

from collections.abc import Callable, Mapping, Sequence

from labkit.exercises.checks import call
from labkit.exercises.engine import check_of
from labkit.values import one_of, shown


def needed(parts, table, card):
    fitting = {}
    for name, (part, share, seconds) in table.items():
        peak = sum(parts.values()) - share * parts[part]  # the other parts stay as they are
        if peak <= card:
            fitting[name] = seconds
    return min(fitting, key=fitting.get) if fitting else "none"


#: As in the lesson's table: which part falls, by which share of it, seconds added to the bound.
TABLE = {
    "checkpointing": ("activations", 0.9, 0.15),
    "smaller batches": ("activations", 0.5, 0.04),
    "8-bit optimizer": ("optimizer", 0.75, -0.08),
    "optimizer on the host": ("optimizer", 1.0, 0.34),
}
# (what the peak is made of, in GiB; the card, in GiB)
PEAKS = (
    ({"weights": 5, "optimizer": 9, "activations": 23}, 24),  # only checkpointing is enough
    ({"weights": 5, "optimizer": 9, "activations": 23}, 28),  # so is the cheaper one
    ({"weights": 8, "optimizer": 16, "activations": 2}, 16),  # the cheap one, and it saves time
    ({"weights": 8, "optimizer": 16, "activations": 2}, 11),  # the dear one
    ({"weights": 12, "optimizer": 6, "activations": 6}, 11),  # none: weights stay
    ({"weights": 6, "optimizer": 8, "activations": 8}, 18),  # several would do
)


@check_of(
    "23-1",
    needed,
    "What is left of the peak after each technique? Only its own part shrinks.",
    "`sum(parts.values()) - share * parts[part]` is what is left. Keep the techniques "
    "with which that is at most the card.",
    "Of those, `min(..., key=...)` by the seconds they add; 'none' if there are none.",
)
def check_needed(answer):
    for parts, card in PEAKS:
        given = one_of(call(answer, dict(parts), dict(TABLE), card), (*TABLE, "none"), "technique")
        if given != needed(parts, TABLE, card):
            made_of = ", ".join(f"{size} GiB of {name}" for name, size in parts.items())
            return (
                f"A peak of {made_of}, on a card of {card} GiB: you return '{given}'. "
                f"{_advice(given, parts, card)}"
            )
    return None


def _advice(given: str, parts: Mapping[str, float], card: float) -> str:
    """Why ``given`` is not what this job needs."""
    if given == "none":
        return "One of them is enough: try each, and subtract what it takes from its own part."
    part, share, _ = TABLE[given]
    left = sum(parts.values()) - share * parts[part]
    if left > card:
        return f"It takes {share:.0%} of the {part} alone, and leaves {left:g} GiB."
    return "It fits, but another one that fits adds fewer seconds."


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


Measure = Callable[[Sequence[str]], tuple[float, float]]
SECONDS = {"a": 0.2, "b": 0.1, "c": -0.1, "d": 0.3}


def _table(start: Mapping[str, float], changes: Mapping[str, Mapping[str, float]]) -> Measure:
    """A job of two moments: peaks of ``start`` (backward, step), which techniques reduce."""

    def measure(adopted: Sequence[str]) -> tuple[float, float]:
        peaks = dict(start)
        for name in set(adopted):
            for moment, saved in changes[name].items():
                peaks[moment] -= saved
        return max(peaks.values()), 1.0 + sum(SECONDS[name] for name in set(adopted))

    return measure


#: Jobs by what each is to find out. Peaks in GiB; backward and step are two moments.
TABLES: dict[str, Measure] = {
    "independent savings": _table(
        {"backward": 40, "step": 0},
        {"a": {"backward": 10}, "b": {"backward": 6}, "c": {"backward": 3}, "d": {"backward": 9}},
    ),
    "a peak that moves": _table(
        {"backward": 40, "step": 30},
        {"a": {"backward": 15}, "b": {"step": 12}, "c": {"backward": 4}, "d": {"backward": 9}},
    ),
    "one that saves nothing": _table(
        {"backward": 20, "step": 18},
        {"a": {"backward": 8}, "b": {"step": 1}, "c": {"backward": -2}, "d": {"step": 9}},
    ),
    "nothing to save": _table(
        {"backward": 20, "step": 20}, {name: {"backward": 5} for name in SECONDS}
    ),
}


@check_of(
    "23-2",
    order,
    "Begin with an empty list. In each round measure `[*adopted, name]` for every name "
    "that is left, and compare with `measure(adopted)`.",
    "Skip what saves nothing. A tuple ranks the others: `(True, saved)` if no seconds are "
    "added, else `(False, saved / added)`.",
    "Adopt the best of the round and start the next; return when a round has none.",
)
def check_order(answer):
    for title, measure in TABLES.items():
        given, right = call(answer, measure, list(SECONDS)), order(measure, SECONDS)
        if not isinstance(given, list | tuple) or not all(name in SECONDS for name in given):
            return f"A list of the names given is asked for; you return {shown(given)}."
        if list(given) != right:
            return f"With {title}: you return {list(given)}. {_order_advice(list(given), measure)}"
    return None


def _order_advice(given: list[str], measure: Measure) -> str:
    """Compare the first choice that is wrong with the right one, on top of what was adopted."""
    right = order(measure, SECONDS)
    same = 0
    while same < min(len(given), len(right)) and given[same] == right[same]:
        same += 1
    adopted, texts = right[:same], []
    peak, seconds = measure(adopted)
    for choice in (given[same : same + 1], right[same : same + 1]):
        new_peak, new_seconds = measure(adopted + choice)
        texts.append(
            f"'{choice[0]}' saves {peak - new_peak:g} GiB for {new_seconds - seconds:+.1f} s"
            if choice
            else "nothing more"
        )
    return f"After {adopted} you take: {texts[0]}. Better: {texts[1]}."
