"""Tiny notebooks and results for the tests of the runner and its checker."""

import json

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from gpumem.hardware.this_machine import Machine
from gpumem.inputs import InputError
from gpumem.runs import Run
from gpumem.units import MIB
from labkit.lesson.results import RESULT_MIME, Result

MACHINE = {"kind": "cpu", "name": "Test CPU", "versions": {"torch": "2.13.0"}}


def read_or_refused(read, *given):
    """Return what ``read`` makes of it; None if it refuses it in a short sentence."""
    try:
        return read(*given)
    except InputError as error:
        sentence = str(error)
    assert 0 < len(sentence) < 1500
    return None


def run(**changes):
    values = {
        "name": "baseline",
        "parameters": {"batch_size": 8},
        "mode": "simulated",
        "device": "T4",
        "peak_bytes": 12 * MIB,
        "by_category": {"weights": 8 * MIB, "activations": 4 * MIB},
        "step_peaks_bytes": (10 * MIB, 12 * MIB),
        **changes,
    }
    return Run(**values)


def result(**changes):
    values = {
        "lesson": "06",
        "title": "Checkpointing",
        "machine": MACHINE,
        "parameters": {"batch_size": 8, "precision": "fp32"},
        "runs": (run(),),
        "judgements": (),
        "seconds": 1.5,
        "date": "2026-01-02T03:04:05+00:00",
        **changes,
    }
    return Result(**values | {"machine": Machine(**values["machine"])})


def result_source(**changes):
    """The code of a cell that shows a result, without what `lab.result` needs."""
    bundle = {RESULT_MIME: result(**changes).to_dict(), "text/plain": "a result"}
    lines = (
        "import json",
        "from IPython.display import display",
        f"display(json.loads({json.dumps(bundle)!r}), raw=True)",
    )
    return "\n".join(lines)


def notebook(*sources, tags=(), result_cell=True):
    """A lesson of these code cells, with title, parameters, and a result unless told not to."""
    cells = [
        new_markdown_cell("# What does it *save*?"),
        new_code_cell('batch_size: int = 8\nprecision: str = "fp32"  # "fp32" or "bf16"'),
        *(new_code_cell(source) for source in sources),
    ]
    cells[1].metadata["tags"] = ["parameters"]
    for cell in cells[2:]:
        cell.metadata["tags"] = list(tags)
    if result_cell:
        cells.append(new_code_cell(result_source()))
    for number, cell in enumerate(cells):
        cell["id"] = f"06-{number}"
    return new_notebook(cells=cells)


def write_lesson(folder, *sources, name="06_saving", **options):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook(*sources, **options), path)
    return path
