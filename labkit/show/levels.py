"""Number lines: which values a number format or a quantiser can hold, and what falls between.

Limits: ticks closer than a pixel run together into a band; the table counts them all. A format
with billions of values has to be cut to a window, or thinned out, by the caller.
"""

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator

from labkit.memory import InputError
from labkit.show.curves import LINE_COLOURS, PALE
from labkit.show.picture import (
    GREY,
    INK,
    SHARPNESS,
    STYLE,
    WIDTH,
    Picture,
    fit,
    place,
    write_title,
)
from labkit.show.rich import MISSING, Rich, grid

LEFT, RIGHT, BOTTOM = 150, 28, 56
ROW, HISTOGRAM = 46, 150
BINS = 120
HISTOGRAM_COLOUR = "#7391A8"
_TICKS = [colour for colour in LINE_COLOURS if colour not in PALE]  # a tick has no outline
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def levels(
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
    relative to its own value (those that are zero left out), to which every value counts alike.

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
    given = None if values is None else _numbers(values, "values")
    for name, line in lines.items():
        if log and line[-1] <= 0:
            raise InputError(f"{name!r} has no level above zero: pass log=False")
    title = title or f"Levels of {', '.join(lines)}"
    top = (54 if source else 34) + 10
    above = 0 if given is None else HISTOGRAM
    with mpl.rc_context(STYLE):
        figure = Picture(top + above + ROW * len(lines) + BOTTOM)
        write_title(figure, title, source)
        low, high = _span([*lines.values(), *([] if given is None else [given])], log)
        if given is not None:
            bars = figure.add_axes((0, 0, 1, 1))
            place(figure, bars, left=LEFT, right=RIGHT, top=top, bottom=BOTTOM + ROW * len(lines))
            _draw_histogram(bars, given, low, high, log)
        axes = figure.add_axes((0, 0, 1, 1))
        place(figure, axes, left=LEFT, right=RIGHT, top=top + above, bottom=BOTTOM)
        _scale(axes, low, high, log)
        _draw_lines(figure, axes, lines)
        axes.set_xlabel(x_label)
        fit(figure, axes.xaxis.label, WIDTH - LEFT - RIGHT)
    figure.table = _table(lines, given, title, source, log)
    figure.alt = _alt(lines, given, title, source, log)
    return figure.show()


def _numbers(given: Any, name: str) -> np.ndarray:
    if hasattr(given, "detach"):  # a tensor, of a dtype that numpy may not know
        given = given.detach().cpu().double().numpy()
    try:
        flat = np.asarray(
            given if hasattr(given, "__array__") else list(given), dtype=np.float64
        ).ravel()
    except (TypeError, ValueError) as error:
        raise InputError(f"{name!r} must be numbers, not {type(given).__name__}") from error
    if not flat.size or not np.isfinite(flat).all():
        problem = "holds numbers that are not finite" if flat.size else "is empty"
        raise InputError(f"{name!r} {problem}: pass finite numbers only")
    return flat


def _span(several: list[np.ndarray], log: bool) -> tuple[float, float]:
    """Both ends of the axis, with a margin; above zero if ``log``."""
    numbers = [array[array > 0] if log else array for array in several]
    low = min(float(array.min()) for array in numbers if array.size)
    high = max(float(array.max()) for array in numbers if array.size)
    if not log:
        margin = 0.02 * (high - low) or 0.5
        return low - margin, high + margin
    margin = (high / low) ** 0.02 if high > low else 3.0
    # Nothing lies beyond the smallest and the largest double.
    return max(low / margin, math.ulp(0.0)), min(high * margin, sys.float_info.max)


def _scale(axes: Axes, low: float, high: float, log: bool) -> None:
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(_decades(math.log10(low), math.log10(high)))
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _power(x)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))
    axes.set_xlim(low, high)
    axes.tick_params(length=0, pad=6)


def _decades(low: float, high: float) -> LogLocator | FixedLocator:
    """Ticks at round powers of ten, one of them 1, between these exponents."""
    if high - low < 3:
        return LogLocator(subs=(1, 2, 5))
    step = next((step for step in (1, 2, 5, 10, 20, 50) if high - low <= 9 * step), 100)
    first = math.ceil(low / step)
    return FixedLocator([10.0 ** (step * i) for i in range(first, math.floor(high / step) + 1)])


def _power(x: float) -> str:
    """``1e-12`` as ``10⁻¹²``; near 1 a plain number."""
    exponent = math.log10(x)
    if abs(exponent) < 4 or not math.isclose(exponent, round(exponent), abs_tol=1e-6):
        return f"{x:,.6g}"
    return f"10{str(round(exponent)).translate(SUPERSCRIPTS)}"


def _draw_histogram(axes: Axes, values: np.ndarray, low: float, high: float, log: bool) -> None:
    _scale(axes, low, high, log)
    shown = values[values > 0] if log else values
    edges = np.geomspace(low, high, BINS + 1) if log else np.linspace(low, high, BINS + 1)
    axes.hist(shown, edges, color=HISTOGRAM_COLOUR)
    axes.set_yticks([])
    axes.tick_params(labelbottom=False)
    axes.spines["left"].set_visible(False)
    axes.text(
        -12 / (WIDTH - LEFT - RIGHT), 0.5, "how many values", transform=axes.transAxes,
        ha="right", va="center", size=9.5, color=GREY,
    )  # fmt: skip


def _draw_lines(figure: Picture, axes: Axes, lines: Mapping[str, np.ndarray]) -> None:
    axes.set_ylim(len(lines) - 0.35, -0.65)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    pixels = (WIDTH - LEFT - RIGHT) * SHARPNESS
    for row, (name, line) in enumerate(lines.items()):
        seen = line[line > 0] if axes.get_xscale() == "log" else line
        where = axes.transAxes.inverted().transform(
            axes.transData.transform(np.column_stack([seen, np.zeros_like(seen)]))
        )[:, 0]
        _, first = np.unique(np.round(where * pixels), return_index=True)  # one tick per pixel
        axes.axhline(row, color=GREY, linewidth=0.8, zorder=2)
        axes.vlines(
            seen[first], row - 0.28, row + 0.28, linewidth=1.1,
            color=_TICKS[row % len(_TICKS)], zorder=3, snap=False,
        )  # fmt: skip
        label = axes.text(
            -12 / (WIDTH - LEFT - RIGHT), row, name, transform=axes.get_yaxis_transform(),
            ha="right", va="center", color=INK,
        )  # fmt: skip
        fit(figure, label, LEFT - 24)


# --- the same numbers in words -----------------------------------------------------------------


def rounding_errors(line: np.ndarray, values: np.ndarray) -> tuple[float | None, float | None]:
    """What rounding ``values`` to the nearest of the sorted levels ``line`` costs.

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


def _table(
    lines: Mapping[str, np.ndarray],
    values: np.ndarray | None,
    title: str,
    source: str,
    log: bool,
) -> Rich:
    headings = ["", "levels", "smallest above zero" if log else "smallest", "largest"]
    if values is not None:
        headings += ["rounding error", "of a single value (median)"]
    rows = []
    for name, line in lines.items():
        seen = line[line > 0] if log else line
        row = [name, f"{line.size:,}", f"{seen[0]:.6g}", f"{line[-1]:.6g}"]
        if values is not None:
            row += [_percent(error) for error in rounding_errors(line, values)]
        rows.append(row)
    return grid(headings, rows, caption="; ".join(filter(None, [title, source])) + ".")


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.3g} %"


def _alt(
    lines: Mapping[str, np.ndarray],
    values: np.ndarray | None,
    title: str,
    source: str,
    log: bool,
) -> str:
    parts = [
        f"{name}: {line.size:,} levels from {(line[line > 0] if log else line)[0]:.6g} "
        f"to {line[-1]:.6g}"
        for name, line in lines.items()
    ]
    where = f", {source}" if source else ""
    above = "" if values is None else f" Above them the histogram of {values.size:,} values."
    return (
        f"Number lines. {title}{where}. {'; '.join(parts)}.{above} "
        "The table below holds the same numbers."
    )
