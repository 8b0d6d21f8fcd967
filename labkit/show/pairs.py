"""The formula that everybody uses beside the trace: two bars for each pair, and tables.

- ``side_by_side(pairs)``: what the formula adds up beside what the trace holds at its peak.
- ``part_table(pair)``: the same part by part, each at its own highest moment too.

Limits: bars are to scale, so beside a pair a thousand times larger a small one is a hairline.
"""

from collections.abc import Mapping
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from labkit.catalogue import Gpu, gpu
from labkit.estimates import Estimate
from labkit.formula import Envelope, Part, Row
from labkit.memory import Category, InputError, format_bytes
from labkit.show.picture import (
    EDGE,
    GREY,
    INK,
    RESERVE,
    STYLE,
    WIDTH,
    Picture,
    byte_ticks,
    category_legend,
    fill,
    legend_rows,
    one_line,
    place,
    text_width,
    write_title,
)
from labkit.show.rich import MISSING, Rich, grid


class Pair(NamedTuple):
    """A formula and the estimate of the same recipe."""

    formula: Envelope
    trace: Estimate

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.formula.beside(self.trace.run)


# --- the picture ----------------------------------------------------------------------------------

_CATEGORY_OF = {
    Part.WEIGHTS: Category.WEIGHTS, Part.GRADIENTS: Category.GRADIENTS,
    Part.OPTIMIZER: Category.OPTIMIZER, Part.ACTIVATIONS: Category.ACTIVATIONS,
    Part.LOGITS: Category.ACTIVATIONS,
}  # fmt: skip
_ROW, _FOOT = 42, 36
_TOTAL = 100  # pixels that a total takes
_VISIBLE = 0.002  # of the longest bar; the table still has what is less


def side_by_side(
    pairs: Mapping[str, tuple[Envelope, Estimate]], *, title: str = "Formula and trace"
) -> Picture:
    """Show what the formula adds up beside what the trace holds at its peak, a pair of bars each.

    Args:
        pairs: by what to call it, what ``lab.envelope`` and ``lab.estimate`` gave.
        title: what the figure shows.

    Returns:
        The figure, already shown.

    Raises:
        InputError: there are no pairs.
    """
    return draw_pairs({name: Pair(*pair) for name, pair in pairs.items()}, title=title).show()


def draw_pairs(pairs: Mapping[str, Pair], *, title: str) -> Picture:
    """The figure of ``side_by_side`` without showing it."""
    if not pairs:
        raise InputError("there is nothing to draw: pass {name: (formula, estimate)}")
    stacks = [stack for pair in pairs.values() for stack in (_summed(pair), _held(pair))]
    longest = max(sum(stack.values()) for stack in stacks)
    used = [c for c in Category if any(stack.get(c, 0) > longest * _VISIBLE for stack in stacks)]
    cards = {pair.trace.gpu for pair in pairs.values()}
    head = 88 + 24 * legend_rows(used, reserve=True)
    with mpl.rc_context(STYLE):
        figure = Picture(head + _ROW * len(stacks) + _FOOT)
        traced = " and ".join(dict.fromkeys(p.trace.run.label for p in pairs.values()))
        subtitle = f"The formula is arithmetic, the trace {traced}. ▲ no schedule takes less"
        write_title(figure, title, subtitle)
        category_legend(figure, used, reserve=True)
        axes = figure.add_axes((0, 0, 1, 1))
        left = _names(figure, axes, list(pairs))
        place(figure, axes, left=left, right=34, top=head, bottom=_FOOT)
        _draw_stacks(axes, stacks)
        _draw_reserve(axes, list(pairs.values()))
        _scale(axes, list(pairs.values()), gpu(cards.pop()) if len(cards) == 1 else None)
    figure.table = _summary_table(pairs)
    figure.alt = _alt(title, pairs)
    return figure


def _summed(pair: Pair) -> dict[Category, int]:
    """The formula's terms by category."""
    found: dict[Category, int] = {}
    for part, nbytes in pair.formula.by_part.items():
        found[_CATEGORY_OF[part]] = found.get(_CATEGORY_OF[part], 0) + nbytes
    return found


def _held(pair: Pair) -> dict[Category, int]:
    """What the trace holds at its peak."""
    return {c: pair.trace.by_category[c] for c in Category if pair.trace.by_category.get(c)}


def _names(figure: Picture, axes: Axes, names: list[str]) -> float:
    """Write the names left of the bars; returns the room they need in pixels."""
    style = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
    written = []
    for number, name in enumerate(names):
        if len(names) > 1:
            words = one_line(name, 34)
            written.append(axes.text(-0.075, 2 * number + 0.5, words, weight="bold", **style))
        for y, word in ((2 * number, "formula"), (2 * number + 1, "trace")):
            axes.text(-0.012, y, word, color=INK if len(names) == 1 else GREY, **style)
    return min(max((text_width(figure, t) for t in written), default=0) + 80, WIDTH * 0.42)


def _draw_stacks(axes: Axes, stacks: list[dict[Category, int]]) -> None:
    for y, stack in enumerate(stacks):
        left = 0
        for category in Category:
            nbytes = stack.get(category, 0)
            axes.barh(y, nbytes, left=left, height=0.66, **fill(category))
            left += nbytes


def _draw_reserve(axes: Axes, pairs: list[Pair]) -> None:
    """What the allocator keeps beyond the peak, and the floor, on each trace's bar."""
    for number, (_, trace) in enumerate(pairs):
        y, start = 2 * number + 1, trace.peak_allocated_bytes
        kept = trace.peak_reserved_bytes - start
        axes.barh(y, kept, left=start, height=0.16, facecolor=RESERVE, zorder=2, **EDGE)
        axes.plot(trace.floor_bytes, y + 0.43, marker="^", color=INK, markersize=6, zorder=6,
                  clip_on=False)  # fmt: skip


def _scale(axes: Axes, pairs: list[Pair], card: Gpu | None) -> None:
    """Axis, grid, the totals behind the bars, and the card's line."""
    ends = [end for p in pairs for end in (p.formula.total_bytes, p.trace.peak_reserved_bytes)]
    totals = [n for p in pairs for n in (p.formula.total_bytes, p.trace.peak_allocated_bytes)]
    room = axes.get_position().width * WIDTH
    budget = card.budget_bytes if card else 0
    near = 0 < budget <= 2 * max(ends)
    # A total that would lie on the card's line moves behind it.
    width = _TOTAL / (room - _TOTAL) * max(*ends, budget if near else 0)
    ends = [budget if near and end < budget < end + width else end for end in ends]
    most = max(max(ends) * room / (room - _TOTAL), 1.04 * budget if near else 0)
    for y, (end, total) in enumerate(zip(ends, totals, strict=True)):
        style = {"textcoords": "offset points", "annotation_clip": False, "zorder": 6}
        words, up = format_bytes(total), 5 * (y % 2)
        axes.annotate(words, (end, y), xytext=(8, up), va="center", weight="bold", **style)
        if y % 2:
            words = f"{format_bytes(pairs[y // 2].trace.peak_reserved_bytes)} reserved"
            axes.annotate(words, (end, y), xytext=(8, -7), va="center", size=8.5, color=GREY,
                          **style)  # fmt: skip
    axes.set_xlim(0, most)
    axes.set_ylim(len(totals) - 0.4, -0.5)
    axes.yaxis.set_major_locator(NullLocator())
    axes.spines["left"].set(color="#777777", zorder=5)
    axes.grid(axis="x")
    byte_ticks(axes.xaxis, most, room / 95)
    axes.tick_params(length=0, pad=6)
    for y in range(1, len(pairs)):
        axes.axhline(2 * y - 0.5, color="#D0D0D0", linewidth=0.8, zorder=1)
    if card is not None:
        _card_line(axes, card, most if not near else None)


def _card_line(axes: Axes, card: Gpu, edge: float | None) -> None:
    """What the card can hold: a line, or words at the ``edge`` where it is far off."""
    text = f"{card.name} can hold {format_bytes(card.budget_bytes)}"
    style = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "size": 9.5}
    if edge is not None:
        axes.annotate(f"{text} →", (edge, 1), xytext=(0, 5), ha="right", color=GREY, **style)
        return
    axes.axvline(card.budget_bytes, color=INK, linewidth=1.6, linestyle=(0, (5, 2)), zorder=4)
    side = "right" if card.budget_bytes > axes.get_xlim()[1] / 2 else "left"
    axes.annotate(text, (card.budget_bytes, 1), xytext=(0, 5), ha=side, **style)


def _summary_table(pairs: Mapping[str, Pair]) -> Rich:
    rows = []
    for name, (formula, trace) in pairs.items():
        found, peak = formula.total_bytes, trace.peak_allocated_bytes
        numbers = (found, peak, trace.peak_reserved_bytes, trace.floor_bytes)
        texts = [format_bytes(number) for number in numbers]
        rows.append([name, *texts[:2], _percent(found / peak - 1), *texts[2:]])
    headings = ["", "formula", "peak of the trace", "formula off by", "reserved", "floor (▲)"]
    caption = "The formula's sum, the trace's peak, what PyTorch's allocator reserves for it"
    return grid(headings, rows, caption=f"{caption}, and what no schedule avoids.")


def part_table(pair: Pair) -> Rich:
    """Formula and trace part by part."""
    texts: dict[Part, list[str]] = {}
    for term in pair.formula.terms:
        texts.setdefault(term.part, []).append(term.text)
    rows = []
    for row in pair.rows:
        off = MISSING if row.error is None else _percent(row.error)
        found = MISSING if row.formula_bytes is None else format_bytes(row.formula_bytes)
        written = " + ".join(texts.get(row.part, [])) or MISSING
        sizes = [format_bytes(row.highest_bytes), format_bytes(row.peak_bytes)]
        rows.append([str(row.part), written, found, sizes[0], off, sizes[1]])
    totals = (pair.formula.total_bytes, pair.trace.peak_allocated_bytes)
    off = _percent(totals[0] / totals[1] - 1)
    rows.append(["together", "", format_bytes(totals[0]), "", off, format_bytes(totals[1])])
    headings = ["part", "formula", "= bytes", "trace, at most", "formula off by", "at the peak"]
    letters = ", ".join(f"{key} = {value:,}" for key, value in pair.formula.symbols.items())
    caption = f"Part by part, {pair.trace.run.label}. {letters}."
    return grid(headings, rows, caption=caption, words=(0, 1))


def _percent(share: float) -> str:
    """``"−31 %"``; ``"exact"`` for nothing at all."""
    if share == 0:
        return "exact"
    text = f"{100 * abs(share):.0f}" if abs(share) >= 0.01 else f"{100 * abs(share):.1g}"
    return f"{'+' if share > 0 else '−'}{text} %"


def _alt(title: str, pairs: Mapping[str, Pair]) -> str:
    parts = [
        f"{name}: formula {format_bytes(formula.total_bytes)}, trace "
        f"{format_bytes(trace.peak_allocated_bytes)}"
        for name, (formula, trace) in pairs.items()
    ]
    return f"Stacked bars. {title}. {'; '.join(parts)}. The table below holds the same numbers."
