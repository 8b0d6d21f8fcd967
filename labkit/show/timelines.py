"""Timelines: the live bytes of a run after each allocation and each free, by category.

The horizontal axis counts events, not seconds: an operator that allocates much takes much room,
one that allocates nothing takes none.

Limits: a long trace is thinned for drawing: of each stretch narrower than a pixel its highest,
lowest and last point are kept. The marked peak and the table come from the whole trace. Phases too
short to see are not shaded; the table has them.
"""

from itertools import groupby
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from labkit.runs import Run
from labkit.show.picture import (
    ABOVE,
    ALARM,
    ASIDE,
    GREY,
    INK,
    LIMIT_LINE,
    PAPER,
    Picture,
    category_legend,
    fill,
    fits,
    note,
    scale,
    showing,
)
from labkit.support.html_table import MISSING
from labkit.trace import Category, Phase
from labkit.values import InputError, format_bytes, positive_int

PHASE_COLOURS = {
    Phase.SETUP: "#E3E3E3",
    Phase.FORWARD: "#D3E5F4",
    Phase.BACKWARD: "#FBE2C8",
    Phase.OPTIMIZER: "#D0EBDD",
    Phase.OTHER: "#F0F0F0",
}
SHORT_NAMES = {Phase.FORWARD: "fwd", Phase.BACKWARD: "bwd", Phase.OPTIMIZER: "opt"}
TABLE_STEPS = 10
THIN_ABOVE, BUCKETS = 4000, 1200
VISIBLE = 0.004  # of the width


class Window(NamedTuple):
    """A part of a timeline: ``bytes_by_category[c][i]`` after event ``at[i]``, in ``phases[i]``."""

    at: np.ndarray
    phases: np.ndarray
    bytes_by_category: dict[Category, np.ndarray]

    @property
    def totals(self) -> np.ndarray:
        return sum(self.bytes_by_category.values(), np.zeros(len(self.at), dtype=np.int64))

    def select(self, chosen: np.ndarray | slice) -> "Window":
        """Return the window with these positions only, and with categories that are not empty."""
        rows = {c: row[chosen] for c, row in self.bytes_by_category.items() if row[chosen].any()}
        return Window(self.at[chosen], self.phases[chosen], rows)


def draw_timeline(
    run: Run, *, steps: int | tuple[int, int] | None = None, title: str | None = None
) -> Picture:
    """Draw the live bytes of a run from event to event, with each step's peaks in a table.

    Marked are the peak, and where the run ran out of memory.

    Args:
        run: a run with a trace (of this session, not read back from a file).
        steps: a step's number from 1, or ``(first, last)``; None: everything, the set-up too.
        title: what the figure shows; None: "Live memory, event by event: <name>".

    Returns:
        The figure; ``timeline`` has shown it, ``draw_timeline`` has not.

    Raises:
        InputError: the run has no trace, nothing was allocated, or there is no such step.
    """
    whole = window = whole_window(run)
    first_step = 0
    if steps is not None:
        first_step, last_step = _step_range(run, steps)
        ranges = run.trace.steps()
        limits = (ranges[first_step - 1][0], ranges[last_step - 1][1])
        window = whole.select(slice(*np.searchsorted(whole.at, limits)))
        if not window.at.size:
            raise InputError("nothing was allocated or freed in these steps: leave steps out")
    used = [category for category in Category if category in window.bytes_by_category]
    title = title or f"Live memory, event by event: {run.name}"
    figure = Picture(title, run.label, body=390, legend=category_legend(used))
    with figure.drawing() as axes:
        _draw_areas(axes, thinned(window))
        event_axes(axes, window.at[0], window.at[-1] + 1)
        _draw_capacity(axes, int(window.totals.max()), run.capacity_bytes)
        axes.set_ylabel("live memory")
        _name_phases(axes, window)
        _name_steps(axes, run, window)
        _mark_peak(axes, run, window)
    _describe(figure, run, whole, window, first_step)
    return figure


timeline = showing(draw_timeline)


# --- what is drawn -------------------------------------------------------------------------------


def whole_window(run: Run) -> Window:
    """Return the whole timeline of a run."""
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
    return Window(np.array(line.indices), np.array(line.phases), rows)


def _step_range(run: Run, steps: int | tuple[int, int]) -> tuple[int, int]:
    """Return the first and the last step that ``steps`` asks for."""
    count = len(run.trace.steps())
    if not count:
        raise InputError(f"the run {run.name!r} stopped before its first step: leave steps out")
    pair = steps if isinstance(steps, tuple | list) else (steps, steps)
    if len(pair) != 2:
        raise InputError(f"steps must be a number or (first, last), not {steps!r}")
    first, last = (positive_int(step, "steps", most=count) for step in pair)
    if last < first:
        raise InputError(f"steps must be (first, last) in this order, not {steps!r}")
    return first, last


def thinned(window: Window) -> Window:
    """Return at most some thousand points: of each stretch its highest, lowest and last."""
    if len(window.at) <= THIN_ABOVE:
        return window
    totals, selected = window.totals, {0}
    for stretch in np.array_split(np.arange(len(totals)), BUCKETS):
        selected |= {stretch[totals[stretch].argmax()], stretch[totals[stretch].argmin()]}
        selected.add(stretch[-1])
    return window.select(np.array(sorted(selected)))


# --- drawing -----------------------------------------------------------------------------------


def _draw_areas(axes: Axes, window: Window) -> None:
    at = np.append(window.at, window.at[-1] + 1)  # the last event lasts one event, too
    low = np.zeros(len(at))
    for category in Category:
        if category in window.bytes_by_category:
            row = window.bytes_by_category[category]
            high = low + np.append(row, row[-1])
            style = {**fill(category), "linewidth": 0}
            axes.fill_between(at, low, high, step="post", **style)
            low = high
    axes.step(at, low, where="post", color=INK, linewidth=0.9, zorder=4)


def event_axes(axes: Axes, start: int, stop: int) -> None:
    """Scale the axes of a figure that shows bytes from event to event."""
    axes.set_xlim(start, stop)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel("allocations and frees, in order")
    scale(axes.yaxis, format_bytes)
    axes.grid(axis="y")


def byte_limit(axes: Axes, text: str, nbytes: int) -> None:
    """Draw a horizontal line with its name below it at the left."""
    axes.axhline(nbytes, zorder=5, **LIMIT_LINE)
    note(axes, text, (0, nbytes), (5, -4), xycoords=ASIDE, va="top", zorder=6, bbox=PAPER)


def _draw_capacity(axes: Axes, peak_bytes: int, capacity_bytes: int | None) -> None:
    top = 1.3 * peak_bytes or 1  # the room above the data is for the peak's text
    if capacity_bytes and capacity_bytes < 1.25 * top:
        if capacity_bytes > 0.8 * top:
            top = max(top, 1.22 * capacity_bytes)
        byte_limit(axes, f"capacity {format_bytes(capacity_bytes)}", capacity_bytes)
    axes.set_ylim(0, top)


def _name_phases(axes: Axes, window: Window) -> None:
    """Shade the phases and name them in a strip above the axes, as far as the names fit."""
    edges = np.append(window.at, window.at[-1] + 1)
    transform = axes.get_xaxis_transform()
    position = 0
    for phase, members in groupby(window.phases):
        start = edges[position]
        position += len(list(members))
        width = edges[position] - start
        share = width / (edges[-1] - edges[0])
        if share < VISIBLE:
            continue
        colour = PHASE_COLOURS[phase]
        axes.axvspan(start, start + width, facecolor=colour, alpha=0.45, linewidth=0, zorder=0)
        strip = Rectangle((start, 1.0), width, 0.07, transform=transform, clip_on=False)
        strip.set(facecolor=colour, edgecolor="white", linewidth=1)
        axes.add_artist(strip)
        name = str(phase) if fits(str(phase), share) else SHORT_NAMES.get(phase, "")
        if fits(name, share):
            style = {"ha": "center", "va": "center", "size": 9.5, "transform": transform}
            axes.text(start + width / 2, 1.035, name, **style)


def _name_steps(axes: Axes, run: Run, window: Window) -> None:
    """Draw a line where each step starts, its number above the strip of phases."""
    start, stop = window.at[0], window.at[-1] + 1
    for number, (low, high) in enumerate(run.trace.steps(), start=1):
        if not start <= low < stop:
            continue
        axes.axvline(low, color=GREY, linewidth=1, linestyle=(0, (2, 2)), zorder=5)
        if fits(f"step {number} ", (min(high, stop) - low) / (stop - start)):
            note(axes, f"step {number}", (low, 1.07), (0, 4), xycoords=ABOVE, weight="bold")


def _mark_peak(axes: Axes, run: Run, window: Window) -> None:
    """Draw an arrow to the peak; where the run ran out of memory, one to its end instead."""
    at = int(window.totals.argmax())
    height = int(window.totals[at])
    words, colour = f"peak {format_bytes(height)}, {_where(run, window, at)}", INK
    if run.oom and window.at[-1] >= len(run.trace.events) - 1:
        asked = format_bytes(run.oom.requested_bytes) if run.oom.requested_bytes else "more memory"
        words, colour = f"{words}\nout of memory here: asked for {asked}", ALARM
        at, height = len(window.at) - 1, int(window.totals[-1])
        wanted = min(height + run.oom.requested_bytes, axes.get_ylim()[1])
        style = {"color": ALARM, "linewidth": 2, "linestyle": (0, (3, 1.5)), "zorder": 6}
        axes.plot([window.at[-1] + 1] * 2, [height, wanted], clip_on=False, **style)
    x = float(window.at[at])
    low, high = axes.get_xlim()
    share = (x - low) / (high - low)
    axes.annotate(
        words,
        (x, height),
        xytext=(min(max(share, 0.25), 0.75), 0.97),
        textcoords="axes fraction",
        ha="center",
        va="top",
        weight="bold",
        size=10,
        color=colour,
        bbox=PAPER,
        zorder=7,
        arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.4, "shrinkA": 2},
    )


def _where(run: Run, window: Window, at: int) -> str:
    """Return ``"step 2, backward"`` for position ``at`` of the window."""
    step = run.trace.step_at(int(window.at[at]))
    phase = str(window.phases[at])
    return f"step {step}, {phase}" if step else phase


# --- the table and the text --------------------------------------------------------------------


def _describe(figure: Picture, run: Run, whole: Window, window: Window, first_step: int) -> None:
    """Describe the peak, and tabulate the most that was live in each phase of each step."""
    at = int(window.totals.argmax())
    parts = [f"Peak {format_bytes(int(window.totals[at]))} in {_where(run, window, at)}"]
    for category, row in window.bytes_by_category.items():
        if row[at]:
            parts.append(f"{category} {format_bytes(int(row[at]))}")
    if run.oom:
        parts.append(str(run.oom))
    spans = {f"step {i}": span for i, span in enumerate(run.trace.steps(), start=1)}
    opening = min([start for start, _ in spans.values()], default=len(run.trace.events))
    phases = [phase for phase in Phase if phase in whole.phases]
    rows = []
    for name, (start, stop) in {"before step 1": (0, opening), **spans}.items():
        peaks = _phase_peaks(whole, start, stop)
        if peaks:
            cells = [format_bytes(peaks[phase]) if phase in peaks else MISSING for phase in phases]
            rows.append([name, *cells, format_bytes(max(peaks.values()))])
    caption = f"Most bytes live in each phase; {run.label}."
    if len(rows) > TABLE_STEPS:
        caption += f" {TABLE_STEPS} of {len(rows)} rows."
        first = min(max(first_step - 1, 0), len(rows) - TABLE_STEPS)
        rows = rows[first : first + TABLE_STEPS]
    headings = ["", *map(str, phases), "highest"]
    figure.describe("Stacked areas", headings, rows, parts=parts, caption=caption)


def _phase_peaks(whole: Window, start: int, stop: int) -> dict[Phase, int]:
    """Return the most bytes in each phase between two events; what was live as it began counts."""
    part = slice(*np.searchsorted(whole.at, (start, stop)))
    before = np.append(0, whole.totals[:-1])
    highest, phases = np.maximum(before, whole.totals)[part], whole.phases[part]
    return {phase: int(highest[phases == phase].max()) for phase in Phase if phase in phases}
