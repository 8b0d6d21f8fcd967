"""The gate over the real notebooks, and over bad ones made here: every rule can fail."""

import json
import subprocess
import sys
from pathlib import Path

import form
import pytest
from lesson_rules import CODE_LINES, Lesson, badges, setup_code
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

# name, tag, source; a name's letter says its kind: m(arkdown) or c(ode)
GOOD = [
    ("m-title", "title", f"# Does it halve?\n\n{BADGES}\n\n20 min, any machine."),
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
    ("c-exercise-1", "exercise", 'task = lab.exercise("06-1")\ntask.check(...)'),
    ("m-exercise-2", "exercise", "## Exercise 2"),
    ("c-exercise-2", "exercise", 'task = lab.exercise("06-2")\ntask.check(...)'),
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


def both(first, second):
    def change(notebook):
        first(notebook)
        second(notebook)

    return change


BROKEN = {
    "output kept": ("bytes", "c-plot", lambda nb: cell(nb, "c-plot").update(execution_count=3)),
    "other kernel": (
        "bytes",
        "",
        lambda nb: nb.update(metadata={"kernelspec": {"name": "mine", "display_name": "Mine"}}),
    ),
    "widget state kept": (
        "bytes",
        "",
        lambda nb: nb.update(metadata=form.NOTEBOOK_METADATA | {"widgets": {}}),
    ),
    "cell metadata kept": (
        "bytes",
        "",
        lambda nb: cell(nb, "c-plot")["metadata"].update(collapsed=True),
    ),
    "random id": ("ids", "", lambda nb: cell(nb, "c-plot").update(id="a1b2c3d4")),
    "id of another lesson": ("ids", "", lambda nb: cell(nb, "c-plot").update(id="01-plot")),
    "no tag": ("tags", "m-idea", tagged("m-idea")),
    "two tags": ("tags", "m-idea", tagged("m-idea", "idea", "baseline")),
    "unknown tag": ("tags", "m-idea", tagged("m-idea", "ideas")),
    "section missing": ("tags", "", dropped("c-predict")),
    "claim before plot": ("order", "c-plot", moved("c-claim", "c-plot")),
    "experiment after claim": ("order", "c-again", moved("c-again", "m-explore")),
    "first is no title": ("order", "m-promise", moved("m-promise", "m-title")),
    "last is no result": ("order", "m-takeaway", moved("c-result", "m-takeaway")),
    "too many cells": ("size", "", copied("m-idea", 5)),
    "too few cells": (
        "size",
        "",
        dropped("c-again", "m-again", "m-idea-more", "m-explore", "m-claim", "m-setup", "m-idea"),
    ),
    "too little prose": (
        "size",
        "",
        both(
            dropped("m-setup", "m-claim", "m-again", "m-idea-more", "m-baseline"),
            copied("c-plot", 3),
        ),
    ),
    "too much prose": (
        "size",
        "",
        both(dropped("c-baseline", "c-again", "c-explore", "c-claim"), copied("m-idea", 2)),
    ),
    "long cell": ("size", "c-plot", source("c-plot", "a = 1\n\n" * 19)),
    "empty cell": ("size", "m-idea", source("m-idea", "\n")),
    "second title": ("headings", "", source("m-idea", "# Another?")),
    "no title": ("headings", "", source("m-title", "Does it? 20 min")),
    "level left out": ("headings", "m-idea", source("m-idea", "#### Deep")),
    "title elsewhere": (
        "headings",
        "m-promise",
        both(source("m-title", "20 min"), source("m-promise", "# Does it?\n\n20 min")),
    ),
    "title is no question": ("headings", "m-title", source("m-title", "# Halving\n\n20 min")),
    "no minutes": ("headings", "m-title", source("m-title", "# Does it halve?")),
    "no badges": ("badges", "m-title", source("m-title", "# Does it halve?\n\n20 min")),
    "badges of another lesson": (
        "badges",
        "m-title",
        source("m-title", f"# Does it halve?\n\n{badges('01_b.ipynb', REPOSITORY)}\n\n20 min"),
    ),
    "badges of another repository": (
        "badges",
        "m-title",
        source("m-title", f"# Does it halve?\n\n{badges(FILE, 'bob/course')}\n\n20 min"),
    ),
    "badges at the end": (
        "badges",
        "m-title",
        source("m-title", f"# Does it halve?\n\n20 min\n\n{BADGES}"),
    ),
    "badges twice": (
        "badges",
        "m-title",
        source("m-title", f"# Does it halve?\n\n{BADGES}\n\n{BADGES}\n\n20 min"),
    ),
    "parameter missing": (
        "parameters",
        "c-parameters",
        source("c-parameters", PARAMETERS.replace("seed: int = 0\n", "")),
    ),
    "parameter derived": (
        "parameters",
        "c-parameters",
        source("c-parameters", PARAMETERS + "size: int = steps * 2"),
    ),
    "parameter without type": (
        "parameters",
        "c-parameters",
        source("c-parameters", PARAMETERS.replace("steps: int", "steps")),
    ),
    "parameter without value": (
        "parameters",
        "c-parameters",
        source("c-parameters", PARAMETERS.replace("steps: int = 3", "steps: int")),
    ),
    "parameters no Python": ("parameters", "c-parameters", source("c-parameters", "steps: = 3")),
    "second cell tagged parameters": ("parameters", "", tagged("m-setup", "parameters")),
    "setup of another lesson": (
        "setup",
        "c-setup",
        source("c-setup", setup_code("01", REPOSITORY)),
    ),
    "setup of another repository": (
        "setup",
        "c-setup",
        source("c-setup", setup_code("06", "bob/course")),
    ),
    "setup does more": (
        "setup",
        "c-setup",
        source("c-setup", setup_code("06", REPOSITORY) + "\nlab.seed()"),
    ),
    "no setup": ("setup", "", dropped("c-setup")),
    "exercise without code": ("exercises", "m-exercise-2", dropped("c-exercise-2")),
    "exercise unchecked": (
        "exercises",
        "m-exercise-1",
        source("c-exercise-1", 'lab.exercise("06-1")'),
    ),
    "exercise of another lesson": (
        "exercises",
        "",
        source("c-exercise-1", 'lab.exercise("01-1").check(...)'),
    ),
    "one exercise": ("exercises", "", dropped("m-exercise-2", "c-exercise-2")),
    "no claim": ("claims", "", source("c-claim", "print(1)")),
    "claim only in a comment": ("claims", "", source("c-claim", '# lab.claim("halves-memory")')),
    "unknown claim": ("claims", "c-claim", source("c-claim", 'lab.claim("thirds-memory", 1)')),
    "claim of another lesson": (
        "claims",
        "c-claim",
        source("c-claim", 'lab.claim("of-another", 1)'),
    ),
    "figure in a reading": ("reading", "m-reading", source("m-reading", "It fell by 1.5 GiB.")),
    "figure in MB": ("reading", "m-again", source("m-again", "From **12MB** down.")),
    "no result": ("result", "", source("c-result", "print(x)")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_notebook_fails_by_its_rule(tmp_path, name):
    rule, where, change = BROKEN[name]
    notebook = good()
    change(notebook)
    assert (rule, f"06-{where}" if where else "") in problems(tmp_path, notebook)


NOTHING = "## Verdicts\n\nNo claim is on trial here. Elsewhere a verdict stands here."


def without_claims(tmp_path: Path, text: str, claims: dict) -> list[tuple[str, str]]:
    """What the gate says of lesson 00 that calls no lab.claim and has this text instead."""
    notebook = json.loads(json.dumps(good()).replace("06", "00"))
    notebook["cells"] = [each for each in notebook["cells"] if each["id"] != "00-c-claim"]
    prose = next(each for each in notebook["cells"] if each["id"] == "00-m-claim")
    prose["source"] = text.splitlines(keepends=True)
    path = save(tmp_path, notebook, FILE.replace("06", "00"))
    return [(problem.rule, problem.cell) for problem in form.gate([path], claims, REPOSITORY)]


def test_lesson_with_nothing_on_trial_may_say_so(tmp_path):
    assert without_claims(tmp_path, NOTHING, CLAIMS) == []


@pytest.mark.parametrize(
    "text",
    ["## Verdicts", "No claim is on trial here.", "A verdict on the claim that is on trial."],
)
def test_lesson_with_nothing_on_trial_must_say_so(tmp_path, text):
    assert without_claims(tmp_path, text, CLAIMS) == [("claims", "")]


def test_saying_so_is_not_enough_where_a_claim_is_on_trial(tmp_path):
    claims = CLAIMS | {"of-this": {"lesson": "00"}}
    assert without_claims(tmp_path, NOTHING, claims) == [("claims", "")]


def test_same_id_twice_fails(tmp_path):
    notebook = good()
    cell(notebook, "m-again")["id"] = "06-m-reading"
    assert problems(tmp_path, notebook) == [("ids", "06-m-reading")]


def test_cell_without_id_fails(tmp_path):
    notebook = good()
    del cell(notebook, "m-again")["id"]
    assert [rule for rule, _ in problems(tmp_path, notebook)] == ["ids"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"nbformat": 4}', '{"nbformat": 3, "metadata": {}, "cells": []}', "\ufeff{}"],
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


@pytest.mark.parametrize("layout", [{"indent": 4}, {"separators": (",", ":")}, {}])
def test_fix_gives_the_canonical_bytes_and_keeps_the_content(tmp_path, layout):
    wanted = save(tmp_path, good()).read_bytes()
    path = tmp_path / FILE
    path.write_text(json.dumps(spoil(good()), **layout), encoding="utf-8", newline="\r\n")
    before = content(path)
    assert {problem.rule for problem in form.gate([path], CLAIMS, REPOSITORY)} == {"bytes"}
    assert form.gate([path], CLAIMS, REPOSITORY, fix=True) == []
    assert path.read_bytes() == wanted
    assert content(path) == before
    assert list(tmp_path.glob("*.tmp")) == []


def test_fix_leaves_what_an_author_must_mend(tmp_path):
    notebook = good()
    source("m-reading", "It fell by 1.5 GiB.  \n\n")(notebook)
    cell(notebook, "m-reading")["attachments"] = {"a.png": {"image/png": "AA=="}}
    path = save(tmp_path, notebook)
    before = path.read_bytes()
    [problem] = form.gate([path], CLAIMS, REPOSITORY, fix=True)
    assert problem.rule == "reading"
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m-title", "# Does it halve?\n\n20 min, any machine."),
        ("m-title", "# Does it halve?\n20 min, any machine."),
        ("m-title", GOOD[0][2].replace(REPOSITORY, "bob/old")),
        ("m-title", GOOD[0][2].replace("20 min", f"{BADGES}\n\n20 min")),
        ("c-setup", "import labkit as lab"),
        ("c-setup", setup_code("01", "bob/old")),
    ],
)
def test_fix_writes_badges_and_setup(tmp_path, name, text):
    wanted = save(tmp_path, good()).read_bytes()
    notebook = good()
    source(name, text)(notebook)
    path = save(tmp_path, notebook)
    assert form.gate([path], CLAIMS, REPOSITORY) != []
    assert form.gate([path], CLAIMS, REPOSITORY, fix=True) == []
    assert path.read_bytes() == wanted


def test_fix_makes_no_title_where_there_is_none(tmp_path):
    notebook = good()
    source("m-title", "Does it halve? 20 min")(notebook)
    path = save(tmp_path, notebook)
    before = path.read_bytes()
    found = form.gate([path], CLAIMS, REPOSITORY, fix=True)
    assert {problem.rule for problem in found} == {"badges", "headings"}
    assert path.read_bytes() == before


def test_setup_is_short_and_its_lines_are_no_longer_than_others():
    lines = setup_code("06", REPOSITORY).splitlines()
    assert sum(bool(line) for line in lines) <= CODE_LINES
    assert all(len(line) <= 100 for line in lines)


def test_lesson_number_is_that_of_the_file():
    assert (
        Lesson(Path("notebooks/17_nvme_offload.ipynb"), reads_json(json.dumps(good()))).number
        == "17"
    )


# --- command line --------------------------------------------------------------------------------


def command(*arguments: object) -> subprocess.CompletedProcess:
    line = [sys.executable, form.__file__, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_command_names_the_problem_and_fails(tmp_path):
    path = save(tmp_path, spoil(good()))
    done = command(path)
    assert done.returncode == 1
    assert "--fix rewrites it" in done.stdout


def test_command_says_which_file_is_missing(tmp_path):
    done = command(tmp_path / "07_none.ipynb")
    assert done.returncode == 2
    assert "07_none.ipynb" in done.stderr
