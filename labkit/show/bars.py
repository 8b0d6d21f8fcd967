"""What the peak of each run was made of, beside the device's capacity.

Limits: bars are to scale, so beside a run a thousand times larger a small one is a hairline;
its total and the table still give its size.
"""

import textwrap
from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes

from labkit.runs import Run
from labkit.show.picture import (
    ALARM,
    EDGE,
    RESERVE,
    Picture,
    category_legend,
    fill,
    one_line,
    showing,
)
from labkit.show.stacked_bars import HEIGHT, capacity_line, draw_stack, scale_bars, write_total
from labkit.show.tables import as_runs, build_table, change_text, held, run_labels, sources
from labkit.trace import Category
from labkit.values import format_bytes


def draw_bars(
    runs: Run | Iterable[Run],
    *,
    title: str | None = None,
    labels: Sequence[str] | None = None,
    capacity: bool = True,
    against: Run | None = None,
) -> Picture:
    """Draw what the peak of each run was made of, with the numbers in a table beneath.

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
        The figure; ``bars`` has shown it, ``draw_bars`` has not.

    Raises:
        InputError: no runs, something that is not a run, or not one label per run.
    """
    runs = as_runs(runs)
    names = run_labels(runs, labels)
    used = [category for category in Category if any(category in held(run) for run in runs)]
    reserve = any(not run.oom and (run.reserved_bytes or 0) > run.peak_bytes for run in runs)
    capacities = {run.capacity_bytes for run in runs}
    figure = Picture(
        title or "Peak memory by category",
        " and ".join(sources(runs)),
        body=66 + 46 * len(runs),
        legend=category_legend(used, reserve=reserve),
    )
    with figure.drawing() as axes:
        ends = [_draw_bar(axes, y, run, against) for y, run in enumerate(runs)]
        mixed = len(sources(runs)) > 1
        written = [_name(name, run, mixed) for name, run in zip(names, runs, strict=True)]
        scale_bars(axes, written, max(ends))
        if capacity and len(capacities) == 1 and runs[0].capacity_bytes:
            capacity_line(axes, runs[0].device, runs[0].capacity_bytes)
    parts = [_phrase(name, run) for name, run in zip(names, runs, strict=True)]
    figure.describe("Stacked bars", [], [], parts=parts)
    figure.table = build_table(runs, labels=names, against=against)
    return figure


bars = showing(draw_bars)


def _name(name: str, run: Run, with_source: bool) -> str:
    lines = textwrap.wrap(one_line(name, 300), 30, max_lines=2, placeholder=" …")
    if with_source:
        lines.append(textwrap.shorten(run.label, 36, placeholder=" …"))
    return "\n".join(lines)


def _draw_bar(axes: Axes, y: int, run: Run, against: Run | None) -> int:
    """Draw the bar of a run with its total behind it; return where it ends.

    A request that failed is cut at half of what the device can hold: some ask for a hundred times
    as much, and the bars would shrink to nothing beside it.
    """
    total = int(draw_stack(axes, y, held(run), {category: fill(category) for category in Category}))
    if not run.oom:
        end = max(total, run.reserved_bytes or 0)
        axes.barh(y, end - total, left=total, height=0.16, facecolor=RESERVE, zorder=2, **EDGE)
        text = format_bytes(run.peak_bytes)
        if against is not None and run is not against and not against.oom:
            text += f"  ({change_text(run.peak_bytes, against.peak_bytes)})"
        write_total(axes, text, end, y)
        return end
    requested_bytes = run.oom.requested_bytes
    end = total + min(requested_bytes, max(total, run.capacity_bytes or 0) // 2)
    box = {"facecolor": "none", "edgecolor": ALARM, "linestyle": "--", "linewidth": 1.4}
    axes.barh(y, end - total, left=total, height=HEIGHT, **box)
    if end < total + requested_bytes:
        axes.plot(end, y, marker=5, color=ALARM, markersize=9, clip_on=False, zorder=5)
    asked = format_bytes(requested_bytes) if requested_bytes else "more"
    text = f"out of memory: {format_bytes(total)}\nheld, {asked} asked for"
    write_total(axes, text, end, y, color=ALARM, size=9.5)
    return end


def _phrase(name: str, run: Run) -> str:
    parts = held(run)
    ending = "out of memory at " if run.oom else ""
    mostly = f", mostly {max(parts, key=parts.get)}" if parts else ""
    return f"{name}: {ending}{format_bytes(sum(parts.values()))}{mostly}"
