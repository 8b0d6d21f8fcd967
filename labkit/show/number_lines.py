"""Number lines: which values a number format or a quantiser can hold, and what falls between.

Limits: ticks closer than a pixel run together into a band; the table counts them all. A format
with billions of values has to be cut to a window, or thinned out, by the caller.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator

from labkit.show.picture import GREY, INK, LINE_COLOURS, PALE, Picture, one_line
from labkit.support.html_table import MISSING
from labkit.values import InputError

ROW, HISTOGRAM = 46, 150  # pixels
BINS = 120
PLACES = 2000  # more ticks than pixels, of which the same place is drawn once
HISTOGRAM_COLOUR = "#7391A8"
TICK_COLOURS = [colour for colour in LINE_COLOURS if colour not in PALE]  # a tick has no outline


def number_lines(
    levels: Mapping[str, Iterable[float]],
    *,
    values: Iterable[float] | None = None,
    x_label: str = "value",
    title: str | None = None,
    source: str = "",
    log: bool = False,
) -> Picture:
    """Show one number line per format, a tick at every level, and a table beneath.

    The table counts the levels and gives the least and the greatest. With ``values`` it also says
    what rounding each value to the nearest level costs: the norm of all errors over the norm of
    the values, which large values decide, and the median of the errors of single values, each
    relative to its own value (zeros left out), to which every value counts equally.

    Args:
        levels: for each line's name the values it can hold, in any order, as numbers, an array
            or a tensor of any shape, dtype and device. Equal ones count once.
        values: numbers to be rounded: their histogram is drawn above the lines.
        x_label: what the numbers are.
        title: what the figure shows; None: "Levels of <names>".
        source: where the numbers come from.
        log: a logarithmic axis. It has room for numbers above zero only: the rest is in the
            table, whose "smallest" is then the smallest above zero.

    Returns:
        The figure, already shown.

    Raises:
        InputError: no lines, a line without levels, numbers that are not finite, or ``log`` with
            no level above zero.
    """
    lines = {str(name): np.unique(_numbers(line, str(name))) for name, line in levels.items()}
    if not lines:
        raise InputError("there are no levels to draw: pass {name: [levels]}")
    given = np.empty(0) if values is None else _numbers(values, "values")
    drawn, bars = lines, given
    if log:
        drawn = {name: line[line > 0] for name, line in lines.items()}
        bars = given[given > 0]
        if not all(line.size for line in drawn.values()):
            raise InputError("a line has no level above zero: pass log=False")
    every = np.concatenate([*drawn.values(), bars])
    margin = 0.02 * (np.log(every.max() / every.min()) if log else np.ptp(every)) or 0.5
    low, high = every.min() - margin, every.max() + margin
    if log:
        low, high = every.min() / np.exp(margin), every.max() * np.exp(margin)
    heights = [ROW * len(lines) + 56]
    if given.size:
        heights.insert(0, HISTOGRAM)
    figure = Picture(title or f"Levels of {', '.join(lines)}", source, body=sum(heights))
    layout = {"sharex": True, "squeeze": False, "gridspec_kw": {"hspace": 0}}
    with figure.drawing(len(heights), height_ratios=heights, **layout) as grid:
        panels = grid[:, 0]
        if given.size:
            edges = np.geomspace(low, high, BINS + 1) if log else np.linspace(low, high, BINS + 1)
            panels[0].hist(bars, edges, color=HISTOGRAM_COLOUR)
            panels[0].set_yticks([])
            panels[0].spines["left"].set_visible(False)
            panels[0].set_ylabel("how many values", size=9.5)
        axes = panels[-1]
        if log:
            axes.set_xscale("log")
            decades = MaxNLocator(9, integer=True).tick_values(np.log10(low), np.log10(high))
            narrow = high < 1000 * low
            locator = LogLocator(subs=(1, 2, 5)) if narrow else FixedLocator(10.0**decades)
            axes.xaxis.set_major_locator(locator)
            axes.minorticks_off()
        else:
            axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))
        axes.set_xlim(low, high)
        axes.set_xlabel(one_line(x_label, 80))
        _draw_lines(axes, drawn, np.log if log else np.asarray)
    headings = ["", "levels", "smallest above zero" if log else "smallest", "largest"]
    if given.size:
        headings += ["rounding error", "of a single value (median)"]
    rows = []
    for name, line in lines.items():
        row = [name, f"{line.size:,}", f"{drawn[name][0]:.6g}", f"{line[-1]:.6g}"]
        if given.size:
            row += [_percent(error) for error in rounding_errors(line, given)]
        rows.append(row)
    figure.describe("Number lines", headings, rows)
    return figure.show()


def _numbers(given: Any, name: str) -> np.ndarray:
    if hasattr(given, "detach"):  # a tensor, of a dtype that numpy may not know
        given = given.detach().cpu().double().numpy()
    try:
        numbers = given if hasattr(given, "__array__") else list(given)
        flat = np.asarray(numbers, dtype=np.float64).ravel()
    except (TypeError, ValueError) as error:
        raise InputError(f"{name!r} must be numbers, not {type(given).__name__}") from error
    if not flat.size or not np.isfinite(flat).all():
        raise InputError(f"{name!r} is empty or holds numbers that are not finite")
    return flat


def _draw_lines(axes: Axes, lines: Mapping[str, np.ndarray], place: Any) -> None:
    """Draw each line with its ticks; ``place`` is what the axis makes of a number."""
    low, high = place(axes.get_xlim())
    for row, line in enumerate(lines.values()):
        _, first = np.unique(np.round(PLACES / (high - low) * place(line)), return_index=True)
        colour = TICK_COLOURS[row % len(TICK_COLOURS)]
        axes.axhline(row, color=GREY, linewidth=0.8, zorder=2)
        axes.eventplot(
            line[first], lineoffsets=row, linelengths=0.56, linewidths=1.1, colors=colour, zorder=3
        )
    axes.set_yticks(range(len(lines)), [one_line(name, 20) for name in lines], color=INK)
    axes.set_ylim(len(lines) - 0.35, -0.65)
    axes.spines["left"].set_visible(False)


def rounding_errors(line: np.ndarray, values: np.ndarray) -> tuple[float | None, float | None]:
    """Return what rounding ``values`` to the nearest of the sorted levels ``line`` costs.

    Returns:
        The norm of the errors over the norm of the values; and the median, over values that are
        not zero, of a value's error relative to itself. Both None if all values are zero.
    """
    right = np.searchsorted(line, values).clip(1, max(len(line) - 1, 1))
    above, below = line[right.clip(max=len(line) - 1)], line[right - 1]
    errors = np.minimum(np.abs(values - above), np.abs(values - below))
    some = values != 0
    if not some.any():
        return None, None
    relative = float(np.median(errors[some] / np.abs(values[some])))
    return float(np.linalg.norm(errors) / np.linalg.norm(values)), relative


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.3g} %"
