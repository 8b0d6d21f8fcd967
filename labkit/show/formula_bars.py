"""The formula that everybody uses beside the trace: two bars for each pair, and tables.

- ``formula_bars(pairs)``: what the formula adds up beside what the trace holds at its peak.
- ``part_table(pair)``: the same part by part, each at its own highest moment too.

Limits: bars are to scale, so beside a pair a thousand times larger a small one is a hairline.
"""

from collections.abc import Mapping
from typing import NamedTuple

from matplotlib.axes import Axes

from labkit.plan.estimate import Estimate
from labkit.plan.formula import Envelope, Part, Row
from labkit.show.picture import (
    EDGE,
    INK,
    RESERVE,
    Picture,
    category_legend,
    fill,
    one_line,
    showing,
)
from labkit.show.stacked_bars import capacity_line, draw_stack, scale_bars, write_total
from labkit.support.html_table import MISSING, Rich, grid
from labkit.trace import Category
from labkit.values import InputError, format_bytes

CATEGORY_OF = {
    Part.WEIGHTS: Category.WEIGHTS,
    Part.GRADIENTS: Category.GRADIENTS,
    Part.OPTIMIZER: Category.OPTIMIZER,
    Part.ACTIVATIONS: Category.ACTIVATIONS,
    Part.LOGITS: Category.ACTIVATIONS,
}
VISIBLE = 0.002  # of the longest bar; the table still has what is less


class Pair(NamedTuple):
    """A formula and the estimate of the same recipe."""

    formula: Envelope
    trace: Estimate

    @property
    def rows(self) -> tuple[Row, ...]:
        """The formula's parts beside those of the trace."""
        return self.formula.beside(self.trace.run)


def draw_formula_bars(
    pairs: Mapping[str, tuple[Envelope, Estimate]], *, title: str = "Formula and trace"
) -> Picture:
    """Draw what the formula adds up beside what the trace holds at its peak, a pair of bars each.

    Args:
        pairs: by what to call it, what ``formula_estimate`` and ``lab.estimate`` gave.
        title: what the figure shows.

    Returns:
        The figure; ``formula_bars`` has shown it, ``draw_formula_bars`` has not.

    Raises:
        InputError: there are no pairs.
    """
    if not pairs:
        raise InputError("there is nothing to draw: pass {name: (formula, estimate)}")
    stacks, names = [], []
    for name, (formula, trace) in pairs.items():
        stacks += [_by_category(formula), trace.by_category]
        names += [f"{one_line(name, 30)}: formula" if len(pairs) > 1 else "formula", "trace"]
    least = VISIBLE * max(sum(stack.values()) for stack in stacks)
    used = [each for each in Category if max(stack.get(each, 0) for stack in stacks) > least]
    traced = " and ".join(dict.fromkeys(trace.run.label for _, trace in pairs.values()))
    figure = Picture(
        title,
        f"The formula is arithmetic, the trace {traced}. ▲ no schedule takes less",
        body=66 + 42 * len(stacks),
        legend=category_legend(used, reserve=True),
    )
    rows = []
    with figure.drawing() as axes:
        styles = {category: fill(category) for category in Category}
        for y, stack in enumerate(stacks):
            draw_stack(axes, y, {each: stack.get(each, 0) for each in Category}, styles)
        for i, (name, (formula, trace)) in enumerate(pairs.items()):
            rows.append([name, *_annotate(axes, 2 * i, formula, trace)])
        most = max(max(f.total_bytes, t.peak_reserved_bytes) for f, t in pairs.values())
        scale_bars(axes, names, most)
        for y in range(1, len(pairs)):
            axes.axhline(2 * y - 0.5, color="#D0D0D0", linewidth=0.8, zorder=1)
        gpus = {trace.gpu for _, trace in pairs.values()}
        if len(gpus) == 1:
            shared = gpus.pop()
            capacity_line(axes, shared.name, shared.budget_bytes)
    figure.describe(
        "Stacked bars",
        ["", "formula", "peak of the trace", "formula off by", "reserved", "floor (▲)"],
        rows,
        caption="The formula's sum, the trace's peak, what PyTorch's allocator reserves for it, "
        "and what no schedule avoids.",
    )
    return figure


formula_bars = showing(draw_formula_bars)


def _by_category(formula: Envelope) -> dict[Category, int]:
    found = dict.fromkeys(Category, 0)
    for part, nbytes in formula.by_part.items():
        found[CATEGORY_OF[part]] += nbytes
    return found


def _annotate(axes: Axes, y: int, formula: Envelope, trace: Estimate) -> list[str]:
    """Write the sums behind the bars of a pair, draw reserve and floor, and return the numbers."""
    peak, reserved = trace.peak_allocated_bytes, trace.peak_reserved_bytes
    off = _percent(formula.total_bytes / peak - 1)
    amounts = (formula.total_bytes, peak, reserved, trace.floor_bytes)
    said, peak_said, reserved_said, floor_said = map(format_bytes, amounts)
    write_total(axes, said, formula.total_bytes, y)
    axes.barh(y + 1, reserved - peak, left=peak, height=0.16, facecolor=RESERVE, zorder=2, **EDGE)
    write_total(axes, f"{peak_said} ({reserved_said} reserved)", reserved, y + 1)
    mark = {"marker": "^", "color": INK, "markersize": 6, "zorder": 6, "clip_on": False}
    axes.plot(trace.floor_bytes, y + 1.43, **mark)
    return [said, peak_said, off, reserved_said, floor_said]


def part_table(pair: Pair) -> Rich:
    """Return formula and trace part by part."""
    formula, trace = pair
    rows = []
    for row in pair.rows:
        terms = [term.text for term in formula.terms if term.part == row.part]
        found = MISSING if row.formula_bytes is None else format_bytes(row.formula_bytes)
        off = MISSING if row.error is None else _percent(row.error)
        highest, peak = format_bytes(row.highest_bytes), format_bytes(row.peak_bytes)
        rows.append([str(row.part), " + ".join(terms) or MISSING, found, highest, off, peak])
    total, peak = formula.total_bytes, trace.peak_allocated_bytes
    off = _percent(total / peak - 1)
    rows.append(["together", "", format_bytes(total), "", off, format_bytes(peak)])
    headings = ["part", "formula", "= bytes", "trace, at most", "formula off by", "at the peak"]
    letters = ", ".join(f"{key} = {value:,}" for key, value in formula.symbols.items())
    caption = f"Part by part, {trace.run.label}. {letters}."
    return grid(headings, rows, caption=caption, text_columns=(0, 1))


def _percent(share: float) -> str:
    """Return ``"−31 %"``; ``"exact"`` for nothing at all."""
    if share == 0:
        return "exact"
    text = f"{100 * abs(share):.0f}" if abs(share) >= 0.01 else f"{100 * abs(share):.1g}"
    return f"{'+' if share > 0 else '−'}{text} %"
