"""Check that an executed notebook did what it should. papermill lets these through:

- an exception inside ``interact`` or ``with Output():``, hidden in widget state;
- ``SystemExit(0)``, which ends the execution and leaves later cells pending;
- a cell that was stopped: papermill calls it completed although no reply came.

Beyond those we ask for exactly one result, valid, possible and of this lesson, and for alternative
texts of pictures and headings of tables.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from gpumem.inputs import InputError, shown
from labkit.course.html_parts import NO_ALT, problems
from labkit.lesson.results import RESULT_MIME, Result

WIDGET_STATE = "application/vnd.jupyter.widget-state+json"


def check_notebook(notebook: Any, *, lesson: str | None = None) -> list[str]:
    """Return what is wrong with a notebook that papermill executed, one sentence each.

    With ``lesson``, two digits, the result must be of this lesson.
    """
    try:
        found = [
            *_errors(notebook),
            *_unfinished_cells(notebook),
            *_result_problems(notebook, lesson),
            *_inaccessible(notebook),
        ]
    except (AttributeError, KeyError, TypeError) as error:  # no schema covers their metadata
        return [f"its widgets or parameters are not as Jupyter writes them: {error!r}"]
    return list(dict.fromkeys(found))  # each once


def result_of(notebook: Any) -> Result:
    """Return the one valid result that an executed notebook emitted, or raise `InputError`."""
    records = [
        output["data"][RESULT_MIME]
        for _, cell in code_cells(notebook)
        for output in cell.get("outputs", [])
        if RESULT_MIME in output.get("data", {})
    ]
    if not records:
        raise InputError("it shows no result: lab.result(...) did not run")
    if len(records) > 1:
        raise InputError(f"it shows {len(records)} results, where one is expected")
    return Result.from_dict(records[0])


def widget_models(notebook: Any) -> dict[str, Any]:
    """Return ``model_name`` and ``state`` of each widget by its id."""
    return notebook.metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})


def code_cells(notebook: Any) -> Iterator[tuple[str, Any]]:
    """Yield code cells that are not empty, each after its number among all cells and its id."""
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code" and cell.source.strip():
            yield (f"cell {number} ({cell['id']})" if cell.get("id") else f"cell {number}"), cell


def _outputs(notebook: Any) -> Iterator[tuple[str, Any]]:
    """Yield the outputs of cells and of widgets, each after what to call its place."""
    for name, cell in code_cells(notebook):
        for output in cell.get("outputs", []):
            yield name, output
    for model in widget_models(notebook).values():
        for output in model["state"].get("outputs", []):
            yield "a widget", output


def _short(text: str) -> str:
    line = next(iter(text.strip().splitlines()), "")
    return line if len(line) <= 300 else line[:300] + "…"


def _errors(notebook: Any) -> Iterator[str]:
    for where, output in _outputs(notebook):
        if output["output_type"] == "error":
            verb = "holds the error" if where == "a widget" else "raised"
            yield f"{where} {verb} {_short(output['ename'])}: {_short(output['evalue'])}"


def _unfinished_cells(notebook: Any) -> list[str]:
    unfinished = [
        name
        for name, cell in code_cells(notebook)
        if cell.get("execution_count") is None
        or cell.metadata.get("papermill", {}).get("status") != "completed"
        # papermill calls a cell completed that was stopped before the kernel replied
        or "shell.execute_reply" not in cell.metadata.get("execution", {})
    ]
    text = "code cells that did not complete: {}, first {}"
    return [text.format(len(unfinished), unfinished[0])] if unfinished else []


def _result_problems(notebook: Any, lesson: str | None) -> list[str]:
    try:
        result = result_of(notebook)
    except InputError as error:
        return [str(error)]
    problems = result.broken_invariants()
    if lesson and result.lesson != lesson:
        problems.append(f"its result says lesson {result.lesson!r}, not {lesson!r}")
    given = notebook.metadata.get("papermill", {}).get("parameters") or {}
    problems += [
        f"its result says {name} = {shown(result.parameters[name])}, "
        f"but it was given {shown(value)}"
        for name, value in given.items()
        if name in result.parameters and result.parameters[name] != value
    ]
    return problems


def _inaccessible(notebook: Any) -> Iterator[str]:
    """Yield what readers who cannot see miss in cells and widgets."""
    for where, output in _outputs(notebook):
        data = output.get("data", {})
        found = problems("".join(data.get("text/html", "")))  # a text, or its lines
        if "text/html" not in data:
            about = output.get("metadata", {})
            found += [NO_ALT for kind in data if "image/" in kind and not _described(about, kind)]
        yield from (f"{where} shows {each}" for each in found)
    for model in widget_models(notebook).values():
        value = model["state"].get("value")
        if model.get("model_name") == "HTMLModel" and isinstance(value, str):
            yield from (f"a widget shows {each}" for each in problems(value))


def _described(metadata: Any, kind: str) -> bool:
    """Return whether there is an alternative text for the picture of this MIME type."""
    own = metadata.get(kind)
    return bool(metadata.get("alt") or (isinstance(own, Mapping) and own.get("alt")))
