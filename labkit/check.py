"""Whether an executed notebook really did what it should. papermill lets these through:

- an exception inside ``interact`` or ``with Output():``, hidden in widget state;
- ``SystemExit(0)``, which ends the execution and leaves later cells pending;
- a parameter that the notebook does not declare, which papermill only logs;
- a cell that was stopped: papermill calls it completed although no reply came.

Beyond those we ask for exactly one result, valid, possible and of this lesson, for no deprecation
warning that our own code caused, and for a text to each picture and headings to each table, for
readers who cannot see them. Limits: a library that logs a deprecation instead
of warning, without a file name, is not noticed; widget outputs that a lesson cleared are gone.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat

from labkit.lessons import declared_parameters, is_of_its_type
from labkit.memory import InputError, shown
from labkit.readable import NO_ALT, lacks
from labkit.results import RESULT_MIME, Result

WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
PACKAGE = Path(__file__).resolve().parent
_WARNING = re.compile(
    r"^(?P<path>[^\n]+?):(?P<line>\d+): (?P<kind>\w*(?:Deprecation|Future)Warning): (?P<text>.*)$",
    re.MULTILINE,
)


def check_notebook(notebook: Any, *, lesson: str | None = None) -> list[str]:
    """What is wrong with an executed notebook, one sentence each; empty if nothing is.

    Args:
        notebook: an nbformat 4 notebook, executed by papermill.
        lesson: two digits; the result must then be of this lesson. None or "": any.
    """
    return [
        *_cell_errors(notebook),
        *_widget_errors(notebook),
        *_unfinished_cells(notebook),
        *_unknown_parameters(notebook),
        *_result_problems(notebook, lesson),
        *_own_deprecations(notebook),
        *_unreadable(notebook),
    ]


def result_of(notebook: Any) -> Result:
    """The one result that an executed notebook emitted.

    Raises:
        InputError: there is none, more than one, or it is not valid.
    """
    records = [
        output["data"][RESULT_MIME]
        for _, cell in _code_cells(notebook)
        for output in cell.get("outputs", [])
        if RESULT_MIME in output.get("data", {})
    ]
    if not records:
        raise InputError("it shows no result: lab.result(...) did not run")
    if len(records) > 1:
        raise InputError(f"it shows {len(records)} results, where one is expected")
    return Result.from_dict(records[0])


def widget_models(notebook: Any) -> dict[str, Any]:
    """The state of each widget by its id; empty for a notebook without widgets.

    No schema holds for it. What has not the form of a widget's state is left out, and so are
    ``outputs`` and ``children`` that are none.
    """
    found = notebook.metadata
    for key in ("widgets", WIDGET_STATE, "state"):
        found = found.get(key) if isinstance(found, Mapping) else None
    models = found.items() if isinstance(found, Mapping) else ()
    return {
        id: {**model, "state": _well_formed(model["state"])}
        for id, model in models
        if isinstance(model, Mapping) and isinstance(model.get("state"), Mapping)
    }


def _well_formed(state: Mapping[str, Any]) -> dict[str, Any]:
    held = {key: state.get(key) for key in ("outputs", "children")}
    listed = {key: value if isinstance(value, list) else [] for key, value in held.items()}
    outputs = [output for output in listed["outputs"] if _is_output(output)]
    return {**state, **listed, "outputs": outputs}


def _is_output(value: Any) -> bool:
    try:
        nbformat.validate(value, ref="output", version=4, relax_add_props=True)
    except Exception:  # jsonschema's errors, and Python's for what is no object at all
        return False
    return is_of_its_type(value.get("data", {}))


def _code_cells(notebook: Any) -> Iterator[tuple[int, Any]]:
    """Code cells with something in them, numbered from 1 among all cells."""
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code" and cell.source.strip():
            yield number, cell


def name_of(number: int, cell: Any) -> str:
    """How a sentence calls a cell: its number among all cells, and its id."""
    return f"cell {number} ({cell['id']})" if cell.get("id") else f"cell {number}"


def _short(text: str) -> str:
    line = next(iter(text.strip().splitlines()), "")
    return line if len(line) <= 300 else line[:300] + "…"


def _cell_errors(notebook: Any) -> list[str]:
    problems = []
    for number, cell in _code_cells(notebook):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                what = _short(f"{output.ename}: {output.evalue}")
                problems.append(f"{name_of(number, cell)} raised {what}")
    return problems


def _widget_outputs(notebook: Any) -> Iterator[Any]:
    for model in widget_models(notebook).values():
        yield from model["state"]["outputs"]


def _widget_errors(notebook: Any) -> list[str]:
    return [
        f"a widget holds the error {_short(output.get('ename', ''))}: "
        f"{_short(output.get('evalue', ''))}"
        for output in _widget_outputs(notebook)
        if output.get("output_type") == "error"
    ]


def _unfinished_cells(notebook: Any) -> list[str]:
    unfinished = [
        name_of(number, cell)
        for number, cell in _code_cells(notebook)
        if cell.get("execution_count") is None
        or cell.metadata.get("papermill", {}).get("status") != "completed"
        # papermill calls a cell completed that was stopped before the kernel replied
        or "shell.execute_reply" not in cell.metadata.get("execution", {})
    ]
    if not unfinished:
        return []
    many = f"{len(unfinished)} code cells" if len(unfinished) > 1 else "1 code cell"
    return [f"{many} did not complete, first {unfinished[0]}"]


def _unknown_parameters(notebook: Any) -> list[str]:
    given = notebook.metadata.get("papermill", {}).get("parameters") or {}
    declared = declared_parameters(notebook)
    return [
        f"it was given the parameter {shown(name)}, which it does not declare "
        f"(it declares {', '.join(declared) or 'none'})"
        for name in given
        if name not in declared
    ]


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


def _own_deprecations(notebook: Any) -> list[str]:
    outputs = [
        output for _, cell in _code_cells(notebook) for output in cell.get("outputs", [])
    ] + list(_widget_outputs(notebook))
    found: dict[str, None] = {}  # in order, each once
    for output in outputs:
        if output.get("output_type") != "stream" or output.get("name") != "stderr":
            continue
        for match in _WARNING.finditer(_text(output.get("text", ""))):
            if where := _own_file(match["path"]):
                found[f"{where} caused a {match['kind']}: {_short(match['text'])}"] = None
    return list(found)


def _unreadable(notebook: Any) -> list[str]:
    """What readers who cannot see miss in cells and widgets."""
    seen = [
        (name_of(number, cell), output)
        for number, cell in _code_cells(notebook)
        for output in cell.get("outputs", [])
    ]
    seen += [("a widget", output) for output in _widget_outputs(notebook)]
    found: dict[str, None] = {}  # in order, each once
    for where, output in seen:
        data, notes = output.get("data", {}), output.get("metadata", {})
        lacking = lacks(_text(data.get("text/html", "")))
        if "text/html" not in data:
            lacking += [NO_ALT for kind in data if _is_mute(kind, notes)]
        found.update((f"{where} shows {each}", None) for each in lacking)
    for model in widget_models(notebook).values():
        value = model.get("state", {}).get("value")
        if model.get("model_name") == "HTMLModel" and isinstance(value, str):
            found.update((f"a widget shows {each}", None) for each in lacks(value))
    return list(found)


def _is_mute(kind: str, notes: Any) -> bool:
    """Whether an output of this MIME type is a picture without an alternative text."""
    own = notes.get(kind)
    described = notes.get("alt") or (isinstance(own, Mapping) and own.get("alt"))
    return kind.startswith("image/") and not described


def _text(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)


def _own_file(path: str) -> str | None:
    """What to call the file if it is ours: a module of labkit, or a cell of the notebook."""
    if "ipykernel_" in path or path.startswith("<ipython-input"):
        return "a cell"
    if Path(path).is_relative_to(PACKAGE):
        return f"labkit/{Path(path).relative_to(PACKAGE)}"
    return None
