"""A map of an allocator's segments: which bytes are used, which are cached, which are stranded.

An allocator reserves memory in segments and cuts them into blocks. A free block in a segment
without any used block is *cached*: ``empty_cache`` can return it, with its segment, to the
driver. A free block beside a used one is *stranded*: it can serve a request that fits into it,
and nothing else. Of an expandable segment whole pages can go back, so there only what shares a page
with a used block is stranded.

Segments are laid end to end and wrapped like the words of a page, so that equal areas are equal
bytes. Where all have one size, each has a row of its own, unless there are too many.

Limits: the edges of what is narrower than a few pixels are left out, and what is
narrower than one blends with its neighbours; the table counts all.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from gpumem.allocator.caching import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES
from gpumem.figures.drawing import EDGE, GREY, INK, WIDTH, Picture, one_line, scale, showing
from gpumem.inputs import InputError
from gpumem.units import format_bytes

Segment = Mapping[str, Any]
"""As PyTorch's: ``blocks``, in the order of their addresses, each with ``size`` and ``state``; an
expandable one says so (``is_expandable``) and has a ``segment_type``, ``small`` or ``large``."""

PAGES = {"small": SMALL_SEGMENT_BYTES, "large": LARGE_SEGMENT_BYTES}
MOST_ROWS, MOST_BLOCKS = 24, 48  # the blocks in one row
COLUMNS = 3
ROW, PANEL = 16, 54  # pixels: a row, and the name and the ticks of a map
NARROW = 5  # pixels: no edges below
USED, CACHED = "used by a tensor", "cached (can be returned)"
STRANDED = "stranded (cannot be returned)"
STYLES = {
    USED: {"facecolor": "#0072B2", "hatch": ""},
    CACHED: {"facecolor": "#DADADA", "hatch": ""},
    STRANDED: {"facecolor": "#E69F00", "hatch": "////"},
}
HEADINGS = ("segments", "used", "cached", "stranded", "reserved", "largest free block")


def sums(segments: Sequence[Segment]) -> dict[str, int]:
    """Return the bytes used, cached, stranded and reserved, and those of the largest free block."""
    totals = dict.fromkeys(STYLES, 0)
    free = [0]
    for segment in segments:
        for kind, nbytes in _kinds(segment):
            totals[kind] += nbytes
        free += [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
    amounts = (*totals.values(), sum(totals.values()), max(free))
    return dict(zip(HEADINGS[1:], amounts, strict=True))


def _kinds(segment: Segment) -> list[tuple[str, int]]:
    """Return kind and bytes of each block. One that waits for its stream still counts as used."""
    blocks = [(block["size"], block["state"] != "inactive") for block in segment["blocks"]]
    if segment.get("is_expandable"):
        return _kinds_in_pages(blocks, PAGES[segment["segment_type"]])
    free = STRANDED if any(used for _, used in blocks) else CACHED
    return [(USED if used else free, nbytes) for nbytes, used in blocks]


def _kinds_in_pages(blocks: list[tuple[int, bool]], page_bytes: int) -> list[tuple[str, int]]:
    """Return the same for whole pages: of a free block they are cached, the rest is stranded.

    Mapped memory begins where a page does.
    """
    found, offset = [], 0
    for nbytes, used in blocks:
        end = offset + nbytes
        start, stop = -(-offset // page_bytes) * page_bytes, end // page_bytes * page_bytes
        if used:
            found.append((USED, nbytes))
        elif start >= stop:
            found.append((STRANDED, nbytes))
        else:
            parts = ((STRANDED, start - offset), (CACHED, stop - start), (STRANDED, end - stop))
            found += [part for part in parts if part[1]]
        offset = end
    return found


def _size(segment: Segment) -> int:
    return sum(block["size"] for block in segment["blocks"])


def layout_of(maps: Collection[Sequence[Segment]]) -> tuple[int, int]:
    """Return how many rows suit all of ``maps``, and how many bytes each row has.

    A row is as long as the longest segment; where that gives too many rows, or one has too many
    blocks for it, some power of two times as long.
    """
    segments = [segment for each in maps for segment in each]
    crowded = any(len(segment["blocks"]) > MOST_BLOCKS for segment in segments)
    row_bytes = 1 if crowded else max(map(_size, segments), default=1)
    total = max(sum(map(_size, each)) for each in maps)
    while row_bytes * MOST_ROWS < total:
        row_bytes *= 2
    return max(1, -(-total // row_bytes)), row_bytes


def draw_segment_map(
    maps: Mapping[str, Sequence[Segment]], *, title: str = "Segments", source: str = ""
) -> Picture:
    """Draw one or more maps of segments side by side, with their sums in a table beneath.

    Args:
        maps: for each moment's name the segments at that moment, as
            ``torch.cuda.memory_snapshot()`` or a snapshot's ``["segments"]`` lists them.
        title: what the figure shows.
        source: where it comes from.

    Raises:
        InputError: there are no maps.
    """
    if not maps:
        raise InputError("there is no map to draw: pass {'name': segments}")
    layout = layout_of(maps.values())
    columns = min(COLUMNS, len(maps))
    rows = -(-len(maps) // columns)
    height = rows * (PANEL + ROW * layout[0])
    found = {kind for each in maps.values() for segment in each for kind, _ in _kinds(segment)}
    legend = [Patch(label=kind, **EDGE, **STYLES[kind]) for kind in STYLES if kind in found]
    figure = Picture(title, source, body=height, legend=legend)
    with figure.drawing(rows, columns, squeeze=False) as panels:
        for axes, (name, segments) in zip(panels.flat, maps.items(), strict=False):
            _draw_map(axes, segments, layout, one_line(name, 34), WIDTH / columns)
        for axes in panels.flat[len(maps) :]:
            axes.set_axis_off()
    table = []
    for name, segments in maps.items():
        table.append([name, str(len(segments)), *map(format_bytes, sums(segments).values())])
    figure.describe("Maps of segments", ["", *HEADINGS], table)
    return figure


segment_map = showing(draw_segment_map)


def _draw_map(
    axes: Axes, segments: Sequence[Segment], layout: tuple[int, int], name: str, width: float
) -> None:
    """Draw one map, some ``width`` pixels wide, its rows from the top down."""
    rows, row_bytes = layout
    blocks: dict[str | None, list[tuple[int, int]]] = defaultdict(list)
    offset = 0
    for segment in segments:
        blocks[None].append((offset, _size(segment)))  # its outline
        for kind, nbytes in _kinds(segment):
            blocks[kind].append((offset, nbytes))
            offset += nbytes
    narrow_bytes = NARROW * row_bytes / width
    for kind, ranges in blocks.items():
        style = STYLES[kind] if kind else {"facecolor": "none", "zorder": 2}
        for row in range(rows):
            shifted = [(start - row * row_bytes, nbytes) for start, nbytes in ranges]
            inside = [(x, n) for x, n in shifted if x < row_bytes and x + n > 0]  # clipped
            line = 0.6 if kind else 1.6  # a segment's outline is told from a block's edge
            widths = [0 if nbytes < narrow_bytes else line for _, nbytes in inside]
            edge = {"edgecolor": INK, "linewidth": widths}
            axes.broken_barh(inside, (row - 0.39, 0.78), **edge, **style)
    if not segments:
        axes.text(0.5, 0.5, "no segment", transform=axes.transAxes, ha="center", color=GREY)
    axes.set_title(name, loc="left", weight="bold", size=10)
    axes.set_xlim(0, row_bytes)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_yticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    scale(axes.xaxis, format_bytes, max(2, round(width / 140)))
    axes.tick_params(labelsize=9.5)
