"""The frontier: memory against the bound on time, one dot for each recipe that was simulated.

Dots and diamonds, blue and orange, tell the two groups apart; a filled one is on the frontier of
its group, and is numbered. The table beneath says which recipe each number is.

Limits: both axes are logarithmic. The bound is no time: see `labkit.advice`.
"""

import math
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from labkit.advice import Advice
from labkit.catalogue import GPUS
from labkit.memory import InputError, format_bytes
from labkit.recipe_search import GROUPS, Option
from labkit.show.picture import (
    ALARM,
    INK,
    STYLE,
    Picture,
    legend,
    place,
    short,
    write_title,
)
from labkit.show.rich import Rich, grid

_LOOKS = {"same": ("#0072B2", "o", "-"), "changed": ("#D55E00", "D", "--")}
_NAMES = {"same": "the same training", "changed": "changed training"}
_HEAD, _HEIGHT, _FOOT = 112, 320, 56  # pixels


def frontier(advice: Advice) -> Picture:
    """Show what each recipe of ``advice`` takes against what it costs, the numbers beneath.

    Returns:
        The figure, already shown.

    Raises:
        InputError: ``advice`` is not what `advise` returns.
    """
    return draw_frontier(advice).show()


def draw_frontier(advice: Advice) -> Picture:
    """The figure of ``frontier`` without showing it. Same argument, same errors."""
    if not isinstance(advice, Advice):
        raise InputError(f"a frontier needs what lab.advise returns, not {type(advice).__name__}")
    card, chosen = GPUS[advice.gpu], advice.frontier
    many = f"{advice.gpus} × " if advice.gpus > 1 else ""
    title = f"What training {advice.model} takes and costs"
    source = f"simulated for {many}{card.name}, {advice.seq_len} tokens a sequence"
    with mpl.rc_context(STYLE):
        figure = Picture(_HEAD + _HEIGHT + _FOOT)
        write_title(figure, title, source)
        axes = figure.add_axes((0, 0, 1, 1))
        place(figure, axes, left=92, right=28, top=_HEAD, bottom=_FOOT)
        _scale(axes, advice)
        handles = _draw_dots(axes, advice)
        _draw_budget(axes, advice)
        _write_numbers(figure, axes, advice, chosen)
        legend(figure, list(handles.values()), [_NAMES[group] for group in handles], ncols=3)
        axes.set_xlabel("memory on each card")
        axes.set_ylabel("least seconds per 1000 tokens")
    figure.table = _table(advice, f"{title}; {source}. Bounds, not times.")
    figure.alt = _alt(advice, title, source)
    return figure


def _point(option: Option) -> tuple[float, float]:
    return float(option.needed_bytes), 1000 * option.seconds_per_token


def _scale(axes: Axes, advice: Advice) -> None:
    points = [_point(option) for option in advice.options]
    xs = [x for x, _ in points] + [advice.capacity_bytes]
    ys = [y for _, y in points]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.set_xlim(min(xs) / 1.25, max(xs) * 1.25)
    axes.set_ylim(min(ys) / 1.35, max(ys) * 1.35)
    axes.xaxis.set_major_locator(FixedLocator(_powers(*axes.get_xlim())))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(format_bytes(x))))
    axes.yaxis.set_major_locator(FixedLocator(_decades(*axes.get_ylim())))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.3g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid()
    axes.tick_params(length=0, pad=6)


def _powers(low: float, high: float) -> list[float]:
    """Powers of two between, and halfway points where there are few."""
    powers = [2.0**power for power in range(60) if low <= 2.0**power <= high]
    if len(powers) <= 3:
        powers += [1.5 * 2.0**power for power in range(60) if low <= 1.5 * 2.0**power <= high]
    return sorted(powers)


def _decades(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, 20 and so on; with more between where there are few."""
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), [i / 10 for i in range(10, 100)]):
        ticks = [s * 10.0**p for p in range(-12, 7) for s in steps if low <= s * 10.0**p <= high]
        if len(ticks) >= 3:
            return ticks[:: 1 + len(ticks) // 9]
    return ticks


def _draw_dots(axes: Axes, advice: Advice) -> dict[str, Any]:
    """Every option as a dot, the frontier of each group joined; one handle for each group."""
    handles = {}
    best = advice.frontier
    for group in GROUPS:
        colour, marker, dash = _LOOKS[group]
        every = [_point(option) for option in advice.options if option.group == group]
        joined = [_point(option) for option in best if option.group == group]
        if not every:
            continue
        axes.plot(*zip(*every, strict=True), marker, color=colour, markerfacecolor="white",
                  markersize=6, zorder=3)  # fmt: skip
        (handles[group],) = axes.plot(
            [x for x, _ in joined], [y for _, y in joined], marker=marker, color=colour,
            linestyle=dash, linewidth=1.8, markersize=8, zorder=4,
        )  # fmt: skip
    return handles


def _draw_budget(axes: Axes, advice: Advice) -> None:
    style = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "size": 9.5}
    axes.axvspan(advice.room_bytes, axes.get_xlim()[1], color="#F3F3F3", zorder=0)
    axes.axvline(advice.room_bytes, color=INK, linewidth=1.6, linestyle=(0, (5, 2)), zorder=2)
    axes.axvline(advice.capacity_bytes, color=ALARM, linewidth=1.2, zorder=2)
    low, high = axes.get_xlim()
    left = advice.capacity_bytes > (low * high) ** 0.5
    axes.annotate(
        f"{format_bytes(advice.room_bytes)} with a margin of {advice.margin:.0%}, "
        f"{format_bytes(advice.capacity_bytes)} without",
        (advice.capacity_bytes if left else advice.room_bytes, 1), xytext=(0, 5),
        ha="right" if left else "left", color=INK, **style,
    )  # fmt: skip


def _write_numbers(figure: Picture, axes: Axes, advice: Advice, chosen: tuple[Option, ...]) -> None:
    """The number of each option of the frontier beside its dot, clear of all dots and numbers."""
    points = [_point(option) for option in advice.options]
    dots = [tuple(axes.transData.transform(point)) for point in points]
    lines = [axes.transData.transform((x, points[0][1]))[0]
             for x in (advice.room_bytes, advice.capacity_bytes)]  # fmt: skip
    box, taken = axes.get_window_extent(), []
    for number, option in enumerate(chosen, start=1):
        x, y = axes.transData.transform(_point(option))
        places = [(x + dx, y + dy) for dx, dy in _OFFSETS]
        clear = [_clear(place, dots, taken, lines, box) for place in places]
        # The nearest place that is clear; where none is, the clearest.
        best = next((i for i, free in enumerate(clear) if free >= _CLEAR), clear.index(max(clear)))
        taken.append(places[best])
        offset = [away * 72 / figure.dpi for away in _OFFSETS[best]]
        axes.annotate(
            str(number), _point(option), xytext=offset, textcoords="offset points", ha="center",
            va="center", size=10, weight="bold", color=_LOOKS[option.group][0], zorder=6,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip


_NUMBER = 22, 17  # pixels of width and height that a number takes
_CLEAR = 13  # pixels from the middle of a number to that of a dot
#: Where a number may stand: around its dot, then farther out.
_OFFSETS = tuple(
    (dx * reach, dy * reach)
    for reach in (14, 20, 27, 36, 48, 64)
    for dx, dy in ((0, 1), (0, -1), (0.7, 0.7), (-0.7, 0.7), (0.7, -0.7), (-0.7, -0.7), (1, 0),
                   (-1, 0))
)  # fmt: skip


def _clear(
    place: tuple, dots: list[tuple], taken: list[tuple], lines: list[float], box: Any
) -> float:
    """Pixels from ``place`` to what is nearest; below zero outside the axes."""
    x, y = place
    inside = min(x - box.x0, box.x1 - x, y - box.y0, box.y1 - y) - 9
    to_dots = min(math.dist(place, dot) for dot in dots)
    across = [max(abs(x - a) / _NUMBER[0], abs(y - b) / _NUMBER[1]) for a, b in taken]
    to_numbers = _CLEAR * min(across, default=1)
    to_lines = min(abs(x - line) for line in lines) + 3  # a line is thinner than a dot
    return min(inside, 0) if inside < 0 else min(to_dots, to_numbers, to_lines)


# --- the same in words ----------------------------------------------------------------------------


def _table(advice: Advice, caption: str) -> Rich:
    places = {option.recipe: str(i) for i, option in enumerate(advice.frontier, start=1)}
    headings = ["number", "memory", "least s per 1000 tokens", "group", "fits", "recipe"]
    rows = [
        [
            places.get(option.recipe, ""), format_bytes(option.needed_bytes),
            f"{1000 * option.seconds_per_token:.3g}", option.group, "yes" if option.fits else "no",
            str(option.recipe),
        ]
        for option in sorted(
            advice.options,
            key=lambda option: (int(places.get(option.recipe, len(places) + 1)), option.rank()),
        )
    ]  # fmt: skip
    return grid(headings, rows, caption=caption, words={0, 3, 4, 5})


def _alt(advice: Advice, title: str, source: str) -> str:
    fitting = f"{len(advice.fitting)} of {len(advice.options)} recipes fit"
    parts = [
        f"{number}: {option.recipe}, {format_bytes(option.needed_bytes)}, at least "
        f"{1000 * option.seconds_per_token:.3g} s per 1000 tokens ({option.group})"
        for number, option in enumerate(advice.frontier, start=1)
    ]
    best = f" On the frontier: {'; '.join(parts)}." if parts else ""
    return (
        f"Scatter plot. {title}, {source}. {fitting} into {format_bytes(advice.room_bytes)}.{best} "
        "The table below holds the same numbers."
    )
