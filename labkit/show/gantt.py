"""Gantt charts: which device worked when, and when it waited.

    gantt({"one at a time": {"stage 0": [Span("forward", 0.0, 1.0), ...], "stage 1": [...]}})

Several charts stand one below the other on one scale of time, so that the shorter one is quicker.
Each begins with its own first span; what no span covers until its last one ends is idle, shaded.

Limits: meant for up to a dozen rows and a few dozen spans in each. Spans of one row that overlap
hide each other; time covered twice counts once. Times must come from one clock.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from labkit.clock import Span
from labkit.memory import InputError
from labkit.show.curves import LINE_COLOURS
from labkit.show.picture import (
    EDGE,
    GREY,
    STYLE,
    WIDTH,
    Picture,
    fit,
    legend,
    one_line,
    place,
    text_width,
    write_title,
)
from labkit.show.rich import Rich, grid

_ROW, _NAME, _FOOT = 26, 32, 52  # pixels: a row, a chart's name above its rows, the axis
_LEFT, _RIGHT = 120, 84
_LEGEND = 5  # entries in a row of the legend
# Blue and orange for these two, everywhere; others get the colours that are left, in order.
_KNOWN = {"forward": (LINE_COLOURS[0], ""), "backward": (LINE_COLOURS[4], "///")}
_OTHERS = (*zip(LINE_COLOURS[1:4], ("...", "---", "ooo"), strict=True), (LINE_COLOURS[5], "\\\\"))


Rows = Mapping[str, Iterable[Sequence[Any]]]


def idle_share(rows: Rows) -> float:
    """Share of all rows' time in which nothing ran, from the first start to the last stop.

    Args:
        rows: for each device its spans, as for `gantt`.

    Raises:
        InputError: no span, or one that cannot be drawn.
    """
    chart = _read("", rows)
    start, stop = _window(chart)
    return 1 - sum(map(_busy, chart.values())) / (len(chart) * (stop - start))


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
    read = {one_line(name, 90): _read(name, rows) for name, rows in charts.items()}
    if not read:
        raise InputError("there is nothing to draw: pass {name: {device: [spans]}}")
    spans = [span for chart in read.values() for row in chart.values() for span in row]
    found = {span.kind for span in spans}
    kinds = [kind for kind in _KNOWN if kind in found] + sorted(found - set(_KNOWN))
    looks = {kind: _look(kind, number) for number, kind in enumerate(kinds)}
    title = title or "Which device works when"
    top = 54 if source else 34
    head = top + 8 + 24 * math.ceil((len(looks) + 1) / _LEGEND)
    body = sum(_NAME * bool(name) + _ROW * len(chart) for name, chart in read.items()) + 8
    with mpl.rc_context(STYLE):
        figure = Picture(head + body + _FOOT)
        write_title(figure, title, source)
        axes = figure.add_axes((0, 0, 1, 1))
        place(figure, axes, left=_LEFT, right=_RIGHT, top=head, bottom=_FOOT)
        _draw(figure, axes, read, looks, body)
        patches = [*(Patch(**look) for look in looks.values()), Patch(**_IDLE)]
        legend(figure, patches, [*looks, "idle"], ncols=_LEGEND, top=top)
    figure.table = _table(read, kinds, "; ".join(filter(None, [title, source])) + ".")
    figure.alt = _alt(read, title, source)
    return figure.show()


# --- what was given -------------------------------------------------------------------------------


def _read(name: str, rows: Rows) -> dict[str, list[Span]]:
    """The rows of one chart with their spans in order.

    Raises:
        InputError: as `gantt`.
    """
    if not isinstance(rows, Mapping):
        raise InputError(f"{name!r} needs its rows: pass {{device: [spans]}}, not {rows!r:.60}")
    read = {one_line(row, 40): sorted(map(_span, spans), key=_start) for row, spans in rows.items()}
    if not any(read.values()):
        raise InputError(f"{name!r} has no spans: nothing ran")
    start, stop = _window(read)
    if start == stop:
        raise InputError(f"the spans of {name!r} take no time")
    return read


def _span(given: Any) -> Span:
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) not in (3, 4):
        raise InputError(f"a span is (kind, start, stop) or (kind, start, stop, text): {given!r}")
    span = Span(*given)
    times = (span.start, span.stop)
    if not all(isinstance(t, int | float) and math.isfinite(t) for t in times):
        raise InputError(f"a span needs its start and stop in seconds, not {given!r}")
    if span.stop < span.start:
        raise InputError(f"a span ends before it begins: {given!r}")
    return span._replace(kind=one_line(span.kind, 30), text=one_line(span.text, 20))


def _start(span: Span) -> float:
    return span.start


def _window(chart: Mapping[str, list[Span]]) -> tuple[float, float]:
    """When the first span of any row begins and the last one ends."""
    spans = [span for row in chart.values() for span in row]
    if not spans:
        raise InputError("there are no spans: nothing ran")
    return min(span.start for span in spans), max(span.stop for span in spans)


def _busy(row: list[Span], kind: str | None = None) -> float:
    """Seconds covered by the spans of a row, or by those of one kind."""
    covered, until = 0.0, -math.inf
    for span in row:  # in the order of their starts
        if kind in (None, span.kind):
            covered += max(0.0, span.stop - max(span.start, until))
            until = max(until, span.stop)
    return covered


# --- the picture ----------------------------------------------------------------------------------

_IDLE = {"facecolor": "#F1F1F1", "edgecolor": "#808080", "hatch": "xxxx", "linewidth": 0}


def _look(kind: str, number: int) -> dict[str, Any]:
    colour, hatch = _KNOWN.get(kind) or _OTHERS[number % len(_OTHERS)]
    return {"facecolor": colour, "hatch": hatch, **EDGE}


def _draw(
    figure: Picture,
    axes: Axes,
    charts: Mapping[str, Mapping[str, list[Span]]],
    looks: Mapping[str, Mapping[str, Any]],
    height: float,
) -> None:
    """All charts on one scale of time; y counts pixels from the top."""
    longest = max(stop - start for start, stop in map(_window, charts.values()))
    unit, divisor = next(
        (u, d) for u, d in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)) if longest >= 2 * d or u == "µs"
    )
    axes.set_xlim(0, longest)
    axes.set_ylim(height, 0)
    y, places = 0.0, {}
    for name, chart in charts.items():
        if name:
            text = axes.text(0, y + 22, name, size=11, weight="bold", va="baseline")
            fit(figure, text, WIDTH - _LEFT - 12)
            y += _NAME
        for row, spans in chart.items():
            _draw_row(figure, axes, y, spans, _window(chart), looks)
            places[y + _ROW / 2] = row
            y += _ROW
    labels = [_fitted(figure, row, _LEFT - 18) for row in places.values()]
    axes.set_yticks(list(places), labels)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    ticks = [t for t in axes.get_xticks() if 0 <= t <= longest]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / divisor:,.6g}"))
    axes.set_xlabel(f"time ({unit})")
    axes.tick_params(length=0, pad=6)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def _fitted(figure: Picture, name: str, room: float) -> str:
    text = figure.text(0, 0, name)
    fit(figure, text, room)
    text.remove()
    return text.get_text()


def _draw_row(
    figure: Picture,
    axes: Axes,
    y: float,
    spans: list[Span],
    window: tuple[float, float],
    looks: Mapping[str, Mapping[str, Any]],
) -> None:
    start, stop = window
    axes.add_patch(Rectangle((0, y + 2), stop - start, _ROW - 4, zorder=2, **_IDLE))
    room = axes.get_window_extent().width / axes.get_xlim()[1]  # pixels per second
    for span in spans:
        wide = span.stop - span.start
        left = span.start - start
        look = looks[span.kind]
        axes.add_patch(Rectangle((left, y + 2), wide, _ROW - 4, zorder=3, **look))
        if not span.text:
            continue
        paper = {"facecolor": look["facecolor"], "edgecolor": "none", "pad": 1.2}
        dark = look["facecolor"] == LINE_COLOURS[0]
        text = axes.text(
            left + wide / 2, y + _ROW / 2, span.text, size=9, ha="center", va="center_baseline",
            color="white" if dark else "black", zorder=4, bbox=paper,
        )  # fmt: skip
        if text_width(figure, text) + 2 > wide * room:
            text.remove()
    share = 1 - _busy(spans) / (stop - start)
    axes.annotate(
        f"{share:.0%} idle", (1, y + _ROW / 2), xycoords=axes.get_yaxis_transform(),
        xytext=(8, 0), textcoords="offset points", size=9.5, color=GREY, va="center",
    )  # fmt: skip


# --- the same in words ----------------------------------------------------------------------------


def _table(
    charts: Mapping[str, Mapping[str, list[Span]]], kinds: Sequence[str], caption: str
) -> Rich:
    rows = []
    for name, chart in charts.items():
        start, stop = _window(chart)
        for row, spans in chart.items():
            idle = stop - start - _busy(spans)
            rows.append(
                [f"{name}: {row}" if name else row]
                + [_seconds(_busy(spans, kind)) for kind in kinds]
                + [_seconds(idle), f"{idle / (stop - start):.0%}", _seconds(stop - start)]
            )
    return grid(["", *kinds, "idle", "idle share", "all"], rows, caption=caption)


def _seconds(value: float) -> str:
    """``"1.23 s"``, ``"45.6 ms"``, ``"7.89 µs"``, ``"0"``."""
    for unit, divisor in (("s", 1.0), ("ms", 1e-3)):
        if value >= divisor:
            return f"{value / divisor:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs" if value > 5e-10 else "0"


def _alt(charts: Mapping[str, Mapping[str, list[Span]]], title: str, source: str) -> str:
    parts = []
    for name, chart in charts.items():
        start, stop = _window(chart)
        shares = ", ".join(
            f"{row} idle {1 - _busy(spans) / (stop - start):.0%}" for row, spans in chart.items()
        )
        parts.append(f"{name + ': ' if name else ''}{_seconds(stop - start)}, {shares}")
    where = f", {source}" if source else ""
    return f"Gantt chart. {title}{where}. {'; '.join(parts)}. The table below holds the numbers."
