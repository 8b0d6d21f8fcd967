"""Number lines: which values a number format or a quantizer can hold, and what falls between.

Limits: ticks closer than a pixel run together into a band; the table counts them all. A format
with billions of values has to be cut to a window, or thinned out, by the caller.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gpumem.figures.drawing import ALARM, GREY, INK, LINE_COLOURS, PALE, Picture, one_line, scale
from gpumem.inputs import InputError

ROW, HISTOGRAM = 46, 150  # pixels
BINS = 120
PLACES = 2000  # more ticks than pixels, of which the same place is drawn once
HISTOGRAM_COLOUR = "#7391A8"
TICK_COLOURS = [colour for colour in LINE_COLOURS if colour not in PALE]  # a tick has no outline


def number_lines(
    levels: Mapping[str, Iterable[float]],
    *,
    values: Iterable[float] | None = None,
    lost: tuple[float, str] | None = None,
    x_label: str = "value",
    title: str | None = None,
    source: str = "",
    log: bool = False,
) -> Picture:
    """Show one number line per format, a tick at every level, and a table beneath.

    Args:
        levels: for each line's name the values it can hold, in any order, as numbers, an array
            or a tensor of any shape, dtype and device. Equal ones count once.
        values: numbers to be rounded: their histogram is drawn above the lines.
        lost: below which number histogram and first line are shaded, and what is written there.
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
    drawn = {name: line[line > 0] if log else line for name, line in lines.items()}
    if not all(line.size for line in drawn.values()):
        raise InputError("a line has no level above zero: pass log=False")
    bars = np.empty(0) if values is None else _numbers(values, "values")
    bars = bars[bars > 0] if log else bars
    place = np.log10 if log else np.asarray
    every = place(np.concatenate([*drawn.values(), bars]))
    margin = 0.02 * np.ptp(every) or 0.5
    ends = np.array([every.min() - margin, every.max() + margin])
    edges = np.linspace(*ends, BINS + 1)
    heights = [ROW * len(lines) + 56]
    if values is not None:
        heights.insert(0, HISTOGRAM)
    figure = Picture(title or f"Levels of {', '.join(lines)}", source, body=sum(heights))
    layout = {"sharex": True, "squeeze": False, "gridspec_kw": {"hspace": 0}}
    with figure.drawing(len(heights), height_ratios=heights, **layout) as grid:
        above, axes = grid[0, 0], grid[-1, 0]
        if values is not None:
            above.hist(bars, 10**edges if log else edges, color=HISTOGRAM_COLOUR)
            above.set_yticks([])
            above.spines["left"].set_visible(False)
            above.set_ylabel("how many values", size=9.5)
        if log:
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xlim(10**ends if log else ends)
        scale(axes.xaxis, "{:,.6g}".format, 8, log=log)
        axes.set_xlabel(one_line(x_label, 80))
        if lost:
            shade = {"color": ALARM, "alpha": 0.12, "linewidth": 0}
            if values is not None:
                above.axvspan(axes.get_xlim()[0], lost[0], **shade)
            first_line = 1 - 1.15 / (len(lines) + 0.3)  # from here to the top
            axes.axvspan(axes.get_xlim()[0], lost[0], first_line, **shade)
            above.text(0.01, 0.9, lost[1], transform=above.transAxes, va="top", color=ALARM)
        for row, line in enumerate(drawn.values()):
            _, first = np.unique(np.round(PLACES / np.ptp(ends) * place(line)), return_index=True)
            colour = TICK_COLOURS[row % len(TICK_COLOURS)]
            axes.axhline(row, color=GREY, linewidth=0.8, zorder=2)
            ticks = {"linelengths": 0.56, "linewidths": 1.1, "colors": colour, "zorder": 3}
            axes.eventplot(line[first], lineoffsets=row, **ticks)
        axes.set_yticks(range(len(lines)), [one_line(name, 20) for name in lines], color=INK)
        axes.set_ylim(len(lines) - 0.35, -0.65)
        axes.spines["left"].set_visible(False)
    headings = ["", "levels", "smallest above zero" if log else "smallest", "largest"]
    rows = [
        [name, f"{line.size:,}", f"{drawn[name][0]:.6g}", f"{line[-1]:.6g}"]
        for name, line in lines.items()
    ]
    figure.describe("Number lines", headings, rows)
    return figure.show()


def _numbers(given: Any, name: str) -> np.ndarray:
    if hasattr(given, "detach"):  # a tensor, of a dtype that numpy may not know
        given = given.detach().cpu().double().numpy()
    numbers = given if hasattr(given, "__array__") else list(given)
    flat = np.asarray(numbers, dtype=np.float64).ravel()
    if not flat.size or not np.isfinite(flat).all():
        raise InputError(f"{name!r} is empty or holds numbers that are not finite")
    return flat
