"""Gantt charts: which device worked when, and when it waited.

    gantt({"one at a time": {"stage 0": [Span("forward", 0.0, 1.0), ...], "stage 1": [...]}})

Several charts stand one below the other on one scale of time, so that the shorter one is faster.
Each begins with its own first span; what no span covers until its last one ends is idle, shaded.

Limits: meant for up to a dozen rows and a few dozen spans in each. Spans of one row that overlap
hide each other; time covered twice counts once. Times must come from one clock.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.show.picture import (
    ASIDE,
    EDGE,
    GREY,
    LINE_COLOURS,
    Picture,
    fits,
    note,
    one_line,
    scale,
)
from labkit.show.tables import finite_number, seconds_text
from labkit.toolbox.spans import Span
from labkit.values import InputError

ROW = 26  # pixels; a chart's name takes a row, too
HEIGHT = 0.84  # of a span; a row is 1
# Blue and orange for these two, everywhere; others get the colours that are left, in order.
KNOWN = {"forward": (LINE_COLOURS[0], ""), "backward": (LINE_COLOURS[4], "///")}
OTHERS = (*zip(LINE_COLOURS[1:4], ("...", "---", "ooo"), strict=True), (LINE_COLOURS[5], "\\\\"))
IDLE = {"facecolor": "#F1F1F1", "edgecolor": "#808080", "hatch": "xxxx", "linewidth": 0}

Rows = Mapping[str, Iterable[Sequence[Any]]]
Chart = Mapping[str, list[Span]]


def idle_share(rows: Rows) -> float:
    """Return the share of all rows' time in which nothing ran, from first start to last stop.

    Args:
        rows: for each device its spans, as for `gantt`.

    Raises:
        InputError: no span, or one that cannot be drawn.
    """
    chart, duration = _read("", rows)
    return 1 - sum(map(_busy, chart.values())) / (len(chart) * duration)


def gantt(charts: Mapping[str, Rows], *, title: str | None = None, source: str = "") -> Picture:
    """Show which device worked when, and the same as a table beneath.

    Args:
        charts: for each chart's name its rows; for each row's name its spans, as `Span` or as
            ``(kind, start, stop)`` or ``(kind, start, stop, text)``. A row may be empty.
        title: what the figure shows; None: "Which device works when".
        source: where the times come from.

    Returns:
        The figure, already shown.

    Raises:
        InputError: a chart without a span, or a span that cannot be drawn.
    """
    if not charts:
        raise InputError("there is nothing to draw: pass {name: {device: [spans]}}")
    read = {name: _read(name, rows) for name, rows in charts.items()}
    found = {span.kind for chart, _ in read.values() for row in chart.values() for span in row}
    kinds = [kind for kind in KNOWN if kind in found] + sorted(found - set(KNOWN))
    styles = {}
    for number, kind in enumerate(kinds):
        colour, hatch = KNOWN.get(kind) or OTHERS[number % len(OTHERS)]
        styles[kind] = {"facecolor": colour, "hatch": hatch, **EDGE}
    legend = [Patch(label=kind, **style) for kind, style in styles.items()]
    height = ROW * sum(len(chart) + 1 for chart, _ in read.values()) + 60
    legend.append(Patch(label="idle", **IDLE))
    figure = Picture(title or "Which device works when", source, body=height, legend=legend)
    longest = max(duration for _, duration in read.values())
    ticks, rows = {}, []
    with figure.drawing() as axes:
        y = 0
        for name, (chart, duration) in read.items():
            axes.text(0, y + 0.15, one_line(name, 90), size=11, weight="bold", va="center")
            for row, spans in chart.items():
                y += 1
                ticks[y] = one_line(row, 16)
                _draw_row(axes, y, spans, duration, longest, styles)
                idle = duration - _busy(spans)
                text = f"{idle / duration:.0%} idle"
                note(axes, text, (1, y), (8, 0), xycoords=ASIDE, color=GREY, va="center")
                seconds = [_busy([span for span in spans if span.kind == kind]) for kind in kinds]
                times = map(seconds_text, [*seconds, idle, duration])
                named = f"{name}: {row}" if name else row
                rows.append([named, *times, f"{idle / duration:.0%}"])
            y += 1
        axes.set_xlim(0, longest)
        axes.set_ylim(y - 0.4, -0.5)
        axes.set_yticks(list(ticks), list(ticks.values()))
        scale(axes.xaxis, seconds_text)
        axes.set_xlabel("time")
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
    figure.describe("Gantt chart", ["", *kinds, "idle", "all", "idle share"], rows)
    return figure.show()


def _read(name: str, rows: Rows) -> tuple[Chart, float]:
    """Return the rows of one chart, their spans in order and from time 0 on, and how long it is.

    Raises:
        InputError: as `gantt`.
    """
    try:
        chart = {row: [Span(*span) for span in spans] for row, spans in rows.items()}
    except (AttributeError, TypeError) as error:
        raise InputError(
            f"{name!r} needs {{device: [spans]}}; a span is (kind, start, stop), perhaps a text"
        ) from error
    every = [span for spans in chart.values() for span in spans]
    for span in every:
        duration = finite_number(span.stop, "a stop") - finite_number(span.start, "a start")
        if duration < 0:
            raise InputError(f"a span stops at or after its start, in seconds: {span}")
    first = min((span.start for span in every), default=0)
    duration = max((span.stop for span in every), default=0) - first
    if not duration:
        raise InputError(f"{name!r} has no spans that take time: nothing ran")
    for row, spans in chart.items():
        shifted = [s._replace(start=s.start - first, stop=s.stop - first) for s in spans]
        chart[row] = sorted(shifted, key=lambda span: span.start)
    return chart, duration


def _busy(row: list[Span]) -> float:
    """Return the seconds that the spans of a row, in the order of their starts, cover."""
    covered, until = 0.0, -math.inf
    for span in row:
        covered += max(0.0, span.stop - max(span.start, until))
        until = max(until, span.stop)
    return covered


def _draw_row(
    axes: Axes,
    y: float,
    spans: list[Span],
    duration: float,
    longest: float,
    styles: Mapping[str, Any],
) -> None:
    across = (y - HEIGHT / 2, HEIGHT)
    axes.broken_barh([(0, duration)], across, zorder=2, **IDLE)
    for kind, style in styles.items():
        pieces = [(s.start, s.stop - s.start) for s in spans if s.kind == kind]
        axes.broken_barh(pieces, across, zorder=3, **style)
    for span in spans:
        colour = styles[span.kind]["facecolor"]
        text = one_line(span.text, 20)
        if fits(text, (span.stop - span.start) / longest):
            axes.text(
                (span.start + span.stop) / 2,
                y,
                text,
                size=9,
                ha="center",
                va="center_baseline",
                color="white" if colour == LINE_COLOURS[0] else "black",
                zorder=4,
                bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.2},
            )
