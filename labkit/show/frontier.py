"""The frontier: memory against the bound on time, one dot for each recipe that was simulated.

Dots and diamonds, blue and orange, distinguish the two groups; a filled one is on the frontier of
its group, and is numbered. The table beneath says which recipe each number is.

Limits: both axes are logarithmic. Numbers of dots that nearly coincide overlap; the table has them
all. The bound is no time: see `labkit.plan.advice`.
"""

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from labkit.hardware.catalogue import GPUS
from labkit.plan.advice import Advice
from labkit.plan.search import Option
from labkit.show.picture import (
    ALARM,
    LIMIT_LINE,
    Picture,
    label_ticks,
    name_axes,
    note,
)
from labkit.values import InputError, format_bytes

STYLES = {
    "same": {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    "changed": {"color": "#D55E00", "marker": "D", "linestyle": "--"},
}
NAMES = {"same": "the same training", "changed": "changed training"}


def frontier(advice: Advice) -> Picture:
    """Show what each recipe of ``advice`` takes against what it costs, with a table beneath.

    Raises:
        InputError: ``advice`` is not what `advise` returns.
    """
    if not isinstance(advice, Advice):
        raise InputError(f"a frontier needs what lab.advise returns, not {type(advice).__name__}")
    many = f"{advice.gpus} × " if advice.gpus > 1 else ""
    groups = [group for group in STYLES if any(o.group == group for o in advice.options)]
    legend = [Line2D([], [], label=NAMES[g], markersize=8, **STYLES[g]) for g in groups]
    limits = {
        f"{format_bytes(advice.room_bytes)} with a margin of {advice.margin:.0%}": LIMIT_LINE,
        f"{format_bytes(advice.capacity_bytes)} without": {"color": ALARM, "linewidth": 1.2},
    }
    legend += [Line2D([], [], label=label, **style) for label, style in limits.items()]
    figure = Picture(
        f"What training {advice.model} takes and costs",
        f"simulated for {many}{GPUS[advice.gpu].name}, {advice.seq_len} tokens a sequence",
        body=390,
        legend=legend,
    )
    with figure.drawing() as axes:
        for group in groups:
            _draw_group(axes, advice, group)
        for number, option in enumerate(advice.frontier, start=1):
            offset = (0, 7 if option.group == "same" else -16)
            colour = STYLES[option.group]["color"]
            place = {"ha": "center", "weight": "bold", "color": colour, "zorder": 6}
            note(axes, str(number), _point(option), offset, **place)
        for nbytes, style in zip(
            (advice.room_bytes, advice.capacity_bytes), limits.values(), strict=True
        ):
            axes.axvline(nbytes, zorder=2, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=10)
        axes.margins(0.1)
        axes.xaxis.set_major_locator(LogLocator(2, subs=(1, 1.5)))
        seconds = [option.seconds_per_token for option in advice.options]
        wide = max(seconds) > 10 * min(seconds)
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if wide else range(1, 10)))
        axes.minorticks_off()
        label_ticks(axes.xaxis, format_bytes)
        label_ticks(axes.yaxis, "{:.3g}".format)
        low, high = axes.get_xlim()
        axes.axvspan(advice.room_bytes, high, color="#F3F3F3", zorder=0)
        axes.set_xlim(low, high)
        name_axes(axes, "memory on each GPU", "least seconds per 1000 tokens")
    _describe(figure, advice)
    return figure.show()


def _point(option: Option) -> tuple[float, float]:
    return float(option.needed_bytes), 1000 * option.seconds_per_token


def _draw_group(axes: Axes, advice: Advice, group: str) -> None:
    """Draw a group's options as hollow dots, those on its frontier filled and joined."""
    style = {**STYLES[group], "zorder": 3}
    hollow = {**style, "linestyle": "", "markerfacecolor": "white", "markersize": 6}
    filled = {**style, "linewidth": 1.8, "markersize": 8, "zorder": 4}
    for options, look in ((advice.options, hollow), (advice.frontier, filled)):
        points = [_point(option) for option in options if option.group == group]
        axes.plot([x for x, _ in points], [y for _, y in points], **look)


def _describe(figure: Picture, advice: Advice) -> None:
    best = advice.frontier
    rest = [option for option in advice.options if option not in best]
    rows = []
    for number, option in enumerate([*best, *rest], start=1):
        rows.append(
            [
                str(number) if number <= len(best) else "",
                format_bytes(option.needed_bytes),
                f"{1000 * option.seconds_per_token:.3g}",
                option.group,
                "yes" if option.fits else "no",
                str(option.recipe),
            ]
        )
    fitting = f"{len(advice.fitting)} of {len(advice.options)} recipes fit"
    figure.describe(
        "Scatter plot",
        ["number", "memory", "least s per 1000 tokens", "group", "fits", "recipe"],
        rows,
        caption=f"{figure.title}; {figure.source}. Bounds, not times. {fitting}.",
        text_columns=(0, 3, 4, 5),
    )
