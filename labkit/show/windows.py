"""The part of a trace that a timeline draws: cut to steps, thinned, divided into phases.

Limits: thinning keeps the highest, the lowest and the last point of each stretch, so areas in
between may differ from the trace by less than a pixel. All counts are of one device.
"""

from itertools import groupby
from typing import NamedTuple

import numpy as np

from labkit.memory import Category, InputError, Phase, Run, positive_int

THIN_ABOVE, BUCKETS = 4000, 1200


class Window(NamedTuple):
    """The part of a timeline that is drawn: ``bytes_by_category[c][i]`` after event ``at[i]``."""

    at: np.ndarray
    phases: tuple[Phase, ...]
    bytes_by_category: dict[Category, np.ndarray]
    totals: np.ndarray
    before_bytes: int  # live just before the first event


def cut_out(run: Run, steps: int | tuple[int, int] | None) -> tuple[Window, Window, int]:
    """The whole timeline of the run, the part to draw, and the first step in it (0: set-up)."""
    if not isinstance(run, Run):
        raise InputError(f"a timeline needs one run, not {run!r}")
    if run.trace is None:
        raise InputError(
            f"the run {run.name!r} has no trace, so it has no timeline (a run read back from a "
            "file has none; measure with track=True): bars() shows its peak"
        )
    line = run.trace.timeline()
    if not line.bytes_by_category:
        raise InputError(f"the run {run.name!r} allocated nothing on {run.trace.device}")
    rows = {c: np.array(row, dtype=np.int64) for c, row in line.bytes_by_category.items()}
    totals = np.sum(list(rows.values()), axis=0)
    whole = Window(np.array(line.indices), line.phases, rows, totals, 0)
    if steps is None:
        return whole, whole, 0
    first, start, stop = _step_range(run, steps)
    return whole, _cut(whole, start, stop), first


def _step_range(run: Run, steps: int | tuple[int, int]) -> tuple[int, int, int]:
    ranges = run.trace.steps()
    if not ranges:
        raise InputError(f"the run {run.name!r} stopped before its first step: leave steps out")
    pair = steps if isinstance(steps, tuple | list) else (steps, steps)
    if len(pair) != 2:
        raise InputError(f"steps must be a number or (first, last), not {steps!r}")
    first, last = (positive_int(step, "steps", most=len(ranges)) for step in pair)
    if last < first:
        raise InputError(f"steps must be (first, last) in this order, not {steps!r}")
    return first, ranges[first - 1][0], ranges[last - 1][1]


def _cut(window: Window, start: int, stop: int) -> Window:
    low, high = np.searchsorted(window.at, [start, stop])
    if low == high:
        raise InputError("nothing was allocated or freed in these steps: leave steps out")
    rows = {c: row[low:high] for c, row in window.bytes_by_category.items()}
    rows = {c: row for c, row in rows.items() if row.any()}
    before = int(window.totals[low - 1]) if low else 0
    return Window(
        window.at[low:high], window.phases[low:high], rows, window.totals[low:high], before
    )


def thinned(window: Window) -> Window:
    """At most some thousand points: of each stretch its highest, its lowest and its last."""
    count = len(window.at)
    if count <= THIN_ABOVE:
        return window
    keep = {0}
    for stretch in np.array_split(np.arange(count), BUCKETS):
        totals = window.totals[stretch]
        keep |= {int(stretch[totals.argmax()]), int(stretch[totals.argmin()]), int(stretch[-1])}
    kept = np.array(sorted(keep))
    return window._replace(
        at=window.at[kept],
        phases=tuple(window.phases[i] for i in kept),
        bytes_by_category={c: row[kept] for c, row in window.bytes_by_category.items()},
        totals=window.totals[kept],
    )


def stretches(window: Window) -> list[tuple[Phase, float, float]]:
    """``(phase, from, to)`` in events; what is too short to see belongs to the one before."""
    edges = np.append(window.at, window.at[-1] + 1)
    least = 0.004 * (edges[-1] - edges[0])
    found: list[tuple[Phase, float, float]] = []
    position = 0
    for phase, members in groupby(window.phases):
        length = sum(1 for _ in members)
        low, high = float(edges[position]), float(edges[position + length])
        position += length
        if found and (high - low < least or found[-1][0] == phase):
            found[-1] = (found[-1][0], found[-1][1], high)
        else:
            found.append((phase, low, high))
    return found


def phase_peaks(whole: Window, start: int, stop: int) -> dict[Phase, int]:
    """The most bytes in each phase between two events. What was live as it began counts."""
    low, high = (int(i) for i in np.searchsorted(whole.at, [start, stop]))
    peaks: dict[Phase, int] = {}
    for i in range(low, high):
        phase = whole.phases[i]
        entered = i == low or whole.phases[i - 1] != phase
        before = int(whole.totals[i - 1]) if entered and i else 0
        peaks[phase] = max(peaks.get(phase, 0), before, int(whole.totals[i]))
    return peaks
