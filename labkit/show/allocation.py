"""The allocator over time: what it holds after every event, and its map at a moment you choose.

Tensors come and go; the caching allocator keeps what it once reserved. The upper figure shows
both, the lower one which bytes lie where; a slider moves through the run.

Only the widgets that ipywidgets 7.7.1 and 8 share are used. Without a frontend there is a still
picture: the peak, or the moment before the request that fails, and the end of that step.

Limits: `labkit.replays` follows a model of PyTorch's allocator on one stream, so for a measured run
this is what the model makes of its events. The slider stops at some fifty events, not at each. The
curves of a long run are envelopes: of each stretch narrower than a pixel, its highest point.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ipywidgets
import matplotlib as mpl
import numpy as np
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from labkit.memory import InputError, Run, format_bytes
from labkit.replays import Player, Replay, replay
from labkit.show.picture import (
    ALARM,
    EDGE,
    GREY,
    INK,
    STYLE,
    WIDTH,
    Picture,
    byte_ticks,
    legend,
    one_line,
    place,
    text_width,
    write_title,
)
from labkit.show.rich import Rich
from labkit.show.segments import (
    CACHED,
    HEAD,
    LOOKS,
    ROW,
    USED,
    Layout,
    Segment,
    draw_map,
    layout_of,
    scale_note,
    sums,
    sums_table,
)

GRID, BUCKETS = 48, 1500
FIRST_STEPS = 3  # whose ends have names, as have the last one's and that of the still picture
TOP, CURVES, GAP = 106, 210, 54  # pixels: above the curves, their height, and below
LEFT, RIGHT = 84, 20
FREE = {"facecolor": LOOKS[CACHED]["facecolor"], "edgecolor": "#8A5300",
        "hatch": "////", "linewidth": 0}  # fmt: skip


def segments(run: Run | Replay, *, title: str | None = None) -> "AllocatorView":
    """Show what the caching allocator holds over a run, with a slider through its segments.

    Args:
        run: a run with a trace, replayed in its device's capacity; or what ``labkit.replay``
            gave, for another budget or for expandable segments.
        title: what the figure shows; None: "The allocator, event by event: <name>".

    Returns:
        The view, already shown. Its ``picture`` is the still one.

    Raises:
        InputError: it is neither, has no trace, or nothing was allocated.
    """
    return AllocatorView(_story(run, title)).show()


# --- what is shown: the replay, and the moments the slider stops at ------------------------------


class Moment(NamedTuple):
    """A stop of the slider: just after event ``position`` of the replay, -1 before the first.

    ``named`` tells the stops with a name of their own (a peak, an end) from the rest. Of the
    blocks in ``segments`` only sizes and states are kept.
    """

    position: int
    name: str
    named: bool
    segments: list[Segment]


@dataclass(frozen=True)
class Story:
    """A replay with its moments in order, and where the request stands that fails (or None)."""

    replay: Replay
    title: str
    source: str
    moments: tuple[Moment, ...]
    layout: Layout
    failure_position: int | None

    def still(self) -> list[Moment]:
        """The peak, or the moment before the failure; and the end of that step."""
        shown = _still_positions(self.replay, self.failure_position)
        return [moment for moment in self.moments if moment.position in shown]


def _story(run: Run | Replay, title: str | None) -> Story:
    name, source = "", ""
    if isinstance(run, Run):
        if run.trace is None:
            raise InputError(
                f"the run {run.name!r} has no trace, so it cannot be replayed (a run read back "
                "from a file has none; measure with track=True)"
            )
        name, source = f": {run.name}", f"{run.label}, "
        run = replay(run.trace, budget_bytes=run.capacity_bytes)
    if not isinstance(run, Replay):
        raise InputError(f"segments needs a run or a replay, not {type(run).__name__}")
    if not run.peak_allocated_bytes:
        raise InputError(f"nothing was allocated on {run.device}: there are no segments")
    failed = None
    if run.failure is not None:  # from here on the replay goes on without a budget
        failed = next(i for i, n in enumerate(run.reserved_bytes) if n > run.budget_bytes)
    source += "replayed by a model of PyTorch's allocator"
    source += ", expandable segments" * run.expandable_segments
    moments = _moments(run, failed)
    layout = layout_of(moment.segments for moment in moments)
    title = title or f"The allocator, event by event{name}"
    return Story(run, title, source, moments, layout, failed)


def _peak_position(played: Replay) -> int:
    return int(np.argmax(played.allocated_bytes))


def _still_positions(played: Replay, failed: int | None) -> tuple[int, int]:
    first = _peak_position(played) if failed is None else failed - 1
    index = played.indices[first if failed is None else failed]
    stops = [stop for start, stop in played.trace.steps() if start <= index < stop]
    return first, _last_before(played, stops[0]) if stops else len(played.indices) - 1


def _last_before(played: Replay, index: int) -> int:
    """The position of the last event on the device before event ``index`` of the trace."""
    return bisect_left(played.indices, index) - 1


def _moments(played: Replay, failed: int | None) -> tuple[Moment, ...]:
    """The named moments and a grid between them."""
    count = len(played.indices)
    names: dict[int, list[str]] = {}

    def name(position: int, text: str) -> None:
        late = failed is not None and position >= failed
        names.setdefault(position, []).append(f"{text}, had it fitted" if late else text)

    steps = played.trace.steps()
    if steps:
        name(_last_before(played, steps[0][0]), "before step 1")
    else:
        name(count - 1, "end")
    shown = _still_positions(played, failed)
    for number, (_, stop) in enumerate(steps, start=1):
        position = _last_before(played, stop)
        if number <= FIRST_STEPS or number == len(steps) or position in shown:
            name(position, f"end of step {number}")
    name(_peak_position(played), "peak")
    if failed is not None:
        names[failed - 1] = ["before it runs out of memory"]
    grid = {int(position) for position in np.linspace(0, count - 1, GRID)}
    stops = sorted(names.keys() | grid)
    maps = _maps(played, stops)
    return tuple(
        Moment(stop, ", ".join(names[stop]) if stop in names else _where(played, stop),
               stop in names, found)
        for stop, found in zip(stops, maps, strict=True)
    )  # fmt: skip


def _where(played: Replay, position: int) -> str:
    index = played.indices[position]
    step = sum(start <= index for start, _ in played.trace.steps())
    phase = played.trace.events[index].phase
    return f"event {position + 1:,}: {f'step {step}, ' if step else ''}{phase}"


def _maps(played: Replay, stops: Sequence[int]) -> list[list[Segment]]:
    """The segments at each of ``stops``, in one replay. Equal blocks are one object."""
    player = Player(played.trace, played.budget_bytes, played.expandable_segments)
    known: dict[tuple[int, str], Segment] = {}
    maps, done = [], 0
    for stop in stops:
        for index in played.indices[done : stop + 1]:
            player.play(index)
        done = stop + 1
        maps.append([
            {**segment,
             "blocks": [known.setdefault((b["size"], b["state"]),
                                         {"size": b["size"], "state": b["state"]})
                        for b in segment["blocks"]]}
            for segment in player.allocator.segments()
        ])  # fmt: skip
    return maps


# --- the widgets ---------------------------------------------------------------------------------


class AllocatorView:
    """What ``segments`` shows.

    Attributes:
        story: the replay and the moments at which the slider stops.
        slider: a SelectionSlider over the moments' positions.
        buttons: one for each named moment; a click moves the slider there.
        live: an HTML widget with the figure of the chosen moment, empty before the first move.
        picture: the figure that shows where nobody can move the slider.
    """

    def __init__(self, story: Story) -> None:
        self.story = story
        self._at = {moment.position: moment for moment in story.moments}
        self.picture = draw(story, story.still())
        self.slider = ipywidgets.SelectionSlider(
            options=[(moment.name, moment.position) for moment in story.moments],
            value=story.still()[0].position,
            description="moment",
            continuous_update=False,
            layout={"width": "auto", "max_width": f"{WIDTH}px"},
        )
        self.slider.tooltip = "moment"  # without one, ipywidgets 8 shows the word "null"
        self.buttons = [self._button(moment) for moment in story.moments if moment.named]
        self.live = ipywidgets.HTML(layout={"display": "block", "overflow": "auto"})
        row = ipywidgets.HBox(self.buttons, layout={"flex_flow": "row wrap"})
        self.widget = ipywidgets.VBox([self.slider, row, self.live])
        self.slider.observe(lambda _: self._draw(), names="value")
        self._still: Any = None  # the picture outside the widgets, until the first move

    def show(self) -> "AllocatorView":
        """Show the controls, and the still picture under them until the slider moves."""
        display(self.widget)
        self._still = display(self.picture.rich(), display_id=True)
        return self

    def _ipython_display_(self) -> None:
        """Nothing: ``segments`` has shown it."""

    def _draw(self) -> None:
        self.live.value = draw(self.story, [self._at[self.slider.value]]).rich().html
        if self._still is not None:
            self._still.update(Rich("", ""))
            self._still = None

    def _button(self, moment: Moment) -> ipywidgets.Button:
        button = ipywidgets.Button(description=moment.name, layout={"width": "auto"})

        def clicked(_: Any) -> None:
            if self.slider.value == moment.position:  # no move, so the slider reports none
                self._draw()
            self.slider.value = moment.position

        button.on_click(clicked)
        return button


# --- drawing -------------------------------------------------------------------------------------


def draw(story: Story, chosen: Sequence[Moment]) -> Picture:
    """The curves with the ``chosen`` moments marked, the map of each, and all sums in a table."""
    layout = story.layout
    names = {m.position: f"{n}  {m.name}" if len(chosen) > 1 else m.name
             for n, m in enumerate(chosen, start=1)}  # fmt: skip
    with mpl.rc_context(STYLE):
        figure = Picture(TOP + CURVES + GAP + HEAD + ROW * layout.rows + 32)
        note = scale_note(layout)
        write_title(figure, story.title, story.source + (f"; below, {note}" if note else ""))
        _legend(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        below = figure.get_figheight() * figure.dpi - TOP - CURVES
        place(figure, axes, left=LEFT, right=RIGHT, top=TOP, bottom=below)
        _draw_curves(axes, story)
        _mark_failure(figure, axes, story)
        _mark_moments(axes, chosen)
        width = (WIDTH - 32 - 22 * (len(chosen) - 1)) / len(chosen)
        for number, moment in enumerate(chosen):
            draw_map(figure, moment.segments, layout, name=one_line(names[moment.position], 90),
                     left=16 + number * (width + 22), width=width,
                     top=TOP + CURVES + GAP + HEAD)  # fmt: skip
    listed = [m for m in story.moments if m.named or m in chosen]
    figure.table = sums_table({m.name: m.segments for m in listed}, _caption(story))
    figure.alt = _alt(story, chosen)
    return figure


def _legend(figure: Picture) -> None:
    handles = [Patch(**EDGE, **look) for look in LOOKS.values()]
    handles += [Patch(**FREE), Line2D([], [], color=INK, linewidth=1.4)]
    names = ["used by a tensor", "cached", "stranded", "cached or stranded", "reserved"]
    legend(figure, handles, names, ncols=len(names))


def _draw_curves(axes: Axes, story: Story) -> None:
    played, count = story.replay, len(story.replay.indices)
    at = np.unique(np.linspace(0, count, BUCKETS + 1).astype(int)[:-1])
    allocated, reserved = (
        np.append(highest, highest[-1])  # the last event lasts one event, too
        for highest in (np.maximum.reduceat(np.array(n, dtype=np.int64), at)
                        for n in (played.allocated_bytes, played.reserved_bytes))
    )  # fmt: skip
    at = np.append(at, count)
    axes.fill_between(at, 0, allocated, step="post", linewidth=0,
                      facecolor=LOOKS[USED]["facecolor"])  # fmt: skip
    axes.fill_between(at, allocated, reserved, step="post", **FREE)
    axes.step(at, allocated, where="post", color=LOOKS[USED]["facecolor"], linewidth=1.1)
    axes.step(at, reserved, where="post", color=INK, linewidth=1.4, zorder=4)
    top = 1.22 * int(reserved.max())
    if played.budget_bytes and played.budget_bytes < top:
        top = max(top, 1.15 * played.budget_bytes)
        axes.axhline(played.budget_bytes, color=INK, linewidth=1.6, linestyle=(0, (5, 2)), zorder=5)
        axes.annotate(f"budget {format_bytes(played.budget_bytes)}", (1, played.budget_bytes),
                      xycoords=axes.get_yaxis_transform(), xytext=(-5, 4), ha="right",
                      textcoords="offset points", size=9.5, zorder=6,
                      bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none",
                            "pad": 1})  # fmt: skip
    axes.set_xlim(0, count)
    axes.set_ylim(0, top)
    byte_ticks(axes.yaxis, top, 6)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel("allocations and frees, in order", size=9.5)
    axes.tick_params(length=0, pad=5, labelsize=9.5)
    axes.grid(axis="y")
    for number, (start, _) in enumerate(played.trace.steps()[:12], start=1):
        position = bisect_left(played.indices, start)
        axes.axvline(position, color=GREY, linewidth=1, linestyle=(0, (2, 2)), zorder=5)
        axes.annotate(f"step {number}", (position, 1), xycoords=axes.get_xaxis_transform(),
                      xytext=(3, -11), textcoords="offset points", size=9, color=GREY)  # fmt: skip


def _mark_failure(figure: Picture, axes: Axes, story: Story) -> None:
    """The request that fails; what comes after it is only what would have been needed."""
    if story.failure_position is None:
        return
    at, failure = story.failure_position, story.replay.failure
    axes.axvspan(at, len(story.replay.indices), facecolor="white", alpha=0.6, zorder=4.5)
    axes.axvline(at, color=ALARM, linewidth=2, linestyle=(0, (3, 1.5)), zorder=7.5)
    words = f"out of memory: asked for {format_bytes(failure.requested_bytes)}"
    top = axes.get_ylim()[1]
    text = axes.text(at, 0.06 * top, words, size=9.5, weight="bold", color=ALARM, zorder=8)
    text.set_bbox({"facecolor": "white", "alpha": 0.9, "edgecolor": "none", "pad": 2})
    pixel = len(story.replay.indices) / (WIDTH - LEFT - RIGHT)
    left = at + 7 * pixel
    if left + text_width(figure, text) * pixel > len(story.replay.indices):
        text.set_ha("right")
        left = at - 7 * pixel
    text.set_x(left)


def _mark_moments(axes: Axes, chosen: Sequence[Moment]) -> None:
    for number, moment in enumerate(chosen, start=1):
        axes.axvline(moment.position + 1, color=INK, linewidth=1.8, zorder=7)
        mark = str(number) if len(chosen) > 1 else "▼"
        axes.annotate(mark, (moment.position + 1, 1), xycoords=axes.get_xaxis_transform(),
                      xytext=(0, 2), textcoords="offset points", ha="center", size=10,
                      weight="bold", annotation_clip=False)  # fmt: skip


# --- the words -----------------------------------------------------------------------------------


def _caption(story: Story) -> str:
    played = story.replay
    parts = [f"{story.title}; {story.source}"]
    if played.budget_bytes:
        parts.append(f"budget {format_bytes(played.budget_bytes)}")
    if played.failure is not None:
        parts.append(str(played.failure))
    return "; ".join(parts) + "."


def _alt(story: Story, chosen: Sequence[Moment]) -> str:
    played = story.replay
    parts = []
    for moment in chosen:
        found = sums(moment.segments)
        parts.append(
            f"{moment.name}: {len(moment.segments)} segments, {format_bytes(found.used_bytes)} "
            f"used, {format_bytes(found.cached_bytes)} cached, "
            f"{format_bytes(found.stranded_bytes)} stranded"
        )
    return (
        f"Above, curves of allocated and reserved memory: at most "
        f"{format_bytes(played.peak_allocated_bytes)} and "
        f"{format_bytes(played.peak_reserved_bytes)}. Below, maps of segments. "
        f"{_caption(story)} {'; '.join(parts)}. The table below holds the same numbers."
    )
