"""Bars made of parts: what the peak of each run was made of, or whatever else adds up.

    bars([baseline, checkpointed], against=baseline)
    stacked_bars({"in memory": {"device": 4 << 30}, "on disk": {"disk": 4 << 30}})

Limits: bars are to scale, so beside one a thousand times longer another is a hairline; its total
and the table still give its size.
"""

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from gpumem.figures.drawing import (
    ALARM,
    GREY,
    INK,
    LEAST_SEEN,
    LIMIT_LINE,
    PAPER,
    RESERVED,
    Picture,
    area_legend,
    fill,
    fits,
    marked,
    note,
    one_line,
    scale,
    showing,
)
from gpumem.figures.html_pages import MISSING
from gpumem.figures.tables import (
    as_runs,
    build_table,
    change_text,
    held,
    run_labels,
    sources,
)
from gpumem.inputs import InputError
from gpumem.runs import Run
from gpumem.trace import Category
from gpumem.units import format_bytes

HEIGHT, THIN = 0.62, 0.16  # of a bar, and of what is reserved beyond it; a row is 1


def draw_bars(
    runs: Run | Iterable[Run],
    *,
    title: str | None = None,
    labels: Sequence[str] | None = None,
    capacity: bool = True,
    against: Run | None = None,
) -> Picture:
    """Draw what the peak of each run was made of, with the numbers in a table beneath.

    A run that ran out of memory shows what it held, and reserved, at that moment, and as an open
    dashed box what it asked for (cut, with an arrowhead, at half of what the device can hold).
    Memory that the allocator kept beyond that is a thin grey bar.

    Args:
        runs: one run or several, drawn from top to bottom.
        title: what the figure shows; None: which run reserves least, and how much less than most.
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
    places = sources(runs)
    stacks = [_parts(run) for run in runs]
    used = _visible((*Category, RESERVED), stacks)
    capacities = {run.capacity_bytes for run in runs}
    figure = Picture(
        title or _finding(names, runs),
        " and ".join(places),
        body=66 + 46 * len(runs),
        legend=area_legend(used),
    )
    with figure.drawing() as axes:
        ends, written, totals = [], [], []
        for y, (name, run, stack) in enumerate(zip(names, runs, stacks, strict=True)):
            end = _draw_stack(axes, y, stack)
            ends.append(_draw_failure(axes, y, run, int(end)) if run.oom else end)
            lines = textwrap.wrap(one_line(name, 300), 30, max_lines=2, placeholder=" …")
            if len(places) > 1:
                lines.append(textwrap.shorten(marked(run.label), 36, placeholder=" …"))
            written.append("\n".join(lines))
            if not run.oom:
                text = f"peak {format_bytes(run.peak_bytes)}"
                if against is not None and run is not against and not against.oom:
                    text += f"  ({change_text(run.peak_bytes, against.peak_bytes)})"
                if (run.reserved_bytes or 0) > run.peak_bytes:
                    text += f"\n{format_bytes(run.reserved_bytes)} reserved"
                totals.append((text, end, y))
        _scale_bars(axes, written, max(ends))
        limit = runs[0].capacity_bytes if capacity and len(capacities) == 1 else None
        if limit:
            _capacity_line(axes, runs[0].device, limit)
        for text, end, y in totals:
            _write_total(axes, text, end, y, line=limit)
    parts = [_phrase(name, run) for name, run in zip(names, runs, strict=True)]
    figure.describe("Stacked bars", [], [], parts=parts)
    figure.table = build_table(runs, labels=names, against=against)
    return figure


bars = showing(draw_bars)


def _parts(run: Run) -> dict[str, int]:
    """Return what the run held, and what was reserved beyond it."""
    parts = held(run)
    used_bytes = sum(parts.values()) if run.oom else run.peak_bytes
    reserved_bytes = run.oom.reserved_bytes if run.oom else run.reserved_bytes
    if not reserved_bytes:
        return parts
    return {**parts, RESERVED: max(0, reserved_bytes - used_bytes)}


def _draw_failure(axes: Axes, y: int, run: Run, total: int) -> int:
    """Draw what a run whose bar ends at ``total`` bytes asked for in vain; return where that ends.

    It is cut at half of what the device can hold: some ask for a hundred times as much, and the
    bars would shrink to nothing beside it.
    """
    requested_bytes = run.oom.requested_bytes
    end = total + min(requested_bytes, max(total, run.capacity_bytes or 0) // 2)
    box = {"facecolor": "none", "edgecolor": ALARM, "linestyle": "--", "linewidth": 1.4}
    axes.barh(y, end - total, left=total, height=HEIGHT, **box)
    if end < total + requested_bytes:
        axes.plot(end, y, marker=5, color=ALARM, markersize=9, clip_on=False, zorder=5)
    asked = format_bytes(requested_bytes) if requested_bytes else "more"
    verb = "held" if run.oom.reserved_bytes is None else "reserved"
    text = f"out of memory: {format_bytes(total)}\n{verb}, {asked} asked for"
    _write_total(axes, text, end, y, color=ALARM, size=9.5)
    return end


def _finding(names: Sequence[str], runs: Sequence[Run]) -> str:
    """Return what the bars show, in a sentence: what decides is what is reserved."""
    named = list(zip(names, runs, strict=True))
    failed = [name for name, run in named if run.oom]
    known = all(run.reserved_bytes for run in runs if not run.oom)  # or peaks are compared
    sizes = {
        name: run.reserved_bytes if known else run.peak_bytes for name, run in named if not run.oom
    }
    if not sizes:
        return f"{failed[0]} runs out of memory" if len(failed) == 1 else "All run out of memory"
    least, most = min(sizes, key=sizes.get), max(sizes, key=sizes.get)
    size = f"{format_bytes(sizes[least])} {'reserved' if known else 'at the peak'}"
    change = change_text(sizes[least], sizes[most])
    if len(sizes) == 1:
        text = f"{least}: {size}"
    elif not change.startswith("−"):  # the same, or almost
        text = f"Each: {size}"
    else:
        text = f"{least}: {size}, {change[1:]} less than {most}"
    return f"{text}; {', '.join(failed)}: out of memory" if failed else text


def _phrase(name: str, run: Run) -> str:
    parts = held(run)
    ending = "out of memory at " if run.oom else ""
    largest = f", {max(parts, key=parts.get)} the largest part" if parts else ""
    return f"{name}: {ending}{format_bytes(sum(parts.values()))}{largest}"


def draw_stacked_bars(
    bars: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    source: str = "",
    limit: tuple[str, int] | None = None,
) -> Picture:
    """Draw what each bar is made of, with the numbers in a table beneath.

    Args:
        bars: for each bar's name its parts: how many bytes of what. A part may be missing. One
            named after a category has its colour; ``RESERVED`` does not count in the sum.
        title: what the figure shows.
        source: where the numbers come from.
        limit: a device and how many bytes it can hold, for a line.

    Raises:
        InputError: no bars.
    """
    names = dict.fromkeys(part for bar in bars.values() for part in bar)
    names = [name for name in names if any(bar.get(name) for bar in bars.values())]
    if not names:
        raise InputError("there is nothing to draw: pass {bar: {part: amount}}")
    visible = _visible(names, bars.values())
    legend = [entry for entry in area_legend(names) if entry.get_label() in visible]
    figure = Picture(title, source, body=66 + 42 * len(bars), legend=legend)
    sums = {bar: sum(amounts.values()) - amounts.get(RESERVED, 0) for bar, amounts in bars.items()}
    with figure.drawing() as axes:
        ends = []
        for y, amounts in enumerate(bars.values()):
            ends.append(_draw_stack(axes, y, {name: amounts.get(name, 0) for name in names}))
        _scale_bars(axes, [one_line(bar, 36) for bar in bars], max(ends))
        if limit:
            _capacity_line(axes, *limit)
        for y, (bar, end) in enumerate(zip(bars, ends, strict=True)):
            text = format_bytes(sums[bar])
            if unused := bars[bar].get(RESERVED):
                text += f"\n{format_bytes(sums[bar] + unused)} reserved"
            _write_total(axes, text, end, y, line=limit[1] if limit else None)
    columns = [*(name for name in names if name != RESERVED), "together"]
    if RESERVED in names:
        columns.append(RESERVED)
    rows = []
    for bar, amounts in bars.items():
        known = {**amounts, "together": sums[bar]}
        rows.append([bar, *(format_bytes(known[c]) if c in known else MISSING for c in columns)])
    figure.describe("Stacked bars", ["", *columns], rows)
    return figure


stacked_bars = showing(draw_stacked_bars)


def _draw_stack(axes: Axes, y: float, parts: Mapping[str, float]) -> float:
    """Draw one bar, its parts one after the other, and return where it ends."""
    start = 0.0
    for number, (name, amount) in enumerate(parts.items()):
        height = THIN if name == RESERVED else HEIGHT
        axes.barh(y, amount, left=start, height=height, **fill(name, number))
        start += amount
    return start


def _visible(names: Iterable[str], stacks: Collection[Mapping[str, float]]) -> list[str]:
    """Return the parts that can be seen in some bar; the table beneath has all of them."""
    least = LEAST_SEEN * max(sum(stack.values()) for stack in stacks)
    return [name for name in names if any(stack.get(name, 0) > least for stack in stacks)]


def _write_total(
    axes: Axes, text: str, end: float, y: float, *, line: float | None = None, **style: Any
) -> None:
    """Write a text behind the end of a bar; the figure makes room for it.

    Where the text would cover the ``line`` of what a device can hold, it stands behind that.
    """
    low, high = axes.get_xlim()
    longest = max(text.splitlines(), key=len)
    if line and end < line and not fits(f"{longest}  ", (line - end) / (high - low)):
        end = line
    style = {"size": 10.5 if text == longest else 9.5, "weight": "bold", **style}
    note(axes, text, (end, y), (8, 0), va="center", bbox=PAPER, zorder=6, **style)


def _scale_bars(axes: Axes, names: Sequence[str], most: float) -> None:
    """Name the bars, the first at the top, and let the axis end at ``most``."""
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.004 * most or 1)  # with the outline of the longest
    axes.spines["left"].set(color="#777777", zorder=5)
    axes.grid(axis="x")
    scale(axes.xaxis, format_bytes, 5)


def _capacity_line(axes: Axes, device: str, capacity_bytes: int) -> None:
    """Draw what a device can hold as a line; where it is far off, as text at the edge."""
    high = axes.get_xlim()[1]
    text = f"{device} can hold {format_bytes(capacity_bytes)}"
    place = {"xycoords": axes.get_xaxis_transform(), "ha": "right"}
    if capacity_bytes > 4 * high:
        note(axes, f"{text} →", (high, 1), (0, 5), color=GREY, **place)
        return
    axes.set_xlim(0, max(high, 1.04 * capacity_bytes))
    axes.axvline(capacity_bytes, zorder=4, **LIMIT_LINE)
    if capacity_bytes < axes.get_xlim()[1] / 2:
        place["ha"] = "left"
    note(axes, text, (capacity_bytes, 1), (0, 5), **place)
