"""The figures of the course: ``bars``, ``timeline`` and ``lines``, and the ``table`` beneath.

- ``bars(runs)``: what the peak of each run was made of, beside the device's capacity.
- ``timeline(run)``: live bytes over a training step, its phases named, the peak marked.
- ``lines(series)``: one quantity against another, such as the peak against the batch size.

Every figure has its numbers as a table beneath, a text for those who cannot see it, and says
where the numbers come from.

Limits: bars are to scale, so beside a run a thousand times larger a small one is a hairline;
its total and the table still tell its size.
"""

import textwrap
from collections.abc import Iterable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.ticker import NullLocator

from labkit.memory import Category, Run, format_bytes
from labkit.show.curves import lines
from labkit.show.picture import (
    ALARM,
    COLOURS,
    EDGE,
    GREY,
    HATCHES,
    INK,
    RESERVE,
    STYLE,
    WIDTH,
    Picture,
    byte_ticks,
    category_legend,
    fill,
    legend_rows,
    one_line,
    place,
    text_width,
    write_title,
)
from labkit.show.tables import (
    as_runs,
    build_table,
    change_text,
    held,
    run_labels,
    sources,
    table,
)
from labkit.show.timelines import draw_timeline, timeline

__all__ = [
    "COLOURS",
    "HATCHES",
    "Picture",
    "bars",
    "draw_bars",
    "draw_timeline",
    "lines",
    "table",
    "timeline",
]


def bars(
    runs: Run | Iterable[Run],
    *,
    title: str | None = None,
    labels: Sequence[str] | None = None,
    capacity: bool = True,
    against: Run | None = None,
) -> Picture:
    """Show what the peak of each run was made of, with the numbers in a table beneath.

    A run that ran out of memory shows what it held at that moment, and as an open dashed box
    what it asked for (cut, with an arrowhead, at half of what the device can hold). Memory that
    the allocator kept beyond the peak is a thin grey bar.

    Args:
        runs: one run or several, drawn from top to bottom.
        title: what the figure shows; None: "Peak memory by category".
        labels: what to call each run; None: its name, or the parameters that differ.
        capacity: draw a line at the device's capacity where all runs share one.
        against: the run that the others are compared with ("−43 %" behind the total).

    Returns:
        The figure, already shown.

    Raises:
        InputError: no runs, something that is not a run, or not one label per run.
    """
    return draw_bars(runs, title=title, labels=labels, capacity=capacity, against=against).show()


def draw_bars(
    runs: Run | Iterable[Run],
    *,
    title: str | None = None,
    labels: Sequence[str] | None = None,
    capacity: bool = True,
    against: Run | None = None,
) -> Picture:
    """The figure of ``bars`` without showing it. Same arguments, same errors."""
    runs = as_runs(runs)
    names = run_labels(runs, labels)
    title = title or "Peak memory by category"
    used = [category for category in Category if any(category in held(run) for run in runs)]
    row, head, foot = 46, 88 + 24 * legend_rows(used, _has_reserve(runs)), 44
    with mpl.rc_context(STYLE):
        figure = Picture(head + row * len(runs) + foot)
        write_title(figure, title, " · ".join(sources(runs)))
        category_legend(figure, used, reserve=_has_reserve(runs))
        axes = figure.add_axes((0, 0, 1, 1))
        left = _bar_names(figure, axes, runs, names)
        place(figure, axes, left=left, right=34, top=head, bottom=foot)
        _draw_stacks(axes, runs)
        totals = _write_totals(axes, runs, against)
        shared = _shared_capacity(runs) if capacity else None
        _scale_bars(figure, axes, totals, shared)
        if shared:
            _capacity_line(axes, shared, runs[0].device, axes.get_xlim()[1])
    figure.table = build_table(runs, labels=names, against=against)
    figure.alt = _bars_alt(title, runs, names)
    return figure


def _has_reserve(runs: list[Run]) -> bool:
    return any(not run.oom and (run.reserved_bytes or 0) > run.peak_bytes for run in runs)


def _shared_capacity(runs: list[Run]) -> int | None:
    shared = {run.capacity_bytes for run in runs}
    return shared.pop() if len(shared) == 1 else None


def _bar_names(figure: Picture, axes: Axes, runs: list[Run], names: list[str]) -> float:
    """Write the names left of the bars; returns the room they need in pixels."""
    mixed = len(sources(runs)) > 1
    written = []
    for y, (run, name) in enumerate(zip(runs, names, strict=True)):
        lines = textwrap.wrap(one_line(name, 300), 30, max_lines=2, placeholder=" …")
        source = textwrap.shorten(run.label, 36, placeholder=" …") if mixed else ""
        up = 0.12 + 0.06 * (len(lines) - 1) if source else 0
        style = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
        written.append(axes.text(-0.012, y - up, "\n".join(lines), linespacing=1.05, **style))
        if source:
            down = 0.23 + 0.09 * (len(lines) - 1)
            written.append(axes.text(-0.012, y + down, source, size=8.5, color=GREY, **style))
    return min(max(text_width(figure, text) for text in written) + 24, WIDTH * 0.42)


def _draw_stacks(axes: Axes, runs: list[Run]) -> None:
    for y, run in enumerate(runs):
        left = 0
        for category, nbytes in held(run).items():
            axes.barh(y, nbytes, left=left, height=0.62, **fill(category))
            left += nbytes
        if left:  # a bar too short to see is still a line
            axes.vlines(0, y - 0.31, y + 0.31, color=COLOURS[next(iter(held(run)))], linewidth=2)
        end = _end(run)
        if run.oom:
            box = {"facecolor": "none", "edgecolor": ALARM, "linestyle": "--", "linewidth": 1.4}
            axes.barh(y, end - left, left=left, height=0.62, **box)
            if end < left + run.oom.requested_bytes:
                axes.plot(end, y, marker=5, color=ALARM, markersize=9, clip_on=False, zorder=5)
        else:
            axes.barh(y, end - left, left=left, height=0.16, facecolor=RESERVE, zorder=2, **EDGE)


def _end(run: Run) -> int:
    """Where a bar ends, with what was asked for or reserved.

    A request is cut at half of what the device can hold: some ask for a hundred times as much,
    and the bars would shrink to nothing beside it.
    """
    total = sum(held(run).values())
    if run.oom:
        return total + min(run.oom.requested_bytes, max(total, run.capacity_bytes or 0) // 2)
    return max(total, run.reserved_bytes or 0)


def _write_totals(axes: Axes, runs: list[Run], against: Run | None) -> list[Text]:
    """The total behind each bar."""
    style = {"va": "center", "xytext": (8, 0), "textcoords": "offset points"}
    texts = []
    for y, run in enumerate(runs):
        words, colour, size = format_bytes(run.peak_bytes), INK, 10.5
        if run.oom:
            asked = format_bytes(run.oom.requested_bytes) if run.oom.requested_bytes else "more"
            total = format_bytes(sum(held(run).values()))
            words, colour, size = f"out of memory: {total}\nheld, {asked} asked for", ALARM, 9.5
        elif against is not None and run is not against and not against.oom:
            words += f"  ({change_text(run.peak_bytes, against.peak_bytes)})"
        text = axes.annotate(
            words,
            (_end(run), y),
            annotation_clip=False,
            color=colour,
            size=size,
            weight="bold",
            zorder=6,
            **style,
        )
        texts.append(text)
    return texts


def _scale_bars(figure: Picture, axes: Axes, texts: list[Text], capacity: int | None) -> None:
    """Choose the right end of the axis so that every total has room, beside the capacity line."""
    room = axes.get_position().width * WIDTH
    ends = [text.xy[0] for text in texts]
    axes.set_xlim(0, max(*ends, 1))  # a text far outside is measured wrong
    widths = [text_width(figure, text) + 18 for text in texts]
    near = capacity if capacity and capacity <= 4 * max(*ends, 1) else 0
    for _ in range(len(texts) + 1):  # a text that would lie on the line moves behind it
        behind = [end * room / (room - width) for end, width in zip(ends, widths, strict=True)]
        most = max(*behind, 1.04 * near, 1)
        ends = [
            near if end < near < end + width * most / room else end
            for end, width in zip(ends, widths, strict=True)
        ]
    for text, end in zip(texts, ends, strict=True):
        text.xy = (end, text.xy[1])
    axes.set_xlim(0, most)
    axes.set_ylim(len(texts) - 0.5, -0.5)
    axes.yaxis.set_major_locator(NullLocator())
    axes.spines["left"].set(color="#777777", zorder=5)
    axes.grid(axis="x")
    byte_ticks(axes.xaxis, most, room / 95)
    axes.tick_params(length=0, pad=6)


def _capacity_line(axes: Axes, capacity: int, device: str, most: float) -> None:
    text = f"{device} can hold {format_bytes(capacity)}"
    style = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "size": 9.5}
    if capacity > most:
        axes.annotate(f"{text} →", (most, 1), xytext=(0, 5), ha="right", color=GREY, **style)
        return
    axes.axvline(capacity, color=INK, linewidth=1.6, linestyle=(0, (5, 2)), zorder=4)
    side = "right" if capacity > most / 2 else "left"
    axes.annotate(text, (capacity, 1), xytext=(0, 5), ha=side, color=INK, **style)


def _bars_alt(title: str, runs: list[Run], names: list[str]) -> str:
    parts = []
    for run, name in zip(runs, names, strict=True):
        total = format_bytes(sum(held(run).values()))
        largest = max(held(run), key=held(run).get, default=None)
        ending = "out of memory at " if run.oom else ""
        parts.append(f"{name}: {ending}{total}" + (f", mostly {largest}" if largest else ""))
    return (
        f"Stacked bars. {title}, {' and '.join(sources(runs))}. {'; '.join(parts)}. "
        "The table below holds the same numbers."
    )
