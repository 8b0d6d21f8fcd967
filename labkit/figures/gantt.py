"""Gantt charts: which device worked when, and when it waited.

    gantt({"one at a time": {"stage 0": [Span("forward", 0.0, 1.0), ...], "stage 1": [...]}})

Several charts stand one below the other on one scale of time, so that the shorter one is faster.
Each begins with its own first span; what no span covers until its last one ends is idle, shaded.

Limits: meant for up to a dozen rows and a few dozen spans in each. Spans of one row that overlap
hide each other; time covered twice counts once. Times must come from one clock.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from matplotlib.patches import Patch

from gpumem.figures.drawing import (
    ASIDE,
    GREY,
    LINE_COLOURS,
    Picture,
    area_legend,
    fill,
    fits,
    note,
    one_line,
    scale,
)
from gpumem.figures.tables import seconds_text
from gpumem.inputs import InputError
from labkit.spans import Span

ROW = 26  # pixels; a chart's name takes a row, too
HEIGHT = 0.84  # of a span; a row is 1
IDLE = {"facecolor": "#F1F1F1", "edgecolor": "#808080", "hatch": "xxxx", "linewidth": 0}

Rows = Mapping[str, Iterable[Span]]


def idle_share(rows: Rows) -> float:
    """Return the share of all rows' time in which nothing ran, from first start to last stop.

    Args:
        rows: for each device its spans, as for `gantt`.

    Raises:
        InputError: nothing ran.
    """
    _, duration = _extent(rows)
    return 1 - sum(map(_busy, rows.values())) / (len(rows) * duration)


def gantt(
    charts: Mapping[str, Rows],
    *,
    title: str | None = None,
    source: str = "",
    write: Callable[[float], str] = seconds_text,
) -> Picture:
    """Show which device worked when, and the same as a table beneath.

    Args:
        charts: for each chart's name its rows; for each row's name its spans. A row may be empty.
        title: what the figure shows; None: "Which device works when".
        source: where the times come from.
        write: turns a time into text; the default takes seconds.

    Returns:
        The figure, already shown.

    Raises:
        InputError: no charts, or one in which nothing ran.
    """
    if not charts:
        raise InputError("there is nothing to draw: pass {name: {device: [spans]}}")
    extents = {name: _extent(rows) for name, rows in charts.items()}
    longest = max(duration for _, duration in extents.values())
    found = {span.kind for rows in charts.values() for spans in rows.values() for span in spans}
    kinds = sorted(found, key=lambda kind: (kind != "forward", kind))
    styles = {kind: fill(kind, number) for number, kind in enumerate(kinds)}
    legend = [*area_legend(kinds), Patch(label="idle", **IDLE)]
    height = ROW * sum(len(rows) + 1 for rows in charts.values()) + 60
    figure = Picture(title or "Which device works when", source, body=height, legend=legend)
    ticks, table = {}, []
    with figure.drawing() as axes:
        y = 0
        for name, rows in charts.items():
            first, duration = extents[name]
            axes.text(0, y + 0.15, one_line(name, 90), size=11, weight="bold", va="center")
            for row, spans in rows.items():
                y += 1
                ticks[y] = one_line(row, 16)
                axes.barh(y, duration, HEIGHT, zorder=2, **IDLE)
                for span in spans:
                    start, seconds = span.start - first, span.stop - span.start
                    axes.barh(y, seconds, HEIGHT, left=start, **styles[span.kind])
                    text = one_line(span.text, 20)
                    if fits(text, seconds / longest):
                        colour = styles[span.kind]["facecolor"]
                        look = {"color": "white" if colour == LINE_COLOURS[0] else "black"}
                        look["bbox"] = {"facecolor": colour, "edgecolor": "none", "pad": 1.2}
                        place = {"ha": "center", "va": "center_baseline", "zorder": 4}
                        axes.text(start + seconds / 2, y, text, size=9, **place, **look)
                idle = duration - _busy(spans)
                share = f"{idle / duration:.0%}"
                note(axes, f"{share} idle", (1, y), (8, 0), xycoords=ASIDE, color=GREY, va="center")
                times = [_busy([span for span in spans if span.kind == kind]) for kind in kinds]
                cells = map(write, [*times, idle, duration])
                table.append([f"{name}: {row}" if name else row, *cells, share])
            y += 1
        axes.set_xlim(0, longest)
        axes.set_ylim(y - 0.4, -0.5)
        axes.set_yticks(list(ticks), list(ticks.values()))
        scale(axes.xaxis, write)
        axes.set_xlabel("time")
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
    figure.describe("Gantt chart", ["", *kinds, "idle", "all", "idle share"], table)
    return figure.show()


def _extent(rows: Rows) -> tuple[float, float]:
    """Return when the first span of a chart starts, and the seconds until the last one stops.

    Raises:
        InputError: nothing ran.
    """
    spans = [span for row in rows.values() for span in row]
    start = min((span.start for span in spans), default=0.0)
    duration = max((span.stop for span in spans), default=0.0) - start
    if duration <= 0:
        raise InputError("a chart has no spans that take time: nothing ran")
    return start, duration


def _busy(spans: Iterable[Span]) -> float:
    """Return the seconds that spans cover; what overlaps counts once."""
    covered, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(0.0, span.stop - max(span.start, until))
        until = max(until, span.stop)
    return covered
