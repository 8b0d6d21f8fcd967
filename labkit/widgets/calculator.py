"""The memory calculator: the formula that everybody uses beside a trace, for any model and GPU.

Limits: those of `formula_estimate` and `estimate`. Each choice is traced before the next one.
"""

from typing import Any

from IPython.display import display
from ipywidgets import VBox, interactive_output

from gpumem.estimation.estimate import Estimate, estimate
from gpumem.estimation.recipe import OPTIMIZERS
from gpumem.estimation.textbook_formula import Envelope, formula_estimate
from gpumem.figures.cards import BAD, GOOD, WARM, Look, notice
from gpumem.figures.html_pages import MISSING, Rich, grid
from gpumem.hardware.catalogue import GPUS
from gpumem.inputs import PRECISIONS, InputError
from gpumem.models.catalogue import MODELS
from gpumem.units import GIB, format_bytes
from labkit.widgets.knobs import control

CLOSE_BYTES = GIB // 2  # the catalogue's capacities vary this much with driver and ECC
CHOICES = {
    "model": MODELS,
    "gpu": GPUS,
    "batch_size": [1 << power for power in range(8)],
    "seq_len": [1 << power for power in range(7, 16)],
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
    "checkpointing": (False, True),
}


def calculator(**first: Any) -> None:
    """Show controls, which begin with ``first``, and the formula beside a trace for them."""
    controls = {}
    for name, choices in CHOICES.items():
        begin = [first[name]] if name in first else []
        controls[name] = control(name, [*dict.fromkeys([*begin, *choices])])
    answer = interactive_output(lambda **chosen: display(calculate(**chosen)), controls)
    display(VBox([*controls.values(), answer]))


def calculate(model: str, gpu: str, **recipe: Any) -> Rich:
    """Return whether a recipe fits, with formula and trace part by part; or why it is refused."""
    try:
        formula = formula_estimate(model, **recipe)
        trace = estimate(model, gpu=gpu, loops=False, **recipe)
    except InputError as error:
        text, look = f"This cannot be trained: {error}", BAD
        return Rich(notice(text, look), text)
    text, look = verdict(formula, trace)
    return Rich(notice(text, look), text) + part_table(formula, trace)


def verdict(formula: Envelope, trace: Estimate) -> tuple[str, Look]:
    """Return what trace and formula say, a line each, and the look of the trace's answer."""
    need_bytes, room_bytes = trace.peak_reserved_bytes, trace.capacity_bytes
    takes = f"PyTorch reserves {format_bytes(need_bytes)}, and the {trace.run.device} leaves it "
    takes += f"{format_bytes(room_bytes)}."
    head, look = ("It fits", GOOD) if trace.fits else ("It does not fit", BAD)
    said = f"The formula says {format_bytes(formula.total_bytes)}"
    if abs(room_bytes - need_bytes) < CLOSE_BYTES:
        head, look = "Too close to call: GPUs of one name differ by half a GiB", WARM
        said += "."
    elif (formula.total_bytes <= room_bytes) == trace.fits:
        said += ", which comes to the same answer."
    elif trace.fits:
        said += " and would have sent you to a larger card."
    else:
        said += " and would have sent you into an out-of-memory error."
    return f"{head}. {takes}\n{said}", look


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


def factors(formula: Envelope, trace: Estimate) -> dict[str, float]:
    """Return how many times the formula's bytes the trace takes: each of its parts, the peak, and
    what is reserved for it."""
    rows = [row for row in formula.beside(trace.run) if row.formula_bytes]
    found = {str(row.part): row.highest_bytes / row.formula_bytes for row in rows}
    found["the whole peak"] = trace.peak_allocated_bytes / formula.total_bytes
    return found | {"what is reserved": trace.peak_reserved_bytes / formula.total_bytes}
