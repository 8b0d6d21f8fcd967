"""Timelines: the live bytes of a run after each allocation and each free, by category.

The horizontal axis counts events, not seconds: an operator that allocates much takes much room,
one that allocates nothing takes none.

Limits: a long trace is thinned for drawing, keeping each local peak and valley; the marked peak
and the table come from the whole trace. Phases too short to see are drawn as part of the one
before and appear in the table only.
"""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from labkit.memory import Category, Phase, Run, format_bytes
from labkit.show.picture import (
    ALARM,
    GREY,
    INK,
    STYLE,
    WIDTH,
    Picture,
    byte_ticks,
    category_legend,
    fill,
    legend_rows,
    place,
    text_width,
    write_title,
)
from labkit.show.rich import MISSING, Rich, grid
from labkit.show.windows import Window, cut_out, phase_peaks, stretches, thinned

PHASE_COLOURS = {
    Phase.SETUP: "#E3E3E3",
    Phase.FORWARD: "#D3E5F4",
    Phase.BACKWARD: "#FBE2C8",
    Phase.OPTIMIZER: "#D0EBDD",
    Phase.OTHER: "#F0F0F0",
}
SHORT_NAMES = {Phase.FORWARD: "fwd", Phase.BACKWARD: "bwd", Phase.OPTIMIZER: "opt"}
TABLE_STEPS = 10


def timeline(
    run: Run,
    *,
    steps: int | tuple[int, int] | None = None,
    title: str | None = None,
    annotate: bool = True,
) -> Picture:
    """Show the live bytes of a run from event to event, with each step's peaks in a table.

    Args:
        run: a run with a trace (of this session, not read back from a file).
        steps: a step's number from 1, or ``(first, last)``; None: everything, the set-up too.
        title: what the figure shows; None: "Live memory, event by event: <name>".
        annotate: mark the peak, and where the run ran out of memory.

    Returns:
        The figure, already shown.

    Raises:
        InputError: the run has no trace, nothing was allocated, or there is no such step.
    """
    return draw_timeline(run, steps=steps, title=title, annotate=annotate).show()


def draw_timeline(
    run: Run,
    *,
    steps: int | tuple[int, int] | None = None,
    title: str | None = None,
    annotate: bool = True,
) -> Picture:
    """The figure of ``timeline`` without showing it. Same arguments, same errors."""
    whole, window, first_step = cut_out(run, steps)
    used = [category for category in Category if category in window.bytes_by_category]
    title = title or f"Live memory, event by event: {run.name}"
    head, foot = 104 + 24 * legend_rows(used, False), 50
    with mpl.rc_context(STYLE):
        figure = Picture(head + 300 + foot)
        write_title(figure, title, run.label)
        category_legend(figure, used)
        axes = figure.add_axes((0, 0, 1, 1))
        place(figure, axes, left=84, right=20, top=head, bottom=foot)
        _draw_areas(axes, thinned(window))
        _scale(axes, window, run.capacity_bytes)
        _name_phases(figure, axes, window)
        _name_steps(figure, axes, run, window)
        if annotate:
            _mark_peak(figure, axes, run, window)
    figure.table = _phase_table(run, whole, first_step)
    figure.alt = _alt(title, run, window)
    return figure


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


def _scale(axes: Axes, window: Window, capacity: int | None) -> None:
    peak = int(window.totals.max())
    top = 1.3 * peak or 1  # the room above the data is for the peak's text
    if capacity and capacity < 1.25 * top:
        top = max(top, 1.22 * capacity) if capacity > 0.8 * top else top
        axes.axhline(capacity, color=INK, linewidth=1.6, linestyle=(0, (5, 2)), zorder=5)
        axes.annotate(
            f"capacity {format_bytes(capacity)}",
            (0, capacity),
            xycoords=axes.get_yaxis_transform(),
            xytext=(5, -4),
            textcoords="offset points",
            va="top",
            size=9.5,
            zorder=6,
            bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5},
        )
    axes.set_xlim(window.at[0], window.at[-1] + 1)
    axes.set_ylim(0, top)
    byte_ticks(axes.yaxis, top, 6)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel("allocations and frees, in order", size=9.5)
    axes.set_ylabel("live memory", size=9.5)
    axes.tick_params(length=0, pad=5, labelsize=9.5)
    axes.grid(axis="y")


def _name_phases(figure: Picture, axes: Axes, window: Window) -> None:
    """Shade the phases and name them in a strip above the axes, as far as the names fit."""
    pixels = axes.get_position().width * WIDTH / (window.at[-1] + 1 - window.at[0])
    transform = axes.get_xaxis_transform()
    for phase, low, high in stretches(window):
        colour = PHASE_COLOURS[phase]
        axes.axvspan(low, high, facecolor=colour, alpha=0.45, linewidth=0, zorder=0)
        strip = Rectangle((low, 1.0), high - low, 0.07, transform=transform, clip_on=False)
        strip.set(facecolor=colour, edgecolor="white", linewidth=1)
        axes.add_artist(strip)
        centre = ((low + high) / 2, 1.035)
        style = {"ha": "center", "va": "center", "size": 9.5, "transform": transform}
        text = axes.text(*centre, str(phase), **style)
        for name in (SHORT_NAMES.get(phase, ""), ""):
            if text_width(figure, text) > (high - low) * pixels - 4:
                text.set_text(name)


def _name_steps(figure: Picture, axes: Axes, run: Run, window: Window) -> None:
    """A line where each step starts, and its number above the strip of phases."""
    start, stop = window.at[0], window.at[-1] + 1
    shown = [
        (number, low, high)
        for number, (low, high) in enumerate(run.trace.steps(), start=1)
        if start <= low < stop
    ]
    room = axes.get_position().width * WIDTH / (stop - start)
    for number, low, high in shown:
        axes.axvline(low, color=GREY, linewidth=1, linestyle=(0, (2, 2)), zorder=5)
        text = axes.annotate(
            f"step {number}",
            (low, 1.07),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 4),
            textcoords="offset points",
            size=9.5,
            weight="bold",
            color=INK,
        )
        if text_width(figure, text) + 8 > (min(high, stop) - low) * room:
            text.set_text("")


def _mark_peak(figure: Picture, axes: Axes, run: Run, window: Window) -> None:
    """An arrow to the peak; where the run ran out of memory, one to its end instead."""
    at = int(window.totals.argmax())
    peak = int(window.totals[at])
    words = f"peak {format_bytes(peak)}, {_where(run, window, at)}"
    if run.oom and window.at[-1] >= len(run.trace.events) - 1:
        asked = format_bytes(run.oom.requested_bytes) if run.oom.requested_bytes else "more memory"
        words = f"{words}\nout of memory here: asked for {asked}"
        at, peak = len(window.at) - 1, int(window.totals[-1])
        style = {"color": ALARM, "linewidth": 2, "linestyle": (0, (3, 1.5)), "zorder": 6}
        wanted = min(peak + run.oom.requested_bytes, axes.get_ylim()[1])
        axes.plot([window.at[-1] + 1] * 2, [peak, wanted], clip_on=False, **style)
    style = {"weight": "bold", "size": 10, "color": ALARM if run.oom else INK}
    x, top = float(window.at[at]), axes.get_ylim()[1]
    text = axes.text(x, 0.965 * top, words, ha="center", va="top", zorder=7, **style)
    text.set_bbox({"facecolor": "white", "alpha": 0.9, "edgecolor": "none", "pad": 2})
    low, high = axes.get_xlim()
    half = text_width(figure, text) / 2 + 8
    half *= (high - low) / (axes.get_position().width * WIDTH)
    text.set_x(min(max(x, low + half), high - half))
    axes.annotate(
        "",
        (x, peak),
        (text.get_position()[0], 0.965 * top - 0.05 * top * (1 + words.count("\n"))),
        arrowprops={"arrowstyle": "-|>", "color": style["color"], "linewidth": 1.4, "shrinkA": 2},
        zorder=7,
    )


def _where(run: Run, window: Window, at: int) -> str:
    """``"step 2, backward"`` for position ``at`` of the window."""
    step = sum(start <= window.at[at] for start, _ in run.trace.steps())
    phase = str(window.phases[at])
    return f"step {step}, {phase}" if step else phase


# --- the table and the text --------------------------------------------------------------------


def _phase_table(run: Run, whole: Window, first_step: int) -> Rich:
    """The most that was live in each phase of each step, from the whole trace."""
    spans = [(f"step {i}", *span) for i, span in enumerate(run.trace.steps(), start=1)]
    opening = spans[0][1] if spans else len(run.trace.events)
    if opening > 0:
        spans.insert(0, ("before step 1", 0, opening))
    rows = [(name, phase_peaks(whole, start, stop)) for name, start, stop in spans]
    rows = [(name, peaks) for name, peaks in rows if peaks]
    phases = [phase for phase in Phase if any(phase in peaks for _, peaks in rows)]
    texts = [
        [name]
        + [format_bytes(peaks[phase]) if phase in peaks else MISSING for phase in phases]
        + [format_bytes(max(peaks.values()))]
        for name, peaks in rows
    ]
    caption = f"Most bytes live in each phase; {run.label}."
    if len(texts) > TABLE_STEPS:
        kept = min(max(first_step - 1, 0), len(texts) - TABLE_STEPS)
        caption += f" {TABLE_STEPS} of {len(texts)} rows."
        texts = texts[kept : kept + TABLE_STEPS]
    return grid(["", *map(str, phases), "highest"], texts, caption=caption)


def _alt(title: str, run: Run, window: Window) -> str:
    at = int(window.totals.argmax())
    made_of: Sequence[str] = [
        f"{category} {format_bytes(int(row[at]))}"
        for category, row in window.bytes_by_category.items()
        if row[at]
    ]
    ending = f" Then {run.oom}." if run.oom else ""
    return (
        f"Stacked areas. {title}, {run.label}. Peak {format_bytes(int(window.totals[at]))} in "
        f"{_where(run, window, at)}: {', '.join(made_of)}.{ending} "
        "The table below holds the peak of each phase."
    )
