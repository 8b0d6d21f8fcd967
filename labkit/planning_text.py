"""Estimates and advice as text for a terminal.

Limits: about 100 columns wide; bars are to scale, so the smallest is a hairline.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from labkit.catalogue import GPUS
from labkit.memory import Category, format_bytes

if TYPE_CHECKING:
    from labkit.advice import Advice
    from labkit.estimates import Estimate
    from labkit.recipe_search import Option

_BAR = 40
_HEADINGS = {"same": "The same training", "changed": "Changed training"}


def estimate_text(found: "Estimate") -> str:
    """An estimate: the verdict first, then what it rests on."""
    card = GPUS[found.gpu]
    spare = found.capacity_bytes - found.peak_reserved_bytes
    if found.fits:
        verdict = f"fits, with {format_bytes(spare)} to spare"
    elif spare < 0:
        verdict = f"does not fit, {format_bytes(-spare)} too much"
    else:  # a block cached too small to serve a request, when nothing else is left
        verdict = "does not fit"
    lines = [f"{found.model} on {card.name}: {verdict}", f"  {_what(found)}"]
    if found.failure:
        lines.append(f"  {found.failure}")
    rows = [
        ("reserved", found.peak_reserved_bytes, "by PyTorch's allocator: this must fit"),
        ("allocated", found.peak_allocated_bytes, "of it, in blocks that tensors use"),
        ("capacity", found.capacity_bytes, "of the card, the CUDA context set aside"),
        ("context", found.context_bytes, "for CUDA itself, beside the allocator"),
        ("floor", found.floor_bytes, "no schedule of this recipe gets below"),
        ("host", found.host_bytes, "in the computer's own memory"),
    ]
    lines += ["", *(f"  {a:<13}{format_bytes(b):>9}  {c}" for a, b, c in rows)]
    lines += ["", "  At the allocated peak:", *_bars(found), ""]
    if found.flops is not None and found.moved_bytes is not None:
        lines.append(f"  A step computes {found.flops / 1e12:.4g} TFLOP and moves "
                     f"{found.moved_bytes / 1e9:.4g} GB in the card's memory.")  # fmt: skip
    if found.sent_bytes:
        lines.append(f"  Each GPU sends {found.sent_bytes / 1e9:.4g} GB a step to the others.")
    how = "every layer was traced" if found.exact else "like layers were traced once and repeated"
    lines.append(f"  Simulated in {found.seconds_to_estimate:.1f} s: {how}.")
    return "\n".join(lines)


def _what(found: "Estimate") -> str:
    if found.recipe is not None:
        return str(found.recipe)
    given = ", ".join(f"{name} {value}" for name, value in found.parameters.items())
    return given or "your own experiment"


def _bars(found: "Estimate") -> Iterable[str]:
    total = max(found.peak_allocated_bytes, 1)
    for category in Category:
        if nbytes := found.by_category.get(str(category), 0):
            bar = "█" * round(_BAR * nbytes / total) or "▏"
            yield f"  {category:<13}{format_bytes(nbytes):>9}  {bar}"


# --- advice ---------------------------------------------------------------------------------------


def advice_text(advice: "Advice") -> str:
    """Advice: the best of each group, then all that is worth choosing from."""
    card = GPUS[advice.gpu]
    many = f"{advice.gpus} × " if advice.gpus > 1 else ""
    lines = [
        f"{advice.model} on {many}{card.name}, {advice.seq_len} tokens a sequence",
        f"  A recipe may take {format_bytes(advice.room_bytes)}: the "
        f"{format_bytes(advice.capacity_bytes)} that PyTorch gets, less {advice.margin:.0%}.",
    ]
    if not advice.fitting:
        lines += ["", *_nothing_fits(advice)]
    for group, heading in _HEADINGS.items():
        lines += ["", *_group(advice, group, heading)]
    rows = _rows(advice)
    if rows:
        lines += ["", "Ways that fit, each with the savers that give it the lowest bound:"]
        lines += _table(_COLUMNS, rows)
    if frontier := advice.frontier:
        lines += ["", "No other of the same group needs less memory and has a lower bound too:"]
        lines += _table(_COLUMNS, [_row(option) for option in frontier])
    lines += [
        "",
        "  A bound is the least time per 1000 tokens that arithmetic, memory and link allow;"
        " real steps take longer.",
        f"  {len(advice.options)} recipes simulated, {advice.ruled_out} ruled out by arithmetic,"
        f" in {advice.seconds:.0f} s.",
    ]
    return "\n".join([*lines, *(f"  Not tried: {sentence}" for sentence in advice.refused)])


def _nothing_fits(advice: "Advice") -> list[str]:
    smallest = advice.smallest
    over = smallest.needed_bytes - advice.room_bytes
    lines = [f"Nothing fits. The smallest takes {format_bytes(over)} too much: {smallest.recipe}"]
    if advice.larger_gpu:
        name = GPUS[advice.larger_gpu].name
        lines.append(f"  The smallest card that holds it: {name} ({advice.larger_gpu}).")
    else:
        lines.append("  No card of the catalogue holds it.")
    if advice.gpus == 1:
        lines.append("  Several cards of this kind can share one model: --gpus N tries that, too.")
    return lines


def _group(advice: "Advice", group: str, heading: str) -> list[str]:
    best = advice.best.get(group)
    if best is not None:
        lines = [f"{heading}: {best.recipe}"]
        lines.append(
            f"  takes {format_bytes(best.needed_bytes)}, bound {_bound(best)} per 1000 tokens"
        )
        lines += [f"  changes  {sentence}" for sentence in best.changes]
        return lines + [f"  costs    {sentence}" for sentence in best.costs]
    tried = [option for option in advice.options if option.group == group]
    if not tried:
        why = "was not asked for" if _unasked(advice, group) else "is too large by arithmetic alone"
        return [f"{heading}: {why}."]
    near = min(tried, key=lambda option: option.needed_bytes)
    fit = "" if near.needed_bytes > advice.capacity_bytes else ", into the margin"
    return [f"{heading}: nothing fits. The nearest takes {format_bytes(near.needed_bytes)}{fit}:",
            f"  {near.recipe}"]  # fmt: skip


def _unasked(advice: "Advice", group: str) -> bool:
    return group == "same" and advice.only == "lora"


def _rows(advice: "Advice") -> list[list[str]]:
    """The best of each way (precision, optimizer, adapters), in the order of advice."""
    ways: dict[tuple, Option] = {}
    for option in advice.fitting:
        recipe = option.recipe
        way = (recipe.precision, recipe.optimizer, recipe.lora, recipe.quantize)
        ways.setdefault(way, option)
    return [_row(option) for option in ways.values()]


_COLUMNS = ("memory", "bound", "changes", "recipe")


def _row(option: "Option") -> list[str]:
    changes = str(len(option.changes)) if option.changes else "none"
    return [format_bytes(option.needed_bytes), _bound(option), changes, str(option.recipe)]


def _bound(option: "Option") -> str:
    return f"≥ {1000 * option.seconds_per_token:.3g} s"


def _table(headings: Sequence[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return [
        "  "
        + "  ".join(
            text.rjust(width) if i < len(widths) - 1 else text
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [headings, *rows]
    ]
