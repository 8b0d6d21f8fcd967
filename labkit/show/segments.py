"""A map of an allocator's segments: which bytes are used, which are cached, which are stranded.

An allocator reserves memory in segments and cuts them into blocks. A free block in a segment
without any used block is *cached*: ``empty_cache`` can return it, with its segment, to the
driver. A free block beside a used one is *stranded*: it can serve a request that fits into it,
and nothing else. Of an expandable segment whole pages can go back, so there only what shares a page
with a used block is stranded.

A few segments are drawn one to a row. Many, or very crowded ones, are laid end to end and wrapped
like the words of a page, so that equal areas are equal bytes.

Limits: on such a page the edges of what is narrower than a few pixels are left out, and what is
narrower than one blends with its neighbours; the table counts all.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from labkit.allocator import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES
from labkit.memory import InputError, format_bytes
from labkit.show.picture import (
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
    short,
    write_title,
)
from labkit.show.rich import Rich, grid

Segment = Mapping[str, Any]
"""As PyTorch's: ``blocks``, in the order of their addresses, each with ``size`` and ``state``; an
expandable one says so (``is_expandable``) and has a ``segment_type``, ``small`` or ``large``."""

PAGES = {"small": SMALL_SEGMENT_BYTES, "large": LARGE_SEGMENT_BYTES}
MOST_ROWS, MOST_BLOCKS = 24, 48  # more segments, or more blocks in one, fill a page
COLUMNS = 3
ROW, HEAD = 16, 30  # pixels: a row, and the name above a panel
NARROW = 5  # pixels: no edges below
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
    for segment in segments:
        for kind, nbytes in _kinds(segment):
            totals[kind] += nbytes
    blocks = (block for segment in segments for block in segment["blocks"])
    free = (block["size"] for block in blocks if block["state"] == "inactive")
    return Sums(*totals.values(), max(free, default=0))


def _kinds(segment: Segment) -> list[tuple[str, int]]:
    """Kind and bytes of each block. A block that waits for its stream still counts as used."""
    blocks = [(block["size"], block["state"] != "inactive") for block in segment["blocks"]]
    if segment.get("is_expandable"):
        page_bytes = PAGES[segment["segment_type"]]
        return _kinds_in_pages(blocks, page_bytes)
    free = STRANDED if any(used for _, used in blocks) else CACHED
    return [(USED if used else free, nbytes) for nbytes, used in blocks]


def _kinds_in_pages(blocks: list[tuple[int, bool]], page_bytes: int) -> list[tuple[str, int]]:
    """Of a free block the whole pages are cached. Mapped memory begins where a page does."""
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


class Layout(NamedTuple):
    """How maps are laid out, so that all of them share one scale.

    Rows of ``row_bytes``; on a ``page`` the segments follow each other from row to row, else each
    has a row of its own.
    """

    rows: int
    row_bytes: int
    page: bool


def layout_of(maps: Iterable[Sequence[Segment]]) -> Layout:
    """The layout that suits all of ``maps``."""
    maps = list(maps)
    most = max(map(len, maps), default=0)
    blocks = max((len(segment["blocks"]) for segments in maps for segment in segments), default=0)
    if most <= MOST_ROWS and blocks <= MOST_BLOCKS:
        widest = max((_size(segment) for segments in maps for segment in segments), default=1)
        return Layout(max(1, most), widest, page=False)
    total = max(sum(map(_size, segments)) for segments in maps)
    row_bytes = next(
        step for k in range(80) for step in (1 << k, 3 << k - 1 if k else 1)
        if step * MOST_ROWS >= total
    )  # fmt: skip
    return Layout(-(-total // row_bytes), row_bytes, page=True)


class Piece(NamedTuple):
    """``nbytes`` of one kind, ``start`` bytes into a row. ``kind`` is None for a segment."""

    kind: str | None
    row: int
    start: int
    nbytes: int


def pieces(segments: Sequence[Segment], layout: Layout) -> list[Piece]:
    """Every block and every segment where it is drawn, cut where a row ends."""
    found, offset = [], 0
    for number, segment in enumerate(segments):
        if not layout.page:
            offset = number * layout.row_bytes
        found += _cut(None, offset, _size(segment), layout.row_bytes)
        for kind, nbytes in _kinds(segment):
            found += _cut(kind, offset, nbytes, layout.row_bytes)
            offset += nbytes
    return found


def _cut(kind: str | None, offset: int, nbytes: int, row_bytes: int) -> list[Piece]:
    found = []
    while nbytes:
        row, start = divmod(offset, row_bytes)
        here = min(nbytes, row_bytes - start)
        found.append(Piece(kind, row, start, here))
        offset, nbytes = offset + here, nbytes - here
    return found


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
    check_maps(maps)
    layout = layout_of(maps.values())
    columns = min(COLUMNS, len(maps))
    rows = -(-len(maps) // columns)
    top, panel = 92, HEAD + ROW * layout.rows
    with mpl.rc_context(STYLE):
        figure = Picture(top + rows * (panel + 8) + 24)
        write_title(figure, title, "; ".join(filter(None, [source, scale_note(layout)])))
        map_legend(figure)
        width = (WIDTH - 32 - 22 * (columns - 1)) / columns
        for number, (name, segments) in enumerate(maps.items()):
            row, column = divmod(number, columns)
            left, above = 16 + column * (width + 22), top + row * (panel + 8) + HEAD
            last = number + columns >= len(maps)
            draw_map(figure, segments, layout, name=one_line(name, 34), left=left, width=width,
                     top=above, ticks=last)  # fmt: skip
    figure.table = sums_table(maps, "; ".join(filter(None, [title, source])) + ".")
    figure.alt = _alt(title, source, maps)
    return figure.show()


def check_maps(maps: Mapping[str, Sequence[Segment]]) -> None:
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


def scale_note(layout: Layout) -> str:
    """What a reader of a page has to know; nothing where each segment has its row."""
    return f"one row is {short(format_bytes(layout.row_bytes))}" if layout.page else ""


def map_legend(figure: Picture, *, top: int = 54) -> None:
    """The three kinds, ``top`` pixels down."""
    patches = [Patch(**EDGE, **look) for look in LOOKS.values()]
    legend(figure, patches, list(LOOKS), ncols=3, top=top)


def draw_map(
    figure: Picture,
    segments: Sequence[Segment],
    layout: Layout,
    *,
    name: str,
    left: float,
    width: float,
    top: float,
    ticks: bool = True,
) -> Axes:
    """Draw one map, its upper left corner ``left`` and ``top`` pixels into the figure."""
    axes = figure.add_axes((0, 0, 1, 1))
    bottom = figure.get_figheight() * figure.dpi - top - ROW * layout.rows
    place(figure, axes, left=left, right=WIDTH - left - width, top=top, bottom=bottom)
    drawn = pieces(segments, layout)
    narrow_bytes = NARROW * layout.row_bytes / width
    for kind, look in LOOKS.items():
        for wide in (False, True):
            edge = {**EDGE, "linewidth": EDGE["linewidth"] if wide else 0}
            _add(axes, drawn, kind, wide, narrow_bytes, zorder=1, **look, **edge)
    _add(axes, drawn, None, True, narrow_bytes,
         facecolor="none", edgecolor=INK, linewidth=0.7, zorder=2)  # fmt: skip
    if not segments:
        axes.text(0.5, 0.5, "no segment", transform=axes.transAxes, ha="center", color=GREY)
    axes.text(0, 1.02, name, transform=axes.transAxes, va="bottom", weight="bold", size=10)
    axes.set_xlim(0, layout.row_bytes * 1.005)
    axes.set_ylim(layout.rows - 0.4, -0.6)
    axes.yaxis.set_major_locator(NullLocator())
    axes.spines[["left", "bottom"]].set_visible(False)
    byte_ticks(axes.xaxis, layout.row_bytes, max(2, width / 140))
    axes.tick_params(length=0, pad=3, labelbottom=ticks, labelsize=9.5)
    if ticks:
        labels = axes.get_xticklabels()
        labels[-1].set_ha("right")  # it may stand at the edge, where it would be cut
        labels[0].set_ha("left")
    return axes


def _add(
    axes: Axes, drawn: list[Piece], kind: str | None, wide: bool, narrow_bytes: float, **style: Any
) -> None:
    corners = [
        ((p.start, p.row - 0.39), (p.start, p.row + 0.39),
         (p.start + p.nbytes, p.row + 0.39), (p.start + p.nbytes, p.row - 0.39))
        for p in drawn
        if p.kind == kind and (p.nbytes >= narrow_bytes) == wide
    ]  # fmt: skip
    if corners:
        axes.add_collection(PolyCollection(corners, **style), autolim=False)


def sums_table(maps: Mapping[str, Sequence[Segment]], caption: str) -> Rich:
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
        f"Maps of segments. {title}{where}. {'; '.join(parts)}. "
        "The table below holds the same numbers."
    )
