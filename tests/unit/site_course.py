"""A course that was executed, as far as the site's tests need it: two lessons, one of them hostile.

Limits: the notebooks are made up; only their names are those of lessons.
"""

import nbformat
from lesson_files import notebook, result
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from labkit.course.check import WIDGET_STATE
from labkit.course.outcomes import Outcome, store
from labkit.lesson import claims, session
from labkit.lesson.results import RESULT_MIME

HOSTILE, PLAIN = "06_gradient_checkpointing", "00_start_here"
WORD = "zugzwang"  # stands in one lesson and nowhere else
BADGE = "[![Open in Colab](https://elsewhere.example/b.svg)](https://colab.example/lesson)"
EVIL = "<script>window.owned = 1</script><img src=https://elsewhere.example/x onerror=owned()>"
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5E"
    "rkJggg=="
)


def write_course(folder):
    """Two lessons that passed, and one that failed."""
    folder.mkdir(parents=True)
    _store(folder, PLAIN, notebook("pass"), result(lesson="00"))
    claim = next(c for c in claims.all_claims().values() if c.unit == "share" and c.needs == "any")
    verdict = session.judgement_record(claims.judge(claim.id, 0.123, "simulated for T4"))
    _store(folder, HOSTILE, _hostile(), result(judgements=(verdict,)))
    failed = Outcome("07", "07_gradient_accumulation", "x", "failed", ("it broke",), 1.0)
    store(failed, folder / "none", folder)


def _store(folder, name, book, found):
    shown = {RESULT_MIME: found.to_dict(), "text/plain": "a result"}
    book.cells[-1].outputs = [new_output("display_data", data=shown)]
    nbformat.write(book, folder / "partial")
    store(Outcome(name[:2], name, "A question?", "passed"), folder / "partial", folder)


def _hostile():
    book = notebook("pass")
    book.cells[0].source = f"# How much?\n\n{BADGE}\n\n30 min"
    prose = (
        rf"## The idea"
        "\n\n"
        rf"It is ${{L}} \cdot a$ bytes, {WORD}. {EVIL}"
        "\n\n"
        r"$$L \cdot a \quad\longrightarrow\quad L \cdot x + a$$"
        "\n\n"
        "See [another lesson](07_gradient_accumulation.ipynb), [the first](00_start_here.ipynb), "
        "[the course](../README.md#lessons) and [how to train on many](../docs/CLUSTER.md)."
    )
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "out"}, "text/plain": "Out"}
    held = new_output("stream", name="stdout", text="held by a widget")
    state = {"out": {"model_name": "OutputModel", "state": {"outputs": [held]}}}
    book.metadata["widgets"] = {WIDGET_STATE: {"state": state}}
    picture = f'<img alt="Two bars" width="600" src="data:image/png;base64,{PIXEL}">{EVIL}'
    outputs = [
        new_output("display_data", data={"text/html": picture, "text/plain": "Two bars"}),
        new_output("display_data", data={"application/javascript": "window.owned = 1"}),
        new_output("display_data", data=view),
    ]
    book.cells[1:1] = [new_markdown_cell(prose, id="06-a")]
    book.cells[2:2] = [new_code_cell("draw()", id="06-b", outputs=outputs)]
    return book
