"""Exercises of lesson 24: which technique a job needs, and the greedy order of adoption."""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

from gpumem.inputs import one_of, shown
from labkit.exercises.checks import call
from labkit.exercises.engine import check_of

#: As in the lesson's table: which part falls, by which share of it, seconds added to the bound.
TABLE = {
    "checkpointing": ("activations", 0.9, 0.15),
    "smaller batches": ("activations", 0.5, 0.04),
    "8-bit optimizer": ("optimizer", 0.75, -0.08),
    "optimizer in CPU memory": ("optimizer", 1.0, 0.34),
}
# (what the peak is made of, in GiB; the room, in GiB)
PEAKS = (
    ({"weights": 5, "optimizer": 9, "activations": 23}, 24),  # only checkpointing is enough
    ({"weights": 5, "optimizer": 9, "activations": 23}, 28),  # so is the cheaper one
    ({"weights": 8, "optimizer": 16, "activations": 2}, 16),  # the cheap one, and it saves time
    ({"weights": 8, "optimizer": 16, "activations": 2}, 11),  # the expensive one
    ({"weights": 12, "optimizer": 6, "activations": 6}, 11),  # none: weights stay
    ({"weights": 6, "optimizer": 8, "activations": 8}, 18),  # several would do
)
Measure = Callable[[Sequence[str]], tuple[float, float]]
SECONDS = {"a": 0.2, "b": 0.1, "c": -0.1, "d": 0.3}
#: Jobs by what each is to find out: the peaks of backward and of the optimizer's step, in GiB, and
#: how much of each a technique saves.
ORDER_JOBS = {
    "independent savings": ((40, 0), {"a": (10, 0), "b": (6, 0), "c": (3, 0), "d": (9, 0)}),
    "a peak that moves": ((40, 30), {"a": (15, 0), "b": (0, 12), "c": (4, 0), "d": (9, 0)}),
    "one that saves nothing": ((20, 18), {"a": (8, 0), "b": (0, 1), "c": (-2, 0), "d": (0, 9)}),
    "nothing to save": ((20, 20), dict.fromkeys(SECONDS, (5, 0))),
}


def needed(parts, table, room):
    fitting = {}
    for name, (part, share, seconds) in table.items():
        peak = sum(parts.values()) - share * parts[part]  # the other parts stay as they are
        if peak <= room:
            fitting[name] = seconds
    return min(fitting, key=fitting.get) if fitting else "none"


@check_of(
    "24-1",
    needed,
    "What is left of the peak after each technique? Only its own part shrinks.",
    "Keep those with which `sum(parts.values()) - share * parts[part]` is at most the room. Of "
    "them, `min(..., key=...)` by the seconds; 'none' if there are none.",
)
def check_needed(answer):
    for parts, room in PEAKS:
        given = one_of(call(answer, dict(parts), dict(TABLE), room), (*TABLE, "none"), "technique")
        if given != needed(parts, TABLE, room):
            made_of = ", ".join(f"{size} GiB of {name}" for name, size in parts.items())
            return (
                f"A peak of {made_of}, and room for {room} GiB: you return '{given}'. "
                f"{_advice(given, parts, room)}"
            )
    return None


def _advice(given: str, parts: Mapping[str, float], room: float) -> str:
    """Why ``given`` is not what this job needs."""
    if given == "none":
        return "One of them is enough: try each, and subtract what it takes from its own part."
    part, share, _ = TABLE[given]
    left = sum(parts.values()) - share * parts[part]
    if left > room:
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


def _measure_of(peaks: tuple[int, int], savings: Mapping[str, tuple[int, int]]) -> Measure:
    def measure(adopted: Sequence[str]) -> tuple[float, float]:
        backward, step = peaks
        for name in set(adopted):
            backward, step = backward - savings[name][0], step - savings[name][1]
        return max(backward, step), 1.0 + sum(SECONDS[name] for name in set(adopted))

    return measure


@check_of(
    "24-2",
    order,
    "Begin with an empty list. In each round measure `[*adopted, name]` for every name "
    "that is left, and compare with `measure(adopted)`.",
    "Skip what saves nothing. A tuple ranks the others: `(True, saved)` if no seconds are "
    "added, else `(False, saved / added)`.",
)
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
