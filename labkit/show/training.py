"""Loss curves over several seeds: do two ways to train reach the same loss?

Limits: the lines are smoothed over a twentieth of the steps, the table is not.
"""

import math
from collections.abc import Iterable

import matplotlib as mpl

from labkit.memory import InputError
from labkit.seeds import Losses
from labkit.show.curves import LINE_COLOURS, LINE_DASHES, line_look
from labkit.show.picture import STYLE, Picture, legend, one_line, place, write_title
from labkit.show.rich import MISSING, Rich, grid


def loss_curves(several: Losses | Iterable[Losses], *, title: str | None = None) -> Picture:
    """Show the loss over the steps, with the last losses in a table beneath.

    A line is the mean over the seeds, the band around it reaches from the lowest to the highest.
    A line ends where a loss is no longer finite. If one goes ten times higher than another ever is,
    the picture ends at one and a half times that other's highest loss.

    Args:
        several: what ``lab.losses`` gave, one or more; the table compares each with the first.
        title: what the figure shows; None: "Loss during training".

    Returns:
        The figure, already shown.

    Raises:
        InputError: nothing to draw.
    """
    several = [several] if isinstance(several, Losses) else list(several)
    if not several or not all(isinstance(each, Losses) for each in several):
        raise InputError("loss_curves draws what lab.losses gave, at least one")
    title = title or "Loss during training"
    source = "; ".join(dict.fromkeys(each.label for each in several))
    columns = 3
    head = 66 + 24 * math.ceil(len(several) / columns)
    with mpl.rc_context(STYLE):
        figure = Picture(head + 300 + 56)
        write_title(figure, title, source)
        axes = figure.add_axes((0, 0, 1, 1))
        place(figure, axes, left=64, right=24, top=head, bottom=56)
        handles = [_draw(axes, each, number) for number, each in enumerate(several)]
        _leave_out_what_diverges(axes, several)
        axes.set_xlabel("step")
        axes.set_ylabel("loss in nats per token")
        axes.grid()
        axes.tick_params(length=0, pad=6)
        names = [one_line(each.name, 36) for each in several]
        legend(figure, handles, names, ncols=columns)
    figure.table = _table(several, title, source)
    figure.alt = _alt(several, title, source)
    return figure.show()


def _leave_out_what_diverges(axes: mpl.axes.Axes, several: list[Losses]) -> None:
    """One line that goes to the sky must not press the others flat: it leaves the picture."""
    tops = [
        max(map(abs, filter(math.isfinite, sum(each.curves, ()))), default=0) for each in several
    ]
    usual = min(filter(None, tops), default=0)
    if usual and max(tops) > 10 * usual:
        axes.set_ylim(0, 1.5 * usual)


def _draw(axes: mpl.axes.Axes, losses: Losses, number: int) -> mpl.lines.Line2D:
    colour = LINE_COLOURS[number % len(LINE_COLOURS)]
    dashes = LINE_DASHES[number % len(LINE_DASHES)]
    curves = [_smooth(curve) for curve in losses.curves]
    steps = range(1, len(curves[0]) + 1)
    rows = list(zip(*curves, strict=True))
    mean = [sum(row) / len(row) for row in rows]
    band = [
        (min(row), max(row)) if math.isfinite(m) else (math.nan, math.nan)
        for row, m in zip(rows, mean, strict=True)
    ]
    axes.fill_between(steps, *zip(*band, strict=True), color=colour, alpha=0.18, linewidth=0)
    marker = "o" if len(mean) == 1 else None
    (line,) = axes.plot(steps, mean, linestyle=dashes, marker=marker, **line_look(colour))
    return line


def _smooth(curve: tuple[float, ...]) -> list[float]:
    """The mean of each step and those just before it; NaN from the first bad loss on."""
    width = max(1, len(curve) // 20)
    smooth, healthy = [], True
    for step in range(len(curve)):
        healthy = healthy and math.isfinite(curve[step])
        window = curve[max(0, step + 1 - width) : step + 1]
        smooth.append(sum(window) / len(window) if healthy else math.nan)
    return smooth


def _table(several: list[Losses], title: str, source: str) -> Rich:
    first, rows = several[0], []
    for each in several:
        healthy = math.isfinite(each.final)
        spread = " to ".join(map(_number, each.spread)) if healthy else MISSING
        comparable = each.seeds == first.seeds and len(each.curves[0]) == len(first.curves[0])
        change = MISSING
        if healthy and comparable and each is not first:
            change = str(each.against(first))
        rows.append([each.name, _number(each.final), spread, change])
    caption = f"{title}; {source}. Last loss: mean of the last tenth of the steps."
    return grid(
        ["", "last loss", "lowest to highest", f"against {first.name}"], rows, caption=caption
    )


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "not finite"


def _alt(several: list[Losses], title: str, source: str) -> str:
    parts = [
        f"{each.name}: from {_number(each.curves[0][0])} to {_number(each.final)}"
        for each in several
    ]
    return f"Lines. {title}, {source}. {'; '.join(parts)}. The table below holds the last losses."
