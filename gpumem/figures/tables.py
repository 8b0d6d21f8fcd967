"""Tables of runs, and what figures and tables have in common.

- ``table(runs)``: runs side by side, one row each, with the categories at the peak.
- ``run_labels``, ``held``, ``sources``: what figures and tables call a run, what it held, and
  where its numbers come from, so that figure and table never differ.

Limits: made for tens of rows, not thousands; there is no sorting and no paging.
"""

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from IPython.display import display

from gpumem.figures.html_pages import MISSING, Rich, grid
from gpumem.inputs import InputError, shown
from gpumem.runs import Run
from gpumem.trace import Category
from gpumem.units import format_bytes

MOST_COLUMNS = 11  # that fit into a notebook on a small screen


def finite_number(value: Any, what: str) -> float:
    """Return a number as a float; an `InputError` says that it is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise InputError(f"{what} must be a finite number, not {shown(value)}")
    return float(value)


def as_runs(runs: Run | Iterable[Run]) -> list[Run]:
    """Return one run or several as a list; an `InputError` refuses none, and what is no run."""
    found = [runs] if isinstance(runs, Run) else list(runs)
    if not found:
        raise InputError("there are no runs to show: pass one run or a list of runs")
    for run in found:
        if not isinstance(run, Run):
            raise InputError(f"a figure needs runs (what measure or simulate return), not {run!r}")
    return found


def differing(runs: Sequence[Run]) -> list[str]:
    """Return the parameters that differ between runs, in the order they first appear; no paths,
    since where a run kept a file says nothing of it."""
    names = dict.fromkeys(
        name
        for run in runs
        for name, value in run.parameters.items()
        if not str(value).startswith("/")
    )
    return [name for name in names if len({repr(run.parameters.get(name)) for run in runs}) > 1]


def setting_text(parameters: dict[str, Any], names: Iterable[str]) -> str:
    """Return ``"batch_size 8, precision bf16"``; parameters that a run lacks are left out."""
    return ", ".join(f"{name} {_value(parameters[name])}" for name in names if name in parameters)


def _value(parameter: Any) -> str:
    return f"{parameter:.3g}" if isinstance(parameter, float) else str(parameter)


def run_labels(runs: Sequence[Run], labels: Sequence[str] | None = None) -> list[str]:
    """Return what figures call each run: its label, or its name and, if names repeat, the
    parameters that differ; an `InputError` says that there is not one label per run."""
    if labels is not None:
        if isinstance(labels, str) or len(labels) != len(runs):
            raise InputError(f"labels must be {len(runs)} texts, one per run, not {labels!r}")
        return [str(label) for label in labels]
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    found: list[str] = []
    for run in runs:
        setting = setting_text(dict(run.parameters), differing(runs))
        parts = [setting or run.name] if len(set(names)) == 1 else [run.name, setting]
        found.append(", ".join(filter(None, parts)))
    return [
        label if label not in found[:i] else f"{label} ({found[:i].count(label) + 1})"
        for i, label in enumerate(found)
    ]


def sources(runs: Iterable[Run]) -> list[str]:
    """Return where the numbers come from, each source once: ``["simulated for NVIDIA T4"]``."""
    return list(dict.fromkeys(run.label for run in runs))


def held(run: Run) -> dict[Category, int]:
    """Return bytes by category at the peak; of a run that ran out of memory, at the failure."""
    table = run.oom.by_category if run.oom and run.oom.live_bytes else run.by_category
    return {category: table[category] for category in Category if table.get(category)}


def change_text(value: int, reference: int) -> str:
    """Return ``"−43 %"``, ``"+8 %"``, ``"same"``; ``"3.1 times"`` where per cent would mislead."""
    if value == reference:
        return "same"
    if not reference:
        return "from nothing"
    ratio = value / reference
    if ratio >= 2.5:
        return f"{ratio:.3g} times"
    percent = 100 * (ratio - 1)
    digits = 0 if abs(percent) >= 1 else 2
    if round(abs(percent), digits) == 0:
        return "almost the same"
    return f"{'+' if percent > 0 else '−'}{abs(percent):.{digits}f} %"


def seconds_text(seconds: float) -> str:
    """Return ``"1.23 s"``, ``"45.6 ms"``, ``"789 µs"``: three digits; ``"0 s"`` below 1 ns."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    if seconds < 1e-9:
        return "0 s"
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, scale = next((pair for pair in units if seconds >= pair[1]), units[-1])
    return f"{seconds / scale:.3g} {unit}"


def flops_text(flops: int) -> str:
    """Return floating-point operations with a decimal unit: ``"2.31 TFLOP"``."""
    for unit, scale in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if flops >= scale:
            return f"{flops / scale:.3g} {unit}"
    return f"{flops} FLOP"


def table(runs: Run | Iterable[Run], *, labels: Sequence[str] | None = None) -> None:
    """Show runs side by side, one row each, with ``labels`` as in ``bars``.

    Raises:
        InputError: no runs, or not one label per run.
    """
    display(build_table(runs, labels=labels))


def build_table(
    runs: Run | Iterable[Run],
    *,
    labels: Sequence[str] | None = None,
    against: Run | None = None,
) -> Rich:
    """Return what ``table`` shows, with ``labels`` and ``against`` as in ``bars``."""
    runs = as_runs(runs)
    names = run_labels(runs, labels)
    places = sources(runs)
    told = [f"{name}, {run.label}" for name, run in zip(names, runs, strict=True)]
    columns = [("run", told if len(places) > 1 else names)]
    if names == [run.name for run in runs]:
        for name in differing(runs):
            columns.append((name, [_value(run.parameters.get(name, MISSING)) for run in runs]))
    text_columns = set(range(len(columns)))
    columns.append(("peak", [_peak(run) for run in runs]))
    if against is not None and not against.oom:
        peaks = [None if run.oom else run.peak_bytes for run in runs]
        columns.append(("change", _cells(peaks, lambda n: change_text(n, against.peak_bytes))))
    parts = [held(run) for run in runs]
    for category in Category:
        if any(1000 * part.get(category, 0) >= sum(part.values()) > 0 for part in parts):
            cells = [format_bytes(part.get(category, 0)) for part in parts]
            columns.append((str(category), cells))
    # A simulation continues past the GPU's end: what it would reserve there says nothing.
    reserved = [run.oom.reserved_bytes if run.oom else run.reserved_bytes for run in runs]
    for heading, values, write in (
        ("reserved", reserved, format_bytes),
        ("time per step", [run.seconds_per_step for run in runs], seconds_text),
        ("work per step", [run.flops for run in runs], flops_text),
    ):
        if any(value is not None for value in values):
            columns.append((heading, _cells(values, write)))
    if len(columns) > MOST_COLUMNS:  # names tell the runs apart without their settings
        del columns[1 : len(text_columns)]
        text_columns = {0}
    caption = "Peak memory and what it is made of"
    if any(run.oom for run in runs):
        caption += " (where a run ran out of memory: at the failure)"
    headings, cells = zip(*columns, strict=True)
    rows = list(zip(*cells, strict=True))
    if len(places) <= 2:  # of more, the first column says enough
        caption += f"; {' and '.join(places)}"
    return grid(headings, rows, caption=f"{caption}.", text_columns=text_columns)


def _peak(run: Run) -> str:
    if run.oom:
        return f"out of memory at {format_bytes(sum(held(run).values()))}"
    return format_bytes(run.peak_bytes)


def _cells(values: Iterable[Any], write: Callable[[Any], str]) -> list[str]:
    return [MISSING if value is None else write(value) for value in values]
