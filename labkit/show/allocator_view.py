"""The allocator over time: what it holds after every event, and its map at a moment you choose.

Tensors come and go; the caching allocator keeps what it once reserved. The upper figure shows
both, the lower one which bytes are where; a slider moves through the run.

Without a frontend there is a static figure: the peak, or the moment before the request that fails.

Limits: for a measured run this is what `replay`'s model of the allocator makes of its events. The
slider stops at some fifty events, not at each. The curves of a long run are thinned as those of a
timeline are.
"""

from bisect import bisect_left

import ipywidgets
import numpy as np
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labkit.allocator.replay import Player, Replay
from labkit.show.cards import Shown
from labkit.show.controls import LiveFigure, named
from labkit.show.picture import ABOVE, ALARM, INK, PAPER, WIDTH, Picture, note
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
from labkit.show.timelines import STEP_LINE, event_axes, limit_top
from labkit.trace import points_to_draw
from labkit.values import InputError, format_bytes

STOPS, NAMED_STEPS = 48, 12
CURVES, MAPS = 260, 60  # pixels: the curves, and the names and ticks of the maps
FREE = {**STYLES[CACHED], "edgecolor": "#8A5300", "hatch": "////", "linewidth": 0}


def allocator_view(played: Replay, *, title: str = "The allocator") -> "AllocatorView":
    """Show what the caching allocator holds over a run, with a slider through its segments.

    Args:
        played: what ``replay`` gave.
        title: what the figure shows.

    Returns:
        The view, already shown. Its ``picture`` is the static figure.

    Raises:
        InputError: nothing was allocated.
    """
    if not played.peak_allocated_bytes:
        raise InputError("nothing was allocated: there are no segments")
    return AllocatorView(played, title).show()


class AllocatorView(Shown):
    """What ``allocator_view`` shows. A moment is a position: just after that event of the replay.

    Attributes:
        moment: that of the static figure; -1 is before the first event.
        picture: the static figure, where nobody can move the slider.
        slider, live: the moments, and the figure of the chosen one, empty before the first move.
    """

    def __init__(self, played: Replay, title: str) -> None:
        self.replay, self.title = played, title
        self.moment = int(np.argmax(played.allocated_bytes))
        self._failed: int | None = None  # the position of the request that fails
        if played.failure is not None:  # from there on the replay continues without a budget
            over = (nbytes > played.budget_bytes for nbytes in played.reserved_bytes)
            self._failed = list(over).index(True)
            self.moment = self._failed - 1
        self.picture = self._draw(self.moment)
        stops = np.linspace(0, len(played.indices) - 1, STOPS).astype(int).tolist()
        options = [(self._name(stop), stop) for stop in sorted({*stops, self.moment})]
        slider = ipywidgets.SelectionSlider(options=options, value=self.moment)
        self.slider = named(
            slider, "moment", label_width="initial", width="auto", max_width=f"{WIDTH}px"
        )
        self._figure = LiveFigure()
        self.live = self._figure.widget
        self.slider.observe(
            lambda change: self._figure.replace(self._draw(change.new).rich()), names="value"
        )

    def show(self) -> "AllocatorView":
        """Show the slider, and the static figure under it until the slider moves."""
        display(ipywidgets.VBox([self.slider, self.live]))
        self._figure.show_below(self.picture.rich())
        return self

    def segments_at(self, position: int) -> list[Segment]:
        """Return the segments just after the event at this position."""
        played = self.replay
        player = Player(played.trace, played.budget_bytes, played.expandable_segments)
        for index in played.indices[: position + 1]:
            player.play(index)
        return player.allocator.segments()

    def _name(self, position: int) -> str:
        if position == self.moment:
            return "peak" if self._failed is None else "before it runs out of memory"
        phase = self.replay.trace.events[self.replay.indices[position]].phase
        return f"event {position + 1:,}: {phase}"

    def _draw(self, position: int) -> Picture:
        """Return the curves with this moment marked, and its map."""
        played, segments, name = self.replay, self.segments_at(position), self._name(position)
        allocated, reserved = map(
            format_bytes, (played.peak_allocated_bytes, played.peak_reserved_bytes)
        )
        source = "a model of PyTorch's allocator"
        source += ", expandable segments" * played.expandable_segments
        source += f"; at most {allocated} allocated, {reserved} reserved"
        layout = layout_of([segments])
        heights = [CURVES, ROW * layout[0] + MAPS]
        legend = [
            *map_legend(),
            Patch(label="cached or stranded", **FREE),
            Line2D([], [], color=INK, linewidth=1.4, label="reserved"),
        ]
        figure = Picture(self.title, source, body=sum(heights), legend=legend, columns=3)
        with figure.drawing(2, height_ratios=heights) as (curves, below):
            self._draw_curves(curves)
            curves.axvline(position + 1, color=INK, linewidth=1.8, zorder=7)
            above = {"xycoords": ABOVE, "ha": "center", "weight": "bold"}
            note(curves, "▼", (position + 1, 1), (0, 2), **above)
            draw_map(below, segments, layout, name, WIDTH)
        kind = "Above, curves of allocated and reserved memory, below, a map of segments"
        if played.failure is not None:
            kind += f"; {played.failure}"
        figure.describe(kind, ["", *HEADINGS], [sums_row(name, segments)])
        return figure

    def _draw_curves(self, axes: Axes) -> None:
        played, count = self.replay, len(self.replay.indices)
        rows = [np.array(row) for row in (played.allocated_bytes, played.reserved_bytes)]
        at = np.union1d(*(points_to_draw(row.tolist()) for row in rows))
        edges = np.append(at, count)  # the last event lasts one event, too
        allocated, reserved = (np.append(row[at], row[-1]) for row in rows)
        blue = STYLES[USED]["facecolor"]
        axes.fill_between(edges, 0, allocated, step="post", linewidth=0, facecolor=blue)
        axes.fill_between(edges, allocated, reserved, step="post", **FREE)
        axes.step(edges, allocated, where="post", color=blue, linewidth=1.1)
        axes.step(edges, reserved, where="post", color=INK, linewidth=1.4, zorder=4)
        event_axes(axes, 0, count)
        limit_top(axes, int(reserved.max()), "budget", played.budget_bytes)
        for number, (start, _) in enumerate(played.trace.steps()[:NAMED_STEPS], start=1):
            position = bisect_left(played.indices, start)
            axes.axvline(position, **STEP_LINE)
            note(axes, f"step {number}", (position, 1), (3, -11), xycoords=ABOVE, size=9)
        if self._failed is not None:  # behind it is what would have been needed
            axes.axvspan(self._failed, count, facecolor="white", alpha=0.6, zorder=4.5)
            axes.axvline(self._failed, color=ALARM, linewidth=2, linestyle="--", zorder=7.5)
            text = f"out of memory: asked for {format_bytes(played.failure.requested_bytes)}"
            style = {"ha": "right", "weight": "bold", "color": ALARM, "bbox": PAPER, "zorder": 8}
            note(axes, text, (1, 0), (-6, 8), xycoords="axes fraction", **style)
