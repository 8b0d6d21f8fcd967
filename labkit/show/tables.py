"""Small tables under the figures, and what figures and tables have in common.

- ``table(runs)``: runs side by side, one row each, with the categories at the peak.
- ``run_labels``, ``held``, ``sources``: what figures and tables call a run, what it held, and
  where its numbers come from, so that picture and table never differ.

Limits: made for tens of rows, not thousands; there is no sorting and no paging.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from IPython.display import display

from labkit.memory import Category, InputError, Run, format_bytes, one_of
from labkit.show.rich import MISSING, Rich, grid

# --- runs: which, called what, holding what ----------------------------------------------------


def as_runs(runs: Run | Iterable[Run]) -> list[Run]:
    """One run or several as a list.

    Raises:
        InputError: there are none, or something in it is not a run.
    """
    found = [runs] if isinstance(runs, Run) else list(runs)
    if not found:
        raise InputError("there are no runs to show: pass one run or a list of runs")
    for run in found:
        if not isinstance(run, Run):
            raise InputError(
                f"a figure needs runs (what measure, simulate or sweep return), not {run!r}"
            )
    return found


def differing(runs: Sequence[Run]) -> list[str]:
    """The parameters that are not the same in all runs, in the order they first appear."""
    names = dict.fromkeys(name for run in runs for name in run.parameters)
    return [
        name for name in names if len({repr(run.parameters.get(name, MISSING)) for run in runs}) > 1
    ]


def setting_text(parameters: dict[str, Any], names: Iterable[str]) -> str:
    """``"batch_size 8, precision bf16"``; parameters that a run lacks are left out."""
    return ", ".join(f"{name} {parameters[name]}" for name in names if name in parameters)


def run_labels(runs: Sequence[Run], labels: Sequence[str] | None = None) -> list[str]:
    """What figures call each run: its name, with the parameters that tell equal names apart.

    Raises:
        InputError: ``labels`` are given, but not one per run.
    """
    if labels is not None:
        if isinstance(labels, str) or len(labels) != len(runs):
            raise InputError(f"labels must be {len(runs)} texts, one per run, not {labels!r}")
        return [str(label) for label in labels]
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    settings = [setting_text(dict(run.parameters), differing(runs)) for run in runs]
    if len(set(names)) == 1:
        return _numbered([setting or run.name for setting, run in zip(settings, runs, strict=True)])
    return _numbered([", ".join(filter(None, pair)) for pair in zip(names, settings, strict=True)])


def _numbered(labels: list[str]) -> list[str]:
    """Equal labels told apart by a number; the first keeps its own."""
    seen: dict[str, int] = {}
    result = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        result.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return result


def sources(runs: Iterable[Run]) -> list[str]:
    """Where the numbers come from, each source once: ``["simulated for NVIDIA T4"]``."""
    return list(dict.fromkeys(run.label for run in runs))


def held(run: Run) -> dict[Category, int]:
    """Bytes by category at the peak; of a run that ran out of memory, at the failure."""
    table = run.oom.by_category if run.oom and run.oom.live_bytes else run.by_category
    return {category: table[category] for category in Category if table.get(category)}


def change_text(value: int, reference: int) -> str:
    """``"−43 %"``, ``"+8 %"``, ``"same"``; ``"3.1 times"`` where per cent would mislead."""
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
    """``"1.23 s"``, ``"45.6 ms"``, ``"789 µs"``: three digits, never zero for a small number."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    unit, scale = next((pair for pair in units if seconds >= pair[1]), units[-1])
    return f"{seconds / scale:.3g} {unit}"


def flops_text(flops: int) -> str:
    """Floating-point operations with a decimal unit: ``"2.31 TFLOP"``."""
    for unit, scale in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if flops >= scale:
            return f"{flops / scale:.3g} {unit}"
    return f"{flops} FLOP"


# --- the table of runs -------------------------------------------------------------------------


def table(
    runs: Run | Iterable[Run],
    *,
    columns: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    against: Run | None = None,
) -> None:
    """Show runs side by side, one row each.

    Args:
        runs: one run or several.
        columns: which to show and in which order: ``peak``, ``change``, a category
            (``activations``), ``reserved``, ``capacity``, ``seconds``, ``flops``, ``moved``,
            ``source``, or the name of a parameter. None: those that hold something.
        labels: what to call each run; None: its name and the parameters that differ.
        against: the run that ``change`` compares the others with.

    Raises:
        InputError: no runs, an unknown column, or not one label per run.
    """
    display(build_table(runs, columns=columns, labels=labels, against=against))


def build_table(
    runs: Run | Iterable[Run],
    *,
    columns: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    against: Run | None = None,
) -> Rich:
    """What ``table`` shows, without showing it. Same arguments, same errors."""
    runs = as_runs(runs)
    names = run_labels(runs, labels)
    parameters = list(dict.fromkeys(name for run in runs for name in run.parameters))
    if columns is None:
        columns = _default_columns(runs, names, against)
    else:
        known = [*_CELLS, *Category, *parameters, "change"]
        columns = [one_of(column, known, "column") for column in columns]
        columns = [c if c in _OURS else _PARAMETER + c for c in columns]
    rows = [
        [name, *(_cell(run, column, against) for column in columns)]
        for name, run in zip(names, runs, strict=True)
    ]
    words = {0} | {i for i, column in enumerate(columns, start=1) if _is_words(runs, column)}
    headings = ["run", *(_HEADINGS.get(c, c.removeprefix(_PARAMETER)) for c in columns)]
    return grid(headings, rows, caption=_caption(runs), words=words)


def _default_columns(runs: list[Run], names: list[str], against: Run | None) -> list[str]:
    columns = [_PARAMETER + p for p in differing(runs) if names == [run.name for run in runs]]
    columns += ["peak"] + (["change"] if against else [])
    columns += [category for category in Category if any(category in held(run) for run in runs)]
    optional = {
        "reserved": any(run.reserved_bytes is not None for run in runs),
        "seconds": any(run.step_seconds for run in runs),
        "flops": any(run.flops is not None for run in runs),
        "source": len(sources(runs)) > 1,
    }
    return columns + [column for column, wanted in optional.items() if wanted]


_HEADINGS = {"seconds": "time per step", "flops": "work per step", "moved": "moved per step"}

_CELLS = {
    "peak": lambda run: _peak_text(run),
    # A simulation goes on past the card's end: what it would reserve there says nothing.
    "reserved": lambda run: _optional(None if run.oom else run.reserved_bytes, format_bytes),
    "capacity": lambda run: _optional(run.capacity_bytes, format_bytes),
    "seconds": lambda run: _optional(run.seconds_per_step, seconds_text),
    "flops": lambda run: _optional(run.flops, flops_text),
    "moved": lambda run: _optional(run.moved_bytes, format_bytes),
    "sent": lambda run: format_bytes(run.sent_bytes) if run.sent_bytes else "",
    "source": lambda run: run.label,
}


_OURS = {*_CELLS, *Category, "change"}
# An experiment may have an argument called `optimizer`, which is a category too.
_PARAMETER = "parameter "


def _is_words(runs: list[Run], column: str) -> bool:
    if column in _OURS:
        return column == "source"
    name = column.removeprefix(_PARAMETER)
    return any(isinstance(run.parameters.get(name), str | bool) for run in runs)


def _cell(run: Run, column: str, against: Run | None) -> str:
    if column in _CELLS:
        return _CELLS[column](run)
    if column == "change":
        if against is None or run.oom:
            return MISSING
        return change_text(run.peak_bytes, against.peak_bytes)
    if column in _OURS:
        return format_bytes(held(run).get(Category(column), 0))
    return str(run.parameters.get(column.removeprefix(_PARAMETER), MISSING))


def _peak_text(run: Run) -> str:
    if not run.oom:
        return format_bytes(run.peak_bytes)
    return f"out of memory at {format_bytes(sum(held(run).values()))}"


def _optional(value: Any, write: Any) -> str:
    return MISSING if value is None else write(value)


def _caption(runs: list[Run]) -> str:
    what = "Peak memory and what it is made of"
    if any(run.oom for run in runs):
        what += " (where a run ran out of memory: at the failure)"
    return f"{what}; {' and '.join(sources(runs))}."
