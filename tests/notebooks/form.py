"""The gate that every notebook passes: stored in one canonical form, and built like a lesson.

The rules are those of CONTRIBUTING.md: bytes as nbformat writes them without what a run left, ids,
tags and their order, length, headings, badges, setup, parameters, exercises, claims, and code that
reads at first sight. `--fix` puts the bytes in order, and changes neither sources nor types, ids or
tags; the author corrects the rest. Limits: code is read, not executed, and a reader judges prose.

Usage: python tests/notebooks/form.py [--fix] [NOTEBOOK ...]     (default: notebooks/*.ipynb)
Exit status: 0 all in order, 1 something is not.
"""

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from labkit.lesson.notebooks import declared_parameters

ROOT = Path(__file__).resolve().parents[2]

NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
#: One sentence to tell a colleague, and the lessons that it builds on; or that it is a capstone.
LESSON_METADATA = ("surprise", "builds_on", "capstone")

TAGS = (
    *("title", "promise", "setup", "parameters", "idea", "baseline", "predict", "experiment"),
    *("plot", "reading", "claim", "explore", "exercise", "takeaway", "result"),
)
# A lesson may ask, try and read more than once before it judges its claims.
REPEATED = ("predict", "experiment", "plot", "reading")
# A capstone teaches nothing new: it sets a job.
NOT_IN_CAPSTONES = ("predict", "plot", "reading", "claim", "explore")
PARAMETERS = ["batch_size", "gpu", "precision", "seed", "size", "steps"]
CELLS, CAPSTONE_CELLS = (20, 30), (12, 20)
EXERCISES, CAPSTONE_EXERCISES = (2, 3), (1, 1)
CODE_LINES, LESSON_LINES, MOST_MINUTES = 25, 125, 30
#: What readers needed.
WORDS_A_MINUTE, SECONDS_A_LINE, MINUTES_AN_EXERCISE = 200, 7, 6
#: Cells of which a learner reads little: the first two are equal in every lesson.
NOT_READ = ("setup", "parameters", "result", "exercise")

# Both pictures stand at addresses that the two services give for this use. Where nothing may be
# fetched, the words in their place are the link.
BADGES = """\
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]\
(https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name})
[![Launch on Binder](https://mybinder.org/badge_logo.svg)]\
(https://mybinder.org/v2/gh/{repository}/main?urlpath=lab%2Ftree%2Fnotebooks%2F{name})"""
# pip keeps what the running kernel has loaded or what is built for its GPU as it is, or stops.
SETUP = """\
# Where labkit is missing, as on Colab, this installs it; PyTorch and the others named here stay as
# they are, and no restart is needed. Where it is installed, on your machine, this changes nothing.
import importlib.util

if importlib.util.find_spec("labkit") is None:
    stays = "torch|torchvision|torchaudio|numpy|pandas|ipython|ipykernel|ipywidgets"
    %pip list --format=freeze | grep -E "^({{stays}})==" > stays.txt
    %pip install -q -c stays.txt "gpu-memory-lab[course] @ git+https://github.com/{repository}"

import torch

import labkit as lab

here = lab.start("{number}")"""

FIGURE_WITH_UNIT = re.compile(r"\d[\d.,]*\s*(?:[KMGT]i?B|bytes)\b")
BOLD = re.compile(r"\*\*(.+?)\*\*", re.DOTALL)
MINUTES = re.compile(r"^(\d+)(?= min\b)", re.MULTILINE)
NOT_PROSE = re.compile(
    r"<details>.*?</details>|```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$|\[!\[.*?\n|\]\([^)]*\)",
    re.DOTALL,
)
#: What a run may end: a number, or two things compared.
COMPARISON = re.compile(
    r"\d|\b(?:more|less|fewer|most|least|half|twice|double[sd]?|third|quarter|fifth|tenth|times"
    r"|nothing|none|never|only|larg(?:er|est)|small(?:er|est)|high(?:er|est)|low(?:er|est)|long(?:er|est)"
    r"|short(?:er|est)|fast(?:er|est)|slow(?:er|est)|same|equal|all but|nearly|almost"
    r"|two|three|four|five|six|seven|eight|nine|ten|dozen)\b",
    re.IGNORECASE,
)
SENTENCE_ENDS = re.compile(r"(?<=[.!?:])\s+(?=[A-Z*])|\n\n")
#: A cell that says what its run gave, or stops where it gave something else.
GUARD = re.compile(r"\b(?:print|expect|claim|outcome)\(")
#: Sentences with a number or a comparison that nothing above prints or expects: facts that no run
#: decides, and what a figure or a table shows. Somebody has read each beside the output.
LISTED = Path(__file__).with_name("unguarded_sentences.txt")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Lesson:
    """A parsed notebook, with what it is held to."""

    path: Path
    notebook: NotebookNode
    claims: dict
    repository: str

    @property
    def number(self) -> str:
        return self.path.name[:2]

    @property
    def capstone(self) -> bool:
        return bool(self.notebook.metadata.get("capstone"))

    @property
    def cells(self) -> list[NotebookNode]:
        return self.notebook.cells

    def tagged(self, tag: str, kind: str) -> list[NotebookNode]:
        return [cell for cell in self.cells if tag_of(cell) == tag and cell.cell_type == kind]

    def read_code(self) -> list[NotebookNode]:
        """The cells of code that a learner reads, exercises left out."""
        code = (cell for cell in self.cells if cell.cell_type == "code")
        return [cell for cell in code if tag_of(cell) not in NOT_READ]


def tag_of(cell: NotebookNode) -> str:
    """The cell's tag; nothing if it has not exactly one."""
    tags = cell.metadata.get("tags", [])
    return tags[0] if len(tags) == 1 else ""


def canonical(notebook: NotebookNode) -> bytes:
    """The bytes the file should hold: same sources, types, ids and tags; nothing a run left."""
    cells = []
    for cell in notebook.cells:
        kept = {
            key: cell[key] for key in ("cell_type", "source", "id", "attachments") if key in cell
        }
        kept["metadata"] = {"tags": cell.metadata.tags} if "tags" in cell.metadata else {}
        if cell.cell_type == "code":
            kept |= {"execution_count": None, "outputs": []}
        cells.append(kept)
    kept = {name: notebook.metadata[name] for name in LESSON_METADATA if name in notebook.metadata}
    clean = {
        "cells": cells,
        "metadata": NOTEBOOK_METADATA | kept,
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return (nbformat.v4.writes_json(nbformat.from_dict(clean)) + "\n").encode("utf-8")


# --- the rules: each yields a sentence for each departure -----------------------------------------


def check_bytes(lesson: Lesson) -> Iterator[str]:
    if lesson.path.read_bytes() != canonical(lesson.notebook):
        yield "is not as nbformat writes it without what a run left; --fix rewrites it"


def check_ids_and_tags(lesson: Lesson) -> Iterator[str]:
    pattern = re.compile(rf"{lesson.number}-[a-z0-9]+(-[a-z0-9]+)*")
    ids = [cell.get("id", "") for cell in lesson.cells]
    for name in ids:
        if not pattern.fullmatch(name) or ids.count(name) > 1:
            yield f"id {name!r}: one like {lesson.number}-setup is needed, no other cell's"
    tags = [tag_of(cell) for cell in lesson.cells]
    if strange := [name for name, tag in zip(ids, tags, strict=True) if tag not in TAGS]:
        yield f"{strange} need one tag each, of {', '.join(TAGS)}"
        return
    for tag in TAGS:
        if tag not in tags and not (lesson.capstone and tag in NOT_IN_CAPSTONES):
            yield f"no cell is tagged {tag}"
    furthest = 0
    for name, tag in zip(ids, tags, strict=True):
        if TAGS.index(tag) < furthest and not {tag, TAGS[furthest]} <= {*REPEATED}:
            yield f"{name}: {tag} stands after {TAGS[furthest]}"
        furthest = max(furthest, TAGS.index(tag))


def check_size(lesson: Lesson) -> Iterator[str]:
    fewest, most = CAPSTONE_CELLS if lesson.capstone else CELLS
    if not fewest <= len(lesson.cells) <= most:
        yield f"{len(lesson.cells)} cells; {fewest} to {most} are wanted"
    for cell in lesson.cells:
        signatures = re.findall(r"^def \w+\(\n(.*?)^\)", cell.source, re.DOTALL | re.MULTILINE)
        lines = sum(bool(line.strip()) for line in cell.source.splitlines())
        lines -= sum(text.count("\n") for text in signatures)  # a parameter a line reads easily
        if cell.cell_type == "code" and lines > CODE_LINES and tag_of(cell) != "setup":
            yield f"{cell.id}: {lines} lines of code; at most {CODE_LINES}"
    lines = sum(map(lines_of, lesson.read_code()))
    if lines > LESSON_LINES:
        yield f"{lines} lines of code; at most {LESSON_LINES}: what is not the subject?"


def check_title(lesson: Lesson) -> Iterator[str]:
    """A question, and the minutes that it takes; headings below leave no level out."""
    prose = "\n".join(cell.source for cell in lesson.cells if cell.cell_type == "markdown")
    prose = re.sub(r"^(```|~~~).*?^\1", "", prose, flags=re.MULTILINE | re.DOTALL)
    level, titles = 0, []
    for marks, text in re.findall(r"^(#{1,6})\s+(.+?)\s*$", prose, flags=re.MULTILINE):
        if len(marks) > level + 1:
            yield f"{text!r} is a heading of level {len(marks)} after one of level {level}"
        level = len(marks)
        titles += [text] * (level == 1)
    first = lesson.cells[0].source
    if len(titles) != 1 or not first.startswith(f"# {titles[0]}") or not titles[0].endswith("?"):
        yield "the one heading of level 1 is a question, in the first cell"
    said, takes = MINUTES.search(first), minutes(lesson)
    if not said or int(said[1]) != takes or takes > MOST_MINUTES:
        yield f"takes {takes} minutes: the title says so, and {MOST_MINUTES} are the most"


def check_address(lesson: Lesson) -> Iterator[str]:
    """Badges and setup cell as the repository's address, owner/name, gives them."""
    wanted = BADGES.format(name=lesson.path.name, repository=lesson.repository)
    if f"\n\n{wanted}\n\n" not in lesson.cells[0].source:
        yield f"below the title must stand:\n{wanted}"
    setup = SETUP.format(number=lesson.number, repository=lesson.repository)
    if [cell.source for cell in lesson.tagged("setup", "code")] != [setup]:
        yield f"its setup cell must be:\n{setup}"


def check_parameters(lesson: Lesson) -> Iterator[str]:
    # papermill puts its values after the first cell with the tag, whatever its kind
    if [cell.cell_type for cell in lesson.cells if tag_of(cell) == "parameters"] != ["code"]:
        yield "one code cell, and no other, is tagged parameters"
    elif sorted(declared_parameters(lesson.notebook)) != PARAMETERS:
        yield f"declares {', '.join(PARAMETERS)} as literals with a type: `steps: int = 3`"


def check_exercises(lesson: Lesson) -> Iterator[str]:
    code = "\n".join(cell.source for cell in lesson.tagged("exercise", "code"))
    found = re.findall(r'lab\.exercise\("([^"]*)"', code)
    fewest, most = CAPSTONE_EXERCISES if lesson.capstone else EXERCISES
    wanted = [f"{lesson.number}-{place}" for place in range(1, len(found) + 1)]
    if found != wanted or not fewest <= len(found) <= most or code.count(".check(") < len(found):
        yield f"{fewest} to {most} exercises, {wanted} in order, each with .check(...); not {found}"


def check_claims(lesson: Lesson) -> Iterator[str]:
    called = set()
    for cell in lesson.tagged("claim", "code"):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "lab.claim":
                called |= {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}
    own = {name for name, entry in lesson.claims.items() if entry["lesson"] == lesson.number}
    if (own and not called) or called - own:
        yield f"judges {sorted(called)}; claims.toml has {sorted(own)} for this lesson"


def check_readings(lesson: Lesson) -> Iterator[str]:
    """No figure of one machine, and the surprise in bold, once, word for word."""
    text = "\n".join(cell.source for cell in lesson.tagged("reading", "markdown"))
    for figure in FIGURE_WITH_UNIT.findall(text):
        yield f"{figure!r} holds on one machine only; say it in words, or print it"
    surprise = lesson.notebook.metadata.get("surprise", "")
    bold = [" ".join(each.split()) for each in BOLD.findall(text)]
    if not lesson.capstone and bold.count(surprise) != 1:
        yield f"no reading says in bold, once: {surprise}"


def unguarded(lesson: Lesson) -> Iterator[str]:
    """Sentences of readings with a number or a comparison, where the cell of code above prints,
    predicts and expects nothing."""
    above = ""
    for cell in lesson.cells:
        if cell.cell_type == "code" and tag_of(cell) != "exercise":
            above = cell.source
        if tag_of(cell) == "reading" and cell.cell_type == "markdown" and not GUARD.search(above):
            for sentence in SENTENCE_ENDS.split(NOT_PROSE.sub("...", cell.source)):
                if COMPARISON.search(sentence):
                    yield " ".join(sentence.split())


def check_guards(lesson: Lesson) -> Iterator[str]:
    """What a run may end stands below its output or its `expect`, or no run decides it."""
    lines = LISTED.read_text(encoding="utf-8").splitlines()
    listed = {line[3:] for line in lines if line[:2] == lesson.number}
    said = set(unguarded(lesson))
    for sentence in sorted(said - listed):
        yield f"no cell above prints or expects this: {sentence!r}; if no run decides it, list it"
    for sentence in sorted(listed - said):
        yield f"{LISTED.name} has a sentence that the lesson does not: {sentence!r}"


def check_code(lesson: Lesson) -> Iterator[str]:
    """What makes a learner read a line twice."""
    for cell in lesson.read_code():
        code = re.sub(r"^[%!].*$", "pass", cell.source, flags=re.MULTILINE)
        for node in ast.walk(ast.parse(code)):
            if message := packed(node):
                yield f"{cell.id}: {message}: {ast.unparse(node).splitlines()[0][:50]}"


def packed(node: ast.AST) -> str:
    """What to write instead of ``node``; nothing if it reads at first sight."""
    inner = list(ast.walk(node))[1:]
    match node:
        case ast.NamedExpr():
            return "assign on a line before"
        case ast.Dict() | ast.List() | ast.Tuple() | ast.Set():
            if any(isinstance(each, ast.Lambda) for each in inner):
                return "a table of lambdas; define functions with names"
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            if len(node.generators) > 1 or any(isinstance(each, COMPREHENSIONS) for each in inner):
                return "a comprehension within another; write a loop"
        case ast.Assign(targets=[_, _, *_]) | ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()):
            return "several assignments in one; a line for each"
        case ast.IfExp():
            if any(isinstance(each, ast.IfExp) for each in inner):
                return "a choice within a choice; write if and elif"
    return ""


def lines_of(cell: NotebookNode) -> int:
    lines = (line.strip() for line in cell.source.splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def minutes(lesson: Lesson) -> int:
    """How long a reader takes for prose, code and exercises, without boxes that stay closed."""
    texts = (cell.source for cell in lesson.cells if cell.cell_type == "markdown")
    words = sum(len(NOT_PROSE.sub("", text).split()) for text in texts)
    lines = sum(map(lines_of, lesson.read_code()))
    exercises = len(lesson.tagged("exercise", "code"))
    reading = words / WORDS_A_MINUTE + lines * SECONDS_A_LINE / 60
    return round(reading + exercises * MINUTES_AN_EXERCISE)


RULES = (
    *(check_bytes, check_ids_and_tags, check_size, check_title, check_address, check_parameters),
    *(check_exercises, check_claims, check_readings, check_guards, check_code),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Hold notebooks to the form of a lesson.")
    parser.add_argument("--fix", action="store_true", help="rewrite what a run or an editor left")
    parser.add_argument("notebook", nargs="*", type=Path, help="default: notebooks/*.ipynb")
    options = parser.parse_args(arguments)
    claims = tomllib.loads((ROOT / "labkit/lesson/claims.toml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"].removeprefix("https://github.com/")
    paths = options.notebook or sorted((ROOT / "notebooks").glob("*.ipynb"))
    problems = 0
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        lesson = Lesson(path, notebook, claims["claims"], repository)
        if options.fix:
            title = lesson.cells[0]
            title.source = MINUTES.sub(str(minutes(lesson)), title.source)
            path.write_bytes(canonical(notebook))
        for problem in (problem for rule in RULES for problem in rule(lesson)):
            problems += 1
            print(f"{path}: {problem}")
    print(f"Notebooks: {len(paths)}; departures from the form: {problems}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
