"""A map of an allocator's segments: which bytes are used, which are cached, which are stranded.

An allocator reserves memory in segments and cuts them into blocks. A free block in a segment
without any used block is *cached*: ``empty_cache`` can return it, with its segment, to the
driver. A free block beside a used one is *stranded*: it can serve a request that fits into it,
and nothing else.

Limits: made for a few dozen segments; of more, the largest are drawn and the table counts all.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from labkit.memory import InputError, format_bytes
from labkit.show.picture import (
    GREY,
    INK,
    STYLE,
    WIDTH,
    Picture,
    byte_ticks,
    legend,
    one_line,
    place,
    write_title,
)
from labkit.show.rich import Rich, grid

Segment = Mapping[str, Any]
"""As PyTorch's: ``blocks``, in the order of their addresses, each with ``size`` and ``state``."""

MOST_DRAWN = 24
COLUMNS = 3
ROW, HEAD = 16, 30  # pixels: a strip, and the name above a panel
LOOKS = {
    "used by a tensor": {"facecolor": "#0072B2", "hatch": ""},
    "cached (can be returned)": {"facecolor": "#DADADA", "hatch": ""},
    "stranded (cannot)": {"facecolor": "#E69F00", "hatch": "////"},
}
USED, CACHED, STRANDED = LOOKS


class Sums(NamedTuple):
    """Bytes of each kind, and the largest free block."""

    used_bytes: int
    cached_bytes: int
    stranded_bytes: int
    largest_free_bytes: int

    @property
    def reserved_bytes(self) -> int:
        return self.used_bytes + self.cached_bytes + self.stranded_bytes


def sums(segments: Sequence[Segment]) -> Sums:
    """What the segments hold, by kind."""
    totals = dict.fromkeys(LOOKS, 0)
    largest = 0
    for segment in segments:
        for kind, nbytes in _kinds(segment):
            totals[kind] += nbytes
            largest = largest if kind == USED else max(largest, nbytes)
    return Sums(*totals.values(), largest)


def _kinds(segment: Segment) -> list[tuple[str, int]]:
    """Kind and bytes of each block. A block that waits for its stream still counts as used."""
    blocks = [(block["size"], block["state"] != "inactive") for block in segment["blocks"]]
    free = STRANDED if any(used for _, used in blocks) else CACHED
    return [(USED if used else free, nbytes) for nbytes, used in blocks]


def _size(segment: Segment) -> int:
    return sum(block["size"] for block in segment["blocks"])


def segment_map(
    maps: Mapping[str, Sequence[Segment]], *, title: str = "Segments", source: str = ""
) -> Picture:
    """Show one or more maps of segments side by side, with their sums in a table beneath.

    Args:
        maps: for each moment's name the segments at that moment, as
            ``torch.cuda.memory_snapshot()`` or a snapshot's ``["segments"]`` lists them.
        title: what the figure shows.
        source: where it comes from.

    Returns:
        The figure, already shown.

    Raises:
        InputError: there are no maps, or something in them is not a segment.
    """
    _check(maps)
    drawn = {name: _largest(segments) for name, segments in maps.items()}
    widest = max((_size(s) for m in drawn.values() for s in m), default=1)
    strips = max(1, *map(len, drawn.values()))
    columns = min(COLUMNS, len(maps))
    rows = -(-len(maps) // columns)
    top, panel = 92, HEAD + ROW * strips
    with mpl.rc_context(STYLE):
        figure = Picture(top + rows * (panel + 8) + 24)
        write_title(figure, title, source)
        patches = [Patch(edgecolor=(1, 1, 1, 0.8), **look) for look in LOOKS.values()]
        legend(figure, patches, list(LOOKS), ncols=3)
        width = (WIDTH - 32 - 22 * (columns - 1)) / columns
        for number, (name, segments) in enumerate(drawn.items()):
            row, column = divmod(number, columns)
            left, above = 16 + column * (width + 22), top + row * (panel + 8) + HEAD
            below = figure.get_figheight() * figure.dpi - above - ROW * strips
            axes = figure.add_axes((0, 0, 1, 1))
            place(figure, axes, left=left, right=WIDTH - left - width, top=above, bottom=below)
            last = number + columns >= len(maps)
            _draw(axes, segments, one_line(name, 34), widest, strips, ticks=last)
            if hidden := len(maps[name]) - len(segments):
                axes.text(1, 1.02, f"+ {hidden} smaller", transform=axes.transAxes, ha="right",
                          va="bottom", size=9, color=GREY)  # fmt: skip
    figure.table = _table(maps, "; ".join(filter(None, [title, source])) + ".")
    figure.alt = _alt(title, source, maps)
    return figure.show()


def _check(maps: Mapping[str, Sequence[Segment]]) -> None:
    if not maps:
        raise InputError("there is no map to draw: pass {'name': segments}")
    for segments in maps.values():
        for segment in segments:
            try:
                sizes = [block["size"] for block in segment["blocks"] if block["state"]]
            except (KeyError, TypeError) as error:
                raise InputError(
                    "a segment has 'blocks', each with 'size' and 'state', as "
                    "torch.cuda.memory_snapshot() gives them"
                ) from error
            for nbytes in sizes:
                if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes <= 0:
                    raise InputError(
                        f"a block has a positive whole number of bytes, not {nbytes!r}"
                    )


def _largest(segments: Sequence[Segment]) -> list[Segment]:
    """The segments to draw, in the order they came."""
    sizes = [_size(segment) for segment in segments]
    chosen = sorted(range(len(sizes)), key=lambda i: -sizes[i])[:MOST_DRAWN]
    return [segments[i] for i in sorted(chosen)]


def _draw(
    axes: Axes, segments: Sequence[Segment], name: str, widest: int, strips: int, *, ticks: bool
) -> None:
    for y, segment in enumerate(segments):
        start = 0
        for kind, nbytes in _kinds(segment):
            look = LOOKS[kind]
            axes.barh(y, nbytes, left=start, height=0.78, edgecolor="white", linewidth=0.8, **look)
            start += nbytes
        axes.barh(y, start, height=0.78, facecolor="none", edgecolor=INK, linewidth=0.7)
    if not segments:
        axes.text(0.5, 0.5, "no segment", transform=axes.transAxes, ha="center", color=GREY)
    axes.text(0, 1.02, name, transform=axes.transAxes, va="bottom", weight="bold", size=10)
    axes.set_xlim(0, widest * 1.005)
    axes.set_ylim(strips - 0.4, -0.6)
    axes.yaxis.set_major_locator(NullLocator())
    axes.spines[["left", "bottom"]].set_visible(False)
    byte_ticks(axes.xaxis, widest, max(2, axes.get_position().width * WIDTH / 140))
    axes.tick_params(length=0, pad=3, labelbottom=ticks, labelsize=9.5)
    if ticks:
        labels = axes.get_xticklabels()
        labels[-1].set_ha("right")  # it may stand at the edge, where it would be cut
        labels[0].set_ha("left")


def _table(maps: Mapping[str, Sequence[Segment]], caption: str) -> Rich:
    rows = []
    for name, segments in maps.items():
        found = sums(segments)
        amounts = (
            found.used_bytes, found.cached_bytes, found.stranded_bytes, found.reserved_bytes,
            found.largest_free_bytes,
        )  # fmt: skip
        rows.append([name, str(len(segments)), *map(format_bytes, amounts)])
    headings = ["", "segments", "used", "cached", "stranded", "reserved", "largest free block"]
    return grid(headings, rows, caption=caption)


def _alt(title: str, source: str, maps: Mapping[str, Sequence[Segment]]) -> str:
    parts = []
    for name, segments in maps.items():
        found = sums(segments)
        parts.append(
            f"{name}: {len(segments)} segments, {format_bytes(found.used_bytes)} used, "
            f"{format_bytes(found.cached_bytes)} cached, "
            f"{format_bytes(found.stranded_bytes)} stranded"
        )
    where = f", {source}" if source else ""
    return (
        f"Strips, one per segment. {title}{where}. {'; '.join(parts)}. "
        "The table below holds the same numbers."
    )
