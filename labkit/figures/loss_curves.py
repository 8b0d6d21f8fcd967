"""Loss curves over several seeds: do two ways to train reach the same loss?

Limits: the lines are smoothed over a twentieth of the steps, the table is not.
"""

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from gpumem.figures.drawing import Picture, line_style, name_axes
from gpumem.figures.html_pages import MISSING
from gpumem.inputs import InputError
from labkit.loss_comparison import Losses


def loss_curves(several: Losses | Iterable[Losses], *, title: str | None = None) -> Picture:
    """Show the loss over the steps, with the last losses in a table beneath.

    A line is the mean over the seeds, the band around it reaches from the lowest to the highest.
    A line ends where a loss is no longer finite. If one goes ten times higher than another ever is,
    the figure ends at one and a half times that other's highest loss, and begins near the lowest.

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
        caption=f"{figure.title}; {source}. Last loss: mean of the last tenth of the steps.",
    )
    return figure.show()


def _row(losses: Losses, first: Losses) -> list[str]:
    spread = change = MISSING
    comparable = losses.seeds == first.seeds and len(losses.curves[0]) == len(first.curves[0])
    if math.isfinite(losses.final):
        spread = " to ".join(map(_text, losses.spread))
        if comparable and losses is not first:
            change = str(losses.against(first))
    return [losses.name, _text(losses.curves[0][0]), _text(losses.final), spread, change]


def _text(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "not finite"
