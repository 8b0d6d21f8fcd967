"""The gate over the real notebooks, and over one that is spoiled here: every rule can fail."""

import json
import re
from pathlib import Path

import form
import pytest
from reading_rules import check_plain

NOTEBOOKS = sorted((form.ROOT / "notebooks").glob("*.ipynb"))
CLAIMS, REPOSITORY = form.load_claims(), form.load_repository()
[LESSON] = (path for path in NOTEBOOKS if path.name.startswith("06_"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_in_form(path):
    assert [str(problem) for problem in form.gate([path], CLAIMS, REPOSITORY)] == []


# --- bad notebooks -------------------------------------------------------------------------------


def cell(book: dict, tag: str, kind: str = "code") -> dict:
    """The first cell with that tag, of that kind."""
    cells = (each for each in book["cells"] if each["metadata"]["tags"] == [tag])
    return next(each for each in cells if each["cell_type"] == kind)


def source(tag, pattern, text, kind="code"):
    """A change of all of a cell's source that ``pattern`` finds."""

    def change(book):
        found = cell(book, tag, kind)
        before = "".join(found["source"])
        found["source"] = re.sub(pattern, lambda _: text, before, flags=re.DOTALL)
        assert found["source"] != before

    return change


def tagged(tag, *tags):
    return lambda book: cell(book, tag, "markdown")["metadata"].update(tags=list(tags))


def claim_before_plot(book):
    cells = book["cells"]
    claim, plot = cell(book, "claim"), cell(book, "plot")
    cells.remove(claim)
    cells.insert(cells.index(plot), claim)


def few_cells(book):
    del book["cells"][5:20]


BROKEN = {
    "output kept": ("bytes", lambda book: cell(book, "plot").update(execution_count=3)),
    "random id": ("ids", lambda book: cell(book, "plot").update(id="a1b2c3d4")),
    "no tag": ("tags", tagged("idea")),
    "claim before plot": ("order", claim_before_plot),
    "last is no result": ("order", lambda book: book["cells"].pop()),
    "too few cells": ("size", few_cells),
    "long cell": ("size", source("plot", "^", "a = 1\n\n" * 26)),
    "second title": ("headings", source("idea", "^", "# Another?\n\n", "markdown")),
    "level left out": ("headings", source("idea", "^", "#### Deep\n\n", "markdown")),
    "title is no question": ("headings", source("title", r"\?\n", ".\n", "markdown")),
    "no minutes": ("headings", source("title", "min", "hours", "markdown")),
    "badges of another": ("badges", source("title", REPOSITORY, "bob/course", "markdown")),
    "parameter missing": ("parameters", source("parameters", "seed: int = 0", "")),
    "parameter derived": (
        "parameters",
        source("parameters", "int = 0", "int = 2 * 3"),
    ),
    "second parameters cell": ("parameters", tagged("idea", "parameters")),
    "setup of another": ("setup", source("setup", REPOSITORY, "bob/course")),
    "exercise unchecked": ("exercises", source("exercise", r"\.check\(", ".hint(")),
    "claim of another": ("claims", source("claim", ".+", 'lab.claim("of-another", 1)')),
    "claim only in a comment": ("claims", source("claim", ".+", '# lab.claim("one", 1)')),
    "figure in a reading": ("reading", source("reading", "$", "It fell by 1.5 GiB.", "markdown")),
}


PLAIN = {
    "code": (
        "if n := 3: pass",
        "ways = {'plain': lambda x: x}",
        "rows = [[a for a in b] for b in c]",
        "first, second = 1, 2",
        "first = second = 1",
        "word = 'a' if x else 'b' if y else 'c'",
        "names = ['a'] * flag",
        "last = list(found)[-1]",
    ),
    "length": ("\n".join(["a = 1"] * 151),),
    "prose": ("**The peak (of all).**", "It is dear.", "( " * 13),
    "surprise": ("**The peak falls.**", "The peak rises."),
    "minutes": ("word " * 9000,),
}


@pytest.mark.parametrize(("rule", "text"), [(rule, text) for rule in PLAIN for text in PLAIN[rule]])
def test_what_is_hard_to_read_is_named(rule, text):
    """In a capstone, too, which has no surprise."""
    lesson = form.read(LESSON)
    lesson.notebook.cells = [
        each for each in lesson.cells if each.metadata.tags[0] in ("title", "plot", "reading")
    ]
    for each in lesson.tagged("plot", "code"):
        each.source = text if rule in ("code", "length") else "a = 1"
    for each in lesson.tagged("reading", "markdown"):
        each.source = text if rule not in ("code", "length") else ""
    lesson.notebook.metadata["surprise"] = "The peak rises."
    assert rule in {problem.rule for problem in check_plain(lesson)}
    lesson.notebook.metadata["capstone"] = True
    found = {problem.rule for problem in check_plain(lesson)}
    assert (rule in found) == (rule != "surprise")


def save(path: Path, book: dict) -> Path:
    text = json.dumps(book, indent=1, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", BROKEN)
def test_broken_notebook_fails_by_its_rule(tmp_path, name):
    rule, change = BROKEN[name]
    book = json.loads(LESSON.read_text(encoding="utf-8"))
    change(book)
    found = form.gate([save(tmp_path / LESSON.name, book)], CLAIMS, REPOSITORY)
    assert rule in {problem.rule for problem in found}


@pytest.mark.parametrize(
    "text",
    ["{", '{"nbformat": 4}', '{"nbformat": 3, "metadata": {}, "cells": []}'],
)
def test_file_that_is_no_notebook_is_named(tmp_path, text):
    path = tmp_path / "06_bad.ipynb"
    path.write_text(text, encoding="utf-8")
    assert [problem.rule for problem in form.gate([path], CLAIMS, REPOSITORY)] == ["readable"]


def test_fix_gives_the_canonical_bytes(tmp_path, capsys):
    """Of a lesson as an editor might leave it."""
    book = json.loads(LESSON.read_text(encoding="utf-8"))
    book["metadata"] |= {"kernelspec": {"display_name": "x", "name": "x"}, "widgets": {"a": 1}}
    for each in book["cells"]:
        each["source"] = "".join(each["source"])
        each["metadata"]["ExecuteTime"] = 1
        if each["cell_type"] == "code":
            output = {"name": "stdout", "output_type": "stream", "text": "hello"}
            each |= {"execution_count": 7, "outputs": [output]}
    path = tmp_path / LESSON.name
    path.write_text(json.dumps(book, indent=4), encoding="utf-8", newline="\r\n")
    assert {problem.rule for problem in form.gate([path], CLAIMS, REPOSITORY)} == {"bytes"}
    assert form.main([str(path)]) == 1
    assert "--fix rewrites it" in capsys.readouterr().out
    assert form.gate([path], CLAIMS, REPOSITORY, fix=True) == []
    assert path.read_bytes() == LESSON.read_bytes()
