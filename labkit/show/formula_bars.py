"""The formula that everybody uses beside the trace: two bars for each pair, and tables.

- ``draw_formula_bars(pairs)``: what the formula adds up beside what the trace holds at its peak.
- ``part_table(formula, trace)``: the same part by part, each at its own highest moment too.
"""

from collections.abc import Mapping

from labkit.plan.estimate import Estimate
from labkit.plan.formula import Envelope, Part
from labkit.show.bars import draw_stacked_bars
from labkit.show.picture import RESERVED, Picture, one_line
from labkit.show.tables import change_text
from labkit.support.html_table import MISSING, Rich, grid
from labkit.trace import Category
from labkit.values import format_bytes

#: The name that a part is drawn under, in this order: the loss beside the activations, not in them.
DRAWN_AS = {
    Part.WEIGHTS: Category.WEIGHTS,
    Part.GRADIENTS: Category.GRADIENTS,
    Part.OPTIMIZER: Category.OPTIMIZER,
    Part.ACTIVATIONS: Category.ACTIVATIONS,
    Part.COPIES: Category.ACTIVATIONS,
    Part.LOGITS: Part.LOGITS,
    Part.TEMPORARY: Category.TEMPORARY,
    Part.REST: Category.UNATTRIBUTED,
}


def draw_formula_bars(
    pairs: Mapping[str, tuple[Envelope, Estimate]], *, title: str = "Formula and trace"
) -> Picture:
    """Draw what the formula adds up beside what the trace holds at its peak, a pair of bars each.

    Args:
        pairs: by what to call it, what ``formula_estimate`` and ``lab.estimate`` gave.
        title: what the figure shows.

    Returns:
        The figure, not yet shown.

    Raises:
        InputError: there are no pairs.
    """
    bars = {}
    for name, (formula, trace) in pairs.items():
        traced = {row.part: row.peak_bytes for row in formula.beside(trace.run)}
        start = f"{one_line(name, 20)}: " if len(pairs) > 1 else ""
        off = change_text(formula.total_bytes, trace.peak_allocated_bytes)
        reserve = trace.peak_reserved_bytes - trace.peak_allocated_bytes
        bars[f"{start}formula, {off}"] = _drawn(formula.by_part)
        bars[f"{start}trace"] = {**_drawn(traced), RESERVED: reserve}
    labels = " and ".join(dict.fromkeys(trace.run.label for _, trace in pairs.values()))
    gpus = list({trace.gpu for _, trace in pairs.values()})
    return draw_stacked_bars(
        bars,
        title=title,
        source=f"The formula is arithmetic, the trace {labels}",
        limit=(gpus[0].name, gpus[0].budget_bytes) if len(gpus) == 1 else None,
    )


def _drawn(parts: Mapping[Part, int]) -> dict[str, int]:
    """Return the bytes of ``parts`` by the name that each is drawn under."""
    drawn = dict.fromkeys(DRAWN_AS.values(), 0)
    for part, nbytes in parts.items():
        drawn[DRAWN_AS[part]] += nbytes
    return drawn


def part_table(formula: Envelope, trace: Estimate) -> Rich:
    """Return formula and trace part by part."""
    rows = []
    for row in formula.beside(trace.run):
        terms = [term.text for term in formula.terms if term.part == row.part]
        found = MISSING if row.formula_bytes is None else format_bytes(row.formula_bytes)
        times = f"{row.highest_bytes / row.formula_bytes:.2f}" if row.formula_bytes else MISSING
        highest, peak = format_bytes(row.highest_bytes), format_bytes(row.peak_bytes)
        rows.append([str(row.part), " + ".join(terms) or MISSING, found, highest, times, peak])
    total, peak = formula.total_bytes, trace.peak_allocated_bytes
    times = f"{peak / total:.2f}"
    rows.append(["together", "", format_bytes(total), "", times, format_bytes(peak)])
    headings = ["part", "formula", "= bytes", "trace, at most", "trace / formula", "at the peak"]
    letters = ", ".join(f"{key} = {value:,}" for key, value in formula.symbols.items())
    caption = f"Part by part, {trace.run.label}. {letters}."
    return grid(headings, rows, caption=caption, text_columns=(0, 1))
