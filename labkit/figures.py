"""Figures that only lessons draw: lines, losses over several seeds, batches of texts, and savings.

Limits: meant for a handful of lines; from the eighth on, colours repeat. Loss curves are smoothed
over a twentieth of the steps, their table is not.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter

from gpumem.figures.drawing import (
    COLOURS,
    EDGE,
    GREY,
    INK,
    LIMIT_LINE,
    LINE_COLOURS,
    LINE_MARKERS,
    Picture,
    against,
    line_style,
    name_axes,
    note,
    scale,
)
from gpumem.figures.html_pages import MISSING
from gpumem.figures.tables import sources
from gpumem.inputs import InputError
from gpumem.runs import Run
from gpumem.units import format_bytes
from labkit.loss_comparison import Losses

TABLE_ROWS = 12
MOST_MARKERS = 40  # of points in a line; more would hide it
#: Of the bars of two orders: no category's colours, which stand for parts of memory.
ORDER_FILLS = ({"facecolor": "#455A64"}, {"facecolor": "#CFD8DC", "hatch": "///"})


def lines(
    series: Mapping[str, Mapping[float, float | None]],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    title: str | None = None,
    source: str = "",
    limit: float | None = None,
    limit_label: str = "capacity",
    write: Callable[[float], str] = format_bytes,
    under: Mapping[str, Sequence[float]] | None = None,
) -> Picture:
    """Show one or more lines, with the numbers in a table beneath.

    Args:
        series: for each line's name its points, ``{x: y}``; None for a y that could not be
            had (out of memory): a gap in the line, a dash in the table, and a cross on the limit
            where one is drawn. A line named after a category has the category's colour; "A in B"
            beside a line "A" is that one dashed.
        x_label, y_label: what they are; x with its unit.
        log: both axes logarithmic, so that "twice as much" is the same distance everywhere
            and a power law is straight. Needs numbers above zero.
        title: what the figure shows; None: "<y_label> against <x_label>".
        source: where the numbers come from, such as ``run.label``.
        limit, limit_label: where to draw a horizontal line, unless it is far above all others.
        write: turns a y into text; the default takes bytes.
        under: rows of numbers to write beneath the axis, by name.
    """
    curves = {str(name): dict(sorted(curve.items())) for name, curve in series.items()}
    known = [(x, y) for curve in curves.values() for x, y in curve.items() if _finite(y)]
    if not known:
        raise InputError("there are no points to draw: pass {name: {x: y}} with numbers in it")
    xs, ys = (sorted(set(numbers)) for numbers in zip(*known, strict=True))
    if log and min(*xs, *ys) <= 0:
        raise InputError(f"a logarithmic axis has no place for {min(*xs, *ys)}: pass log=False")
    legend = []
    plain = {name: name.partition(" in ")[0] for name in curves}
    pairs = any(name != base and base in curves for name, base in plain.items())
    for number, (name, curve) in enumerate(curves.items()):
        heights = [y if _finite(y) else math.nan for y in curve.values()]
        marker = LINE_MARKERS[number % len(LINE_MARKERS)] if len(curve) <= MOST_MARKERS else ""
        style = line_style(number, COLOURS.get(name, ""))
        if pairs:
            base = plain[name] if plain[name] in curves else name
            style = line_style(list(curves).index(base), COLOURS.get(base, ""))
            style["linestyle"] = "-" if base == name else (0, (1.5, 1))  # seen beside a marker
        legend.append(Line2D([*curve], heights, label=name, marker=marker, markersize=6, **style))
    limits = []
    if limit is not None and (limit > 0 if log else limit <= 3 * max(ys)):  # or all would be flat
        limits = [limit]
        legend.append(Line2D([], [], label=f"{limit_label}: {write(limit)}", **LIMIT_LINE))
    columns = 3 if max(len(entry.get_label()) for entry in legend) > 16 else 5
    title = title or against(y_label, x_label)
    figure = Picture(title, source, body=350, legend=legend, columns=columns)
    with figure.drawing() as axes:
        if log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        for line in legend[: len(curves)]:
            axes.add_line(line)
        for y in limits:
            axes.axhline(y, **LIMIT_LINE)
            for line, curve in zip(legend, curves.values(), strict=False):
                failed = [x for x, height in curve.items() if not _finite(height)]
                style = {"color": line.get_color(), "edgecolors": INK, "zorder": 3}
                axes.scatter(failed, [y] * len(failed), s=150, marker="X", **style)
        axes.autoscale_view()
        low, high = min(ys + limits), max(ys + limits)
        if log:
            axes.set_ylim(low / 1.3, high * 1.5)
        elif low >= 0:
            axes.set_ylim(0, 1.12 * high or 1)
        scale(axes.yaxis, write, log=log)
        places = np.log2(xs) if log else np.array(xs)
        if np.all(np.diff(places) >= 0.08 * np.ptp(places)):  # a tick at each x, where it has room
            axes.xaxis.set_major_locator(FixedLocator(xs))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))
        axes.minorticks_off()
        name_axes(axes, "" if under else x_label, y_label)
        if under:
            rows = zip(xs, *under.values(), strict=False)
            axes.set_xticks(xs, ["\n".join(map("{:,.6g}".format, row)) for row in rows])
            names, place = "\n".join([x_label, *under]), ("axes fraction", "offset points")
            axes.annotate(names, (0, 0), (-8, -6), *place, ha="right", va="top", color=GREY)
    every = sorted({x for curve in curves.values() for x in curve})
    caption = "; ".join(filter(None, [figure.title, source])) + "."
    if len(every) > TABLE_ROWS:
        caption += f" {TABLE_ROWS} of {len(every)} points."
        every = [every[i] for i in np.linspace(0, len(every) - 1, TABLE_ROWS).round().astype(int)]
    rows = []
    for x in every:
        heights = [curve.get(x) for curve in curves.values()]
        rows.append([f"{x:,.6g}", *(write(y) if _finite(y) else MISSING for y in heights)])
    figure.describe("Lines", [x_label, *curves], rows, caption=caption, text_columns=())
    return figure.show()


def _finite(y: float | None) -> bool:
    return y is not None and math.isfinite(y)


def loss_curves(several: Losses | Iterable[Losses], *, title: str | None = None) -> Picture:
    """Show the loss over the steps, with the last losses in a table beneath.

    A line is the mean over the seeds, the band around it reaches from the lowest to the highest.
    A line ends where a loss is no longer finite. If one goes ten times higher than another ever is,
    the figure ends at one and a half times that other's highest loss, and begins near the lowest.

    ``several`` are what ``lab.losses`` gave, one or more; the table compares each with the first.
    ``title`` says what the figure shows.
    """
    several = [several] if isinstance(several, Losses) else list(several)
    if not several or not all(isinstance(each, Losses) for each in several):
        raise InputError("loss_curves draws what lab.losses gave, at least one")
    source = "; ".join(dict.fromkeys(each.label for each in several))
    marker = "o" if len(several[0].curves[0]) == 1 else ""  # one point makes no line
    legend = [
        Line2D([], [], label=each.name, marker=marker, **line_style(number))
        for number, each in enumerate(several)
    ]
    figure = Picture(title or "Loss during training", source, body=350, legend=legend, columns=3)
    highest, lowest = [], []
    with figure.drawing() as axes:
        for each, line in zip(several, legend, strict=True):
            curves = pd.DataFrame(each.curves).T  # a row for each step, a column for each seed
            bad = ~np.isfinite(curves)
            highest.append(curves.mask(bad, 0).abs().max(axis=None))
            lowest.append(curves.mask(bad).min(axis=None))
            smooth = curves.mask(bad).rolling(max(1, len(curves) // 20), min_periods=1).mean()
            smooth[bad.any(axis=1).cummax()] = np.nan  # from the first bad loss of any seed on
            steps, low, high = smooth.index + 1, smooth.min(axis=1), smooth.max(axis=1)
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.18, linewidth=0)
            line.set_data(steps, smooth.mean(axis=1).to_numpy())
            axes.add_line(line)
        axes.autoscale_view()
        # One line that diverges would press the others flat: it leaves the figure instead.
        usual = min(filter(None, highest), default=0)
        if usual and max(highest) > 10 * usual:
            axes.set_ylim(0.9 * max(0, np.nanmin(lowest)), 1.5 * usual)
        name_axes(axes, "step", "loss in nats per token")
    figure.describe(
        "Lines",
        ["", "first loss", "last loss", "lowest to highest", f"against {several[0].name}"],
        [_row(each, several[0]) for each in several],
        caption=f"{figure.title}; {source}. Both losses: mean of the seeds; "
        "the last: of the last tenth of the steps.",
    )
    return figure.show()


def _row(losses: Losses, first: Losses) -> list[str]:
    spread = change = MISSING
    comparable = losses.seeds == first.seeds and len(losses.curves[0]) == len(first.curves[0])
    if math.isfinite(losses.final):
        spread = " to ".join(map(_text, losses.spread))
        if comparable and losses is not first:
            change = str(losses.against(first))
    first_loss = sum(curve[0] for curve in losses.curves) / len(losses.curves)
    return [losses.name, _text(first_loss), _text(losses.final), spread, change]


def _text(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "not finite"


def batch_plans(
    runs: Sequence[Run],
    plans: Mapping[str, Sequence[Sequence[int]]],
    lengths: Sequence[int],
    *,
    title: str,
) -> Picture:
    """Show all batches of each plan, in order: a bar is as high as the batch has positions.

    Args:
        runs: a run of each plan's largest batch.
        plans: for each plan's name its batches, each a list of indices of texts.
        lengths: of the texts, in tokens.
        title: what the figure shows.
    """
    source = f"each bar a batch: tokens dark, padding light; {' and '.join(sources(runs))}"
    figure = Picture(title, source, body=290)
    most = max(map(len, plans.values()))
    rows = []
    with figure.drawing(1, len(plans), sharey=True, squeeze=False) as [places]:
        for axes, run, (name, batches) in zip(places, runs, plans.items(), strict=True):
            texts = [[lengths[number] for number in batch] for batch in batches]
            positions = [len(batch) * max(batch) for batch in texts]
            tokens = [sum(batch) for batch in texts]
            axes.stairs(positions, fill=True, color="#CFD8DC")
            axes.stairs(tokens, fill=True, color=LINE_COLOURS[0])
            axes.stairs(positions, color=INK, linewidth=0.7)
            padding = f"{100 * (1 - sum(tokens) / sum(positions)):.0f} %"
            peak = format_bytes(run.peak_bytes)
            # Of equally large batches the last: in sorted order, that with the longest texts.
            largest = texts[len(texts) - 1 - positions[::-1].index(max(positions))]
            ends = (texts[0], largest, texts[-1])
            first, widest, last = (f"{len(batch)} × {max(batch)}" for batch in ends)
            axes.set_title(f"{name}: {padding} padding\npeak {peak}, {widest}", fontsize=11)
            axes.set_xlim(0, most)
            axes.set_xticks([0, len(texts)], [first, last])
            for label, side in zip(axes.get_xticklabels(), ("left", "right"), strict=True):
                label.set_horizontalalignment(side)
            axes.set_xlabel(f"first to last of {len(texts)} batches")
            reserved = format_bytes(max(run.peak_bytes, run.reserved_bytes or 0))
            rows.append((name, str(len(texts)), padding, first, last, widest, peak, reserved))
        places[0].set_ylabel("positions: rows × longest")
    headings = ("plan", "batches", "padding", "first", "last", "largest", "peak", "reserved")
    figure.describe("Bars", headings, rows)
    return figure.show()


def savings(orders: Mapping[str, Mapping[str, Run]], *, title: str | None = None) -> Picture:
    """Show how much of the peak each switch saves in each of two orders.

    A switch has a bar for each order, from zero to the right; to the left where it costs memory.
    After a run that was out of memory, or for one, nothing is known: there is no bar.

    Args:
        orders: for each order's name its runs, by the switch that each adds. The first run has
            none of them. The first order's switches stand from top to bottom.
        title: what the figure shows; None: the switch whose savings differ most.
    """
    if len(orders) != len(ORDER_FILLS) or len({frozenset(runs) for runs in orders.values()}) != 1:
        raise InputError("savings compares two orders of the same runs' names")
    saved = {name: _saved(runs) for name, runs in orders.items()}
    first, second = saved.values()
    known = [name for name in first if None not in (first[name], second[name])]
    if not title and known:
        most = max(known, key=lambda name: abs(first[name] - second[name]))
        (order, best), (other, least) = sorted(
            ((name, amounts[most]) for name, amounts in saved.items()), key=lambda each: -each[1]
        )
        rest = f"only {format_bytes(least)}" if 0 < least < best else _gain(least)
        title = f"{most} {_gain(best)} {order} and {rest} {other}"
    legend = [
        Patch(label=name, **style, **EDGE) for name, style in zip(saved, ORDER_FILLS, strict=True)
    ]
    source = " and ".join(sources([run for runs in orders.values() for run in runs.values()]))
    figure = Picture(title or "Saved of the peak", source, body=66 + 46 * len(first), legend=legend)
    with figure.drawing() as axes:
        for number, (bars, style) in enumerate(zip(saved.values(), ORDER_FILLS, strict=True)):
            for y, name in enumerate(first):
                place = y - 0.19 + 0.38 * number
                amount = bars[name] or 0
                axes.barh(place, amount, height=0.36, zorder=3, **style, **EDGE)
                text = _gain(bars[name])
                note(axes, text, (max(0, amount), place), (6, 0), va="center", zorder=6)
        axes.set_yticks(range(len(first)), first, color=INK)
        axes.set_ylim(len(first) - 0.5, -0.5)
        axes.axvline(0, color=INK, linewidth=0.8, zorder=4)
        axes.grid(axis="x")
        scale(axes.xaxis, format_bytes, 5)
        axes.set_xlabel("saved of the peak")
    rows = [[name, *(_gain(bars[name]) for bars in saved.values())] for name in first]
    figure.describe("Bars", ["", *saved], rows)
    return figure.show()


def _saved(runs: Mapping[str, Run]) -> dict[str, int | None]:
    """Return by how many bytes the peak falls with each run after the first; None if unknown."""
    pairs = zip([*runs][1:], pairwise(runs.values()), strict=True)
    return {
        name: None if before.oom or after.oom else before.peak_bytes - after.peak_bytes
        for name, (before, after) in pairs
    }


def _gain(nbytes: int | None) -> str:
    if nbytes is None:
        return "out of memory"
    if not nbytes:
        return "saves nothing"
    return f"{'saves' if nbytes > 0 else 'costs'} {format_bytes(abs(nbytes))}"
