"""The allocator over time: what it holds after every event, and its map at a moment you choose.

Tensors come and go; the caching allocator keeps what it once reserved. The upper figure shows
both, the lower one which bytes are where; a slider moves through the run.

Without a frontend there is a static figure: the peak, or the moment before the request that fails.

Limits: `replay` follows a model of PyTorch's allocator on one stream, so for a measured run
this is what the model makes of its events. The slider stops at some fifty events, not at each. The
curves of a long run are envelopes: of each stretch narrower than a pixel, its highest point.
"""

from bisect import bisect_left

import ipywidgets
import numpy as np
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.allocator.replay import Player, Replay, replay
from labkit.runs import Run
from labkit.show.cards import Shown
from labkit.show.controls import LiveFigure, named
from labkit.show.picture import ABOVE, ALARM, GREY, INK, PAPER, WIDTH, Picture, note
from labkit.show.segment_map import (
    CACHED,
    HEADINGS,
    ROW,
    STYLES,
    USED,
    Segment,
    draw_map,
    layout_of,
    map_legend,
    sums_row,
)
from labkit.show.timelines import byte_limit, event_axes
from labkit.values import InputError, format_bytes

STOPS, BUCKETS = 48, 1500
CURVES, MAPS = 260, 60  # pixels: the curves, and the names and ticks of the maps
FREE = {
    "facecolor": STYLES[CACHED]["facecolor"],
    "edgecolor": "#8A5300",
    "hatch": "////",
    "linewidth": 0,
}


def allocator_view(run: Run | Replay, *, title: str | None = None) -> "AllocatorView":
    """Show what the caching allocator holds over a run, with a slider through its segments.

    Args:
        run: a run with a trace, replayed in its device's capacity; or what ``replay`` gave, for
            another budget or for expandable segments.
        title: what the figure shows; None: "The allocator, event by event: <name>".

    Returns:
        The view, already shown. Its ``picture`` is the static figure.

    Raises:
        InputError: it is neither, has no trace, or nothing was allocated.
    """
    heading, source = "The allocator, event by event", ""
    if isinstance(run, Run):
        heading, source = f"{heading}: {run.name}", f"{run.label}, "
        run = replay(run.trace, budget_bytes=run.capacity_bytes)
    if not isinstance(run, Replay):
        raise InputError(f"allocator_view needs a run or a replay, not {type(run).__name__}")
    if not run.peak_allocated_bytes:
        raise InputError("nothing was allocated: there are no segments")
    source += "replayed by a model of PyTorch's allocator"
    if run.expandable_segments:
        source += ", expandable segments"
    return AllocatorView(run, title or heading, source).show()


class AllocatorView(Shown):
    """What ``allocator_view`` shows. A moment is a position: just after that event of the replay.

    Attributes:
        moment: that of the static figure; -1 is before the first event.
        slider: a SelectionSlider over some moments.
        live: an HTML widget with the figure of the chosen moment, empty before the first move.
        picture: the static figure, where nobody can move the slider.
    """

    def __init__(self, played: Replay, title: str, source: str) -> None:
        self.replay, self.title, self.source = played, title, source
        self.moment = int(np.argmax(played.allocated_bytes))
        self._failed: int | None = None  # the position of the request that fails
        if played.failure is not None:  # from there on the replay continues without a budget
            over = (nbytes > played.budget_bytes for nbytes in played.reserved_bytes)
            self._failed = list(over).index(True)
            self.moment = self._failed - 1
        self.picture = self.draw(self.moment)
        stops = np.linspace(0, len(played.indices) - 1, STOPS).astype(int).tolist()
        options = [(self._name(stop), stop) for stop in sorted({*stops, self.moment})]
        slider = ipywidgets.SelectionSlider(options=options, value=self.moment)
        self.slider = named(
            slider, "moment", label_width="initial", width="auto", max_width=f"{WIDTH}px"
        )
        self.slider.observe(lambda _: self._draw_live(), names="value")
        self._figure = LiveFigure()
        self.live = self._figure.widget
        self.widget = ipywidgets.VBox([self.slider, self.live])

    def show(self) -> "AllocatorView":
        """Show the slider, and the static figure under it until the slider moves."""
        display(self.widget)
        self._figure.show_below(self.picture.rich())
        return self

    def _draw_live(self) -> None:
        self._figure.replace(self.draw(self.slider.value).rich())

    def _name(self, position: int) -> str:
        if position == self.moment:
            return "peak" if self._failed is None else "before it runs out of memory"
        index = self.replay.indices[position]
        step = self.replay.trace.step_at(index)
        phase = self.replay.trace.events[index].phase
        return f"event {position + 1:,}: {f'step {step}, ' if step else ''}{phase}"

    def segments_at(self, position: int) -> list[Segment]:
        """Return the segments just after the event at this position."""
        played = self.replay
        player = Player(played.trace, played.budget_bytes, played.expandable_segments)
        for index in played.indices[: position + 1]:
            player.play(index)
        return player.allocator.segments()

    # --- drawing ---------------------------------------------------------------------------------

    def draw(self, position: int) -> Picture:
        """Return the curves with this moment marked, and its map."""
        segments, name = self.segments_at(position), self._name(position)
        layout = layout_of([segments])
        map_height = ROW * layout.rows + MAPS
        legend = [
            *map_legend(),
            Patch(label="cached or stranded", **FREE),
            Line2D([], [], color=INK, linewidth=1.4, label="reserved"),
        ]
        height = CURVES + map_height
        figure = Picture(self.title, self.source, body=height, legend=legend, columns=3)
        with figure.drawing(2, height_ratios=[CURVES, map_height]) as (curves, below):
            self._draw_curves(curves)
            self._mark_failure(curves)
            curves.axvline(position + 1, color=INK, linewidth=1.8, zorder=7)
            above = {"xycoords": ABOVE, "ha": "center", "weight": "bold"}
            note(curves, "▼", (position + 1, 1), (0, 2), **above)
            draw_map(below, segments, layout, name, WIDTH)
        peaks = (self.replay.peak_allocated_bytes, self.replay.peak_reserved_bytes)
        allocated, reserved = map(format_bytes, peaks)
        about = [f"At most {allocated} allocated, {reserved} reserved"]
        if self.replay.budget_bytes:
            about.append(f"budget {format_bytes(self.replay.budget_bytes)}")
        if self.replay.failure is not None:
            about.append(str(self.replay.failure))
        row = sums_row(name, segments)
        kind = "Above, curves of allocated and reserved memory, below, a map of segments"
        cells = [f"{heading} {cell}" for heading, cell in zip(HEADINGS, row[1:], strict=True)]
        parts = [*about, f"{name}: {', '.join(cells)}"]
        caption = "; ".join([self.title, self.source, *about]) + "."
        figure.describe(kind, ["", *HEADINGS], [row], parts=parts, caption=caption)
        return figure

    def _draw_curves(self, axes: Axes) -> None:
        played, count = self.replay, len(self.replay.indices)
        at = np.unique(np.linspace(0, count, BUCKETS + 1).astype(int)[:-1])
        edges = np.append(at, count)  # the last event lasts one event, too
        highest = [
            np.maximum.reduceat(np.array(nbytes, dtype=np.int64), at)
            for nbytes in (played.allocated_bytes, played.reserved_bytes)
        ]
        allocated, reserved = (np.append(row, row[-1]) for row in highest)
        blue = STYLES[USED]["facecolor"]
        axes.fill_between(edges, 0, allocated, step="post", linewidth=0, facecolor=blue)
        axes.fill_between(edges, allocated, reserved, step="post", **FREE)
        axes.step(edges, allocated, where="post", color=blue, linewidth=1.1)
        axes.step(edges, reserved, where="post", color=INK, linewidth=1.4, zorder=4)
        event_axes(axes, 0, count)
        top = 1.22 * int(reserved.max())
        if played.budget_bytes and played.budget_bytes < top:
            top = max(top, 1.15 * played.budget_bytes)
            text = f"budget {format_bytes(played.budget_bytes)}"
            byte_limit(axes, text, played.budget_bytes)
        axes.set_ylim(0, top)
        for number, (start, _) in enumerate(played.trace.steps()[:12], start=1):
            position = bisect_left(played.indices, start)
            axes.axvline(position, color=GREY, linewidth=1, linestyle=(0, (2, 2)), zorder=5)
            place = {"xycoords": ABOVE, "size": 9, "color": GREY}
            note(axes, f"step {number}", (position, 1), (3, -11), **place)

    def _mark_failure(self, axes: Axes) -> None:
        """Mark the request that fails; what comes after it is what would have been needed."""
        if self._failed is None:
            return
        count = len(self.replay.indices)
        axes.axvspan(self._failed, count, facecolor="white", alpha=0.6, zorder=4.5)
        line = {"color": ALARM, "linewidth": 2, "linestyle": (0, (3, 1.5))}
        axes.axvline(self._failed, zorder=7.5, **line)
        at_left = self._failed < count / 2
        note(
            axes,
            f"out of memory: asked for {format_bytes(self.replay.failure.requested_bytes)}",
            (self._failed, 0.06 * axes.get_ylim()[1]),
            (6 if at_left else -6, 0),
            ha="left" if at_left else "right",
            weight="bold",
            color=ALARM,
            bbox=PAPER,
            zorder=8,
        )
