"""The gate over the real notebooks, and over bad ones made here: every rule can fail."""

import json
from pathlib import Path

import form
import pytest
from lesson_rules import badges, setup_code
from nbformat.v4 import reads_json

NOTEBOOKS = sorted((form.ROOT / "notebooks").glob("*.ipynb"))
CLAIMS = {"halves-memory": {"lesson": "06"}, "of-another": {"lesson": "01"}}

PARAMETERS = """\
batch_size: int = 8
precision: str = "fp32"
gpu: str = "t4"
size: str = "small"
steps: int = 3
seed: int = 0
"""
REPOSITORY = "ada/course"
FILE = "06_checkpointing.ipynb"
BADGES = badges(FILE, REPOSITORY)

TITLE = f"# Does it halve?\n\n{BADGES}\n\n20 min, any machine."
EXERCISE = 'task = lab.exercise("06-1")\ntask.check(...)'

# name, tag, source; a name's letter says its kind: m(arkdown) or c(ode)
GOOD = [
    ("m-title", "title", TITLE),
    ("m-promise", "promise", "We will measure."),
    ("m-setup", "setup", "## Setting up"),
    ("c-setup", "setup", setup_code("06", REPOSITORY)),
    ("c-parameters", "parameters", PARAMETERS.rstrip()),
    ("m-idea", "idea", "## The idea\n\nBytes are counted."),
    ("m-idea-more", "idea", "```\n# no heading, a comment\n```"),
    ("m-baseline", "baseline", "## Baseline"),
    ("c-baseline", "baseline", "x = 1"),
    ("c-predict", "predict", 'guess = lab.predict("How much?")'),
    ("m-experiment", "experiment", "## The change"),
    ("c-experiment", "experiment", "y = 2"),
    ("c-plot", "plot", "lab.bars([x, y])"),
    ("m-reading", "reading", "Less than before."),
    ("c-again", "experiment", "z = 3"),
    ("m-again", "reading", "Less again."),
    ("m-claim", "claim", "## The claims"),
    ("c-claim", "claim", 'lab.claim("halves-memory", 0.5)'),
    ("m-explore", "explore", "## Explore"),
    ("c-explore", "explore", "lab.explore(x)"),
    ("m-exercise-1", "exercise", "## Exercise 1"),
    ("c-exercise-1", "exercise", EXERCISE),
    ("m-exercise-2", "exercise", "## Exercise 2"),
    ("c-exercise-2", "exercise", EXERCISE.replace("-1", "-2")),
    ("m-takeaway", "takeaway", "## Takeaway"),
    ("c-result", "result", "lab.result([x, y])"),
]


def good() -> dict:
    """A notebook, as JSON, that breaks no rule."""
    cells = []
    for name, tag, source in GOOD:
        code = {"execution_count": None, "outputs": []} if name[0] == "c" else {}
        cell = {
            "cell_type": "code" if code else "markdown",
            "id": f"06-{name}",
            "metadata": {"tags": [tag]},
            "source": source.splitlines(keepends=True),
        }
        cells.append(cell | code)
    return {
        "cells": cells,
        "metadata": form.NOTEBOOK_METADATA,
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def cell(notebook: dict, name: str) -> dict:
    return next(cell for cell in notebook["cells"] if cell["id"] == f"06-{name}")


def save(folder: Path, notebook: dict, name: str = FILE) -> Path:
    path = folder / name
    path.write_text(
        json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return path


def problems(folder: Path, notebook: dict) -> list[tuple[str, str]]:
    found = form.gate([save(folder, notebook)], CLAIMS, REPOSITORY)
    return [(problem.rule, problem.cell) for problem in found]


# --- the real notebooks --------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_in_form(path):
    found = form.gate([path], form.load_claims(), form.load_repository())
    assert [str(problem) for problem in found] == []


# --- bad notebooks -------------------------------------------------------------------------------


def test_good_notebook_passes(tmp_path):
    assert problems(tmp_path, good()) == []


def source(name, text):
    return lambda notebook: cell(notebook, name).update(source=text.splitlines(keepends=True))


def tagged(name, *tags):
    return lambda notebook: cell(notebook, name)["metadata"].update(tags=list(tags))


def dropped(*names):
    def change(notebook):
        ids = {f"06-{name}" for name in names}
        notebook["cells"] = [cell for cell in notebook["cells"] if cell["id"] not in ids]

    return change


def moved(name, before):
    def change(notebook):
        cells = notebook["cells"]
        taken = cell(notebook, name)
        cells.remove(taken)
        cells.insert(cells.index(cell(notebook, before)), taken)

    return change


def copied(name, times):
    def change(notebook):
        original = cell(notebook, name)
        place = notebook["cells"].index(original)
        more = [original | {"id": f"06-copy-{number}"} for number in range(times)]
        notebook["cells"][place + 1 : place + 1] = more

    return change


def parameters(old, new):
    return source("c-parameters", PARAMETERS.replace(old, new))


BROKEN = {
    "output kept": ("bytes", "", lambda book: cell(book, "c-plot").update(execution_count=3)),
    "random id": ("ids", "", lambda book: cell(book, "c-plot").update(id="a1b2c3d4")),
    "no tag": ("tags", "m-idea", tagged("m-idea")),
    "unknown tag": ("tags", "m-idea", tagged("m-idea", "ideas")),
    "claim before plot": ("order", "c-plot", moved("c-claim", "c-plot")),
    "last is no result": ("order", "m-takeaway", moved("c-result", "m-takeaway")),
    "too many cells": ("size", "", copied("m-idea", 5)),
    "too much prose": (
        "size",
        "",
        dropped("c-baseline", "c-again", "c-explore", "c-claim", "c-plot"),
    ),
    "long cell": ("size", "c-plot", source("c-plot", "a = 1\n\n" * 26)),
    "empty cell": ("size", "m-idea", source("m-idea", "\n")),
    "second title": ("headings", "", source("m-idea", "# Another?")),
    "level left out": ("headings", "m-idea", source("m-idea", "#### Deep")),
    "title is no question": ("headings", "m-title", source("m-title", "# Halving\n\n20 min")),
    "no minutes": ("headings", "m-title", source("m-title", "# Does it halve?")),
    "badges of another": ("badges", "m-title", source("m-title", TITLE.replace("ada", "bob"))),
    "parameter missing": ("parameters", "c-parameters", parameters("seed: int = 0\n", "")),
    "parameter derived": ("parameters", "c-parameters", parameters("= 3", "= seed * 2")),
    "second parameters cell": ("parameters", "", tagged("m-setup", "parameters")),
    "setup of another": ("setup", "c-setup", source("c-setup", setup_code("06", "bob/course"))),
    "exercise without code": ("exercises", "m-exercise-2", dropped("c-exercise-2")),
    "exercise unchecked": ("exercises", "m-exercise-1", source("c-exercise-1", "lab.exercise(1)")),
    "claim only in a comment": ("claims", "", source("c-claim", "# lab.claim('halves-memory')")),
    "unknown claim": ("claims", "c-claim", source("c-claim", "lab.claim('thirds', 1)")),
    "figure in a reading": ("reading", "m-reading", source("m-reading", "It fell by 1.5 GiB.")),
    "no result": ("result", "", source("c-result", "print(x)")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_notebook_fails_by_its_rule(tmp_path, name):
    rule, where, change = BROKEN[name]
    notebook = good()
    change(notebook)
    assert (rule, f"06-{where}" if where else "") in problems(tmp_path, notebook)


@pytest.mark.parametrize(
    "text",
    ["{", '{"nbformat": 4}', '{"nbformat": 3, "metadata": {}, "cells": []}'],
)
def test_file_that_is_no_notebook_is_named(tmp_path, text):
    path = tmp_path / "06_bad.ipynb"
    path.write_text(text, encoding="utf-8")
    assert [problem.rule for problem in form.gate([path], CLAIMS, REPOSITORY)] == ["readable"]


# --- byte form -----------------------------------------------------------------------------------


def spoil(notebook: dict) -> dict:
    """The same lesson as an editor might leave it."""
    notebook["metadata"] = {"kernelspec": {"display_name": "x", "name": "x"}, "widgets": {"a": 1}}
    for each in notebook["cells"]:
        each["source"] = "".join(each["source"])
        each["metadata"]["ExecuteTime"] = 1
        if each["cell_type"] == "code":
            each |= {"execution_count": 7}
            output = {"name": "stdout", "output_type": "stream", "text": "hello"}
            each["outputs"].append(output)
    return notebook


def content(path: Path) -> list[tuple]:
    cells = reads_json(path.read_text(encoding="utf-8")).cells
    return [(each.id, each.cell_type, each.metadata.get("tags"), each.source) for each in cells]


def test_fix_gives_the_canonical_bytes_and_keeps_the_content(tmp_path):
    wanted = save(tmp_path, good()).read_bytes()
    path = tmp_path / FILE
    path.write_text(json.dumps(spoil(good()), indent=4), encoding="utf-8", newline="\r\n")
    before = content(path)
    assert {problem.rule for problem in form.gate([path], CLAIMS, REPOSITORY)} == {"bytes"}
    assert form.gate([path], CLAIMS, REPOSITORY, fix=True) == []
    assert path.read_bytes() == wanted
    assert content(path) == before


def test_command_names_the_problem_or_the_missing_file(tmp_path, capsys):
    assert form.main([str(save(tmp_path, spoil(good())))]) == 1
    assert "--fix rewrites it" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        form.main([str(tmp_path / "07_none.ipynb")])
    assert "07_none.ipynb" in capsys.readouterr().err
