"""Timelines: the live bytes of a run after each allocation and each free, by category.

The horizontal axis counts events, not seconds: an operator that allocates much takes much room,
one that allocates nothing takes none. Heights are the tensors' bytes; where an allocator's blocks
are larger, the mark at the peak names both.

A peak is often narrower than a line, so a column at the right edge shows what it is made of.

Limits: a long trace is thinned for drawing: of each stretch narrower than a pixel its highest,
lowest and last point are kept. The marked peak and the table come from the whole trace. Phases too
short to see are not shaded; the table has them.
"""

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from gpumem.figures.drawing import (
    ABOVE,
    ALARM,
    ASIDE,
    GREY,
    INK,
    LEAST_SEEN,
    LIMIT_LINE,
    PAPER,
    Picture,
    area_legend,
    fill,
    fits,
    note,
    scale,
    showing,
)
from gpumem.figures.html_pages import MISSING
from gpumem.inputs import InputError, positive_int
from gpumem.runs import OutOfMemory, Run
from gpumem.trace import Phase, Timeline, points_to_draw
from gpumem.units import format_bytes

PHASE_COLOURS = {
    Phase.SETUP: "#E3E3E3",
    Phase.FORWARD: "#D3E5F4",
    Phase.BACKWARD: "#FBE2C8",
    Phase.OPTIMIZER: "#D0EBDD",
    Phase.EVALUATION: "#E6DCF0",
    Phase.GENERATION: "#E6DCF0",
    Phase.PREFILL: "#DFD3EC",
    Phase.DECODE: "#E6DCF0",
    Phase.OTHER: "#F0F0F0",
}
SHORT_NAMES = {
    Phase.FORWARD: "fwd",
    Phase.BACKWARD: "bwd",
    Phase.OPTIMIZER: "opt",
    Phase.EVALUATION: "eval",
    Phase.GENERATION: "gen",
    Phase.PREFILL: "pre",
    Phase.DECODE: "dec",
}
TABLE_STEPS = 10
VISIBLE = 0.004  # of the width
SHORT, MANY = 0.03, 8  # so many in turn, each of a smaller share of the width, are drawn as one


def draw_timeline(
    run: Run,
    *,
    steps: int | None = None,
    title: str | None = None,
    scale_of: Run | None = None,
    name: str | None = None,
    label: str = "",
) -> Picture:
    """Draw the live bytes of a run from event to event, with each step's peaks in a table.

    Marked are the peak, and where the run ran out of memory.

    Args:
        run: a run with a trace (of this session, not read back from a file).
        steps: a step's number from 1; None: everything, the set-up too.
        title: what the figure shows; None: where the peak lies, and what it is mostly made of.
        scale_of: a run with a higher peak, for two figures with one vertical scale.
        name: what a title that is not given calls the run; None: its own name.
        label: a category whose band is named in the figure, with its highest bytes.

    Returns:
        The figure; ``timeline`` has shown it, ``draw_timeline`` has not.

    Raises:
        InputError: the run has no trace, nothing was allocated, or there is no such step.
    """
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
    return draw_line(
        line,
        title=title or "",
        name=name or run.name,
        source=run.label,
        limit=("capacity", run.capacity_bytes),
        oom=run.oom,
        steps=steps,
        highest_bytes=scale_of.trace.peak_bytes if scale_of else 0,
        allocated_bytes=() if run.reserved_bytes is None or run.oom else run.step_peaks_bytes,
        ended=run.mode != "simulated",  # which continues past the failure
        label=label,
    )


timeline = showing(draw_timeline)


def _finding(phase: Phase, sizes: pd.Series, name: str) -> str:
    """Return in which phase the peak lies and what it is mostly made of, in a sentence."""
    most = sizes.idxmax()
    mostly = f"mostly {most}" if 2 * sizes[most] > sizes.sum() else f"{most} the largest part"
    return f"The peak is in {phase}, {mostly}: {name}"


def draw_line(
    line: Timeline,
    *,
    title: str,
    source: str,
    name: str = "",
    limit: tuple[str, int | None] = ("", None),
    oom: OutOfMemory | None = None,
    steps: int | None = None,
    highest_bytes: int = 0,
    allocated_bytes: Sequence[int] = (),
    ended: bool = True,
    label: str = "",
) -> Picture:
    """Draw a timeline that is not of a `Run`, as `draw_timeline` does.

    Where there is no ``title`` it says what the peak that is drawn is made of, and the ``name``.
    ``source`` says where it comes from, ``limit`` is a name and the bytes for a line across, and
    ``oom`` a failed request, with which the line ``ended`` or not. The vertical axis reaches above
    ``highest_bytes``, too. ``allocated_bytes`` are the most
    that the allocator's blocks held in each step. ``label`` is a category whose band is named.
    """
    whole = pd.DataFrame(line.bytes_by_category, index=line.indices)
    phases = pd.Series(line.phases, index=line.indices)
    window = whole
    if steps is not None:
        ranges = line.steps()
        steps = positive_int(steps, "steps", most=len(ranges))
        start, stop = ranges[steps - 1]
        window = whole.loc[start : stop - 1]
        allocated_bytes = allocated_bytes[steps - 1 : steps]
        if window.empty:
            raise InputError("nothing was allocated or freed in this step: leave steps out")
    window = window.loc[:, window.any()]
    totals = window.sum(axis=1)
    seen = window.columns[window.max() > LEAST_SEEN * totals.max()]
    legend = [area for area in area_legend(window.columns) if area.get_label() in seen]
    at = totals.idxmax()
    title = title or _finding(phases[at], window.loc[at], name)
    figure = Picture(title, source, body=390, legend=legend)
    with figure.drawing() as axes:
        _draw_areas(axes, window.iloc[points_to_draw(totals.tolist())])
        axes.set_xlim(window.index[0], window.index[-1] + 1)
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("allocations and frees, in order")
        axes.set_ylabel("live memory")
        axes.grid(axis="y")
        scale(axes.yaxis, format_bytes)
        _limit_top(axes, max(int(totals.max()), highest_bytes), *limit)
        _name_phases(axes, phases.loc[window.index])
        _name_steps(axes, line)
        at_end = window.index[-1] == whole.index[-1]
        size = _peak_size(int(totals.max()), allocated_bytes)
        _mark_peak(axes, totals, size, oom if at_end else None, ended)
        _draw_peak(axes, window.loc[at])
        if label in window:
            _name_band(axes, window, label)
    step = bisect_right(line.step_starts, at)
    parts = [f"Peak {size} in {f'step {step}, ' if step else ''}{phases[at]}"]
    parts += [f"{name} {format_bytes(int(n))}" for name, n in window.loc[at].items() if n]
    if oom:
        parts.append(str(oom))
    headings, rows = _phase_table(line, whole.sum(axis=1), phases)
    caption = f"Highest memory of the tensors in each phase; {source}."
    if steps is not None:  # what the figure does not show may be a question of the next one
        rows = [row for row in rows if row[0] in ("before step 1", f"step {steps}")]
    elif len(rows) > TABLE_STEPS:
        caption += f" {TABLE_STEPS} of {len(rows)} rows."
        rows = rows[:TABLE_STEPS]
    figure.describe("Stacked areas", headings, rows, parts=parts, caption=caption)
    return figure


# --- drawing -----------------------------------------------------------------------------------


def _draw_areas(axes: Axes, window: pd.DataFrame) -> None:
    at = np.append(window.index, window.index[-1] + 1)  # the last event lasts one event, too
    low = np.zeros(len(at))
    for category, row in window.items():
        high = low + np.append(row, row.iloc[-1])
        axes.fill_between(at, low, high, step="post", **{**fill(category), "linewidth": 0})
        low = high
    axes.step(at, low, where="post", color=INK, linewidth=0.9, zorder=4)


def _limit_top(axes: Axes, highest_bytes: int, name: str, limit_bytes: int | None) -> None:
    """Leave room above the highest point, and draw a limit where it has a place."""
    top = 1.3 * highest_bytes or 1
    if limit_bytes and limit_bytes < 1.25 * top:
        top = max(top, 1.22 * limit_bytes)
        axes.axhline(limit_bytes, zorder=5, **LIMIT_LINE)
        below = {"xycoords": ASIDE, "va": "top", "zorder": 6, "bbox": PAPER}
        note(axes, f"{name} {format_bytes(limit_bytes)}", (0, limit_bytes), (5, -4), **below)
    axes.set_ylim(0, top)


def _name_phases(axes: Axes, phases: pd.Series) -> None:
    """Shade the phases and name them in a strip above the axes, as far as the names fit."""
    width = phases.index[-1] + 1 - phases.index[0]
    for names, start, stop in _stretches(phases):
        share = (stop - start) / width
        if share < VISIBLE:
            continue
        colour = PHASE_COLOURS[names[0]]
        axes.axvspan(start, stop, facecolor=colour, alpha=0.45, linewidth=0, zorder=0)
        strip = {"facecolor": colour, "edgecolor": "white", "linewidth": 1, "clip_on": False}
        axes.axvspan(start, stop, 1, 1.07, **strip)
        name = " + ".join(map(str, names))
        if not fits(name, share):
            name = " + ".join(SHORT_NAMES.get(each, "") for each in names)
        if fits(name, share):
            middle = ((start + stop) / 2, 1.035)
            note(axes, name, middle, (0, 0), xycoords=ABOVE, ha="center", va="center")


def _stretches(phases: pd.Series) -> list[tuple[list[Phase], int, int]]:
    """Return each phase with where it starts and ends; many short ones in turn are one stretch.

    Those are an optimizer's steps in backward: no forward, which begins a step or a piece of it.
    """
    starts = phases[phases != phases.shift()]
    edges = [*starts.index, phases.index[-1] + 1]
    most = SHORT * (edges[-1] - edges[0])

    def merges(span: tuple[Phase, int, int]) -> bool:
        phase, start, stop = span
        return stop - start < most and phase not in (Phase.SETUP, Phase.FORWARD)

    stretches: list[tuple[list[Phase], int, int]] = []
    spans = zip(starts, edges, edges[1:], strict=False)
    for short, group in itertools.groupby(spans, key=merges):
        several = list(group)
        if short and len(several) >= MANY:
            taken = Counter()
            for phase, start, stop in several:
                taken[phase] += stop - start
            names = [phase for phase, _ in taken.most_common(2)]
            stretches.append((names, several[0][1], several[-1][2]))
        else:
            stretches += [([phase], start, stop) for phase, start, stop in several]
    return stretches


def _name_steps(axes: Axes, line: Timeline) -> None:
    """Draw a line where each step starts, its number above the strip of phases."""
    start, stop = axes.get_xlim()
    for number, (low, high) in enumerate(line.steps(), start=1):
        if not start <= low < min(stop, high):
            continue
        axes.axvline(low, color=GREY, linewidth=1, linestyle=(0, (2, 2)), zorder=5)
        if fits(f"step {number} ", (min(high, stop) - low) / (stop - start)):
            note(axes, f"step {number}", (low, 1.07), (0, 4), xycoords=ABOVE, weight="bold")


def _peak_size(tensors_bytes: int, allocated_bytes: Sequence[int]) -> str:
    """Return ``"5.91 GiB of tensors (5.95 GiB allocated)"``, or one figure where they agree."""
    tensors = format_bytes(tensors_bytes)
    allocated = format_bytes(max(allocated_bytes, default=tensors_bytes))
    return tensors if allocated == tensors else f"{tensors} of tensors ({allocated} allocated)"


def _mark_peak(
    axes: Axes, totals: pd.Series, size: str, oom: OutOfMemory | None, ended: bool
) -> None:
    """Draw an arrow to the peak; of a run that ended by an out-of-memory error, one to its end."""
    at, words, colour = totals.idxmax(), f"peak {size}".replace(" (", "\n("), INK
    if oom:
        asked = format_bytes(oom.requested_bytes) if oom.requested_bytes else "more memory"
        colour = ALARM
        if ended:
            at, words = totals.index[-1], f"{words}\nout of memory here: asked for {asked}"
        else:  # a simulation goes on after the failure
            words = words.replace("peak", "would need", 1)
            words += f"\nout of memory on the way, in step {oom.step}: asked for {asked}"
    low, high = axes.get_xlim()
    share = (at - low) / (high - low)
    beside = share + (0.3 if share < 0.5 else -0.3)  # an arrow from above would hide a needle
    axes.annotate(
        words,
        (at, totals[at]),
        xytext=(min(max(beside, 0.25), 0.75), 0.97),
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


def _name_band(axes: Axes, window: pd.DataFrame, category: str) -> None:
    """Write a category's highest bytes into the middle of the stretch where it holds them."""
    highest = window[category].max()
    stretch = window.index[window[category] == highest]
    at = stretch[len(stretch) // 2]
    middle = window.loc[at, :category].sum() - highest / 2
    style = {"ha": "center", "va": "center", "size": 9, "bbox": PAPER, "zorder": 7}
    note(axes, f"{category} {format_bytes(int(highest))}", (at, middle), (0, 0), **style)


def _draw_peak(axes: Axes, parts: pd.Series) -> None:
    """Draw what the peak is made of as a column, right of the last event."""
    start, stop = axes.get_xlim()
    width = 0.035 * (stop - start)
    middle, low = stop + width, 0
    for category, nbytes in parts.items():
        axes.bar(middle, nbytes, width, low, **fill(category))
        low += nbytes
    axes.set_xlim(start, stop + 2 * width)
    style = {"ha": "center", "va": "bottom", "size": 9, "bbox": PAPER, "zorder": 6}
    note(axes, "at the\npeak", (middle, low), (0, 3), **style)


def _phase_table(
    line: Timeline, totals: pd.Series, phases: pd.Series
) -> tuple[list[str], list[list[str]]]:
    """Return the most that was live in each phase of each step; what it began with counts."""
    highest = np.maximum(totals, totals.shift(fill_value=0))
    spans = {f"step {i}": span for i, span in enumerate(line.steps(), start=1)}
    opening = min(line.step_starts, default=totals.index[-1] + 1)
    columns = [phase for phase in Phase if phase in set(phases)]
    before = "before step 1" if spans else "all of it"
    rows = []
    for name, (start, stop) in {before: (0, opening), **spans}.items():
        part = highest.loc[start : stop - 1]
        if not part.empty:
            peaks = part.groupby(phases).max()
            cells = [format_bytes(int(peaks[p])) if p in peaks else MISSING for p in columns]
            rows.append([name, *cells, format_bytes(int(part.max()))])
    return ["", *map(str, columns), "highest"], rows
