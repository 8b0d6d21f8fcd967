"""The gate that every notebook passes: stored in one canonical form, and built like a lesson.

Two kinds of rule:

- *bytes*: the file is exactly what nbformat writes (one space of indent, sorted keys, a newline at
  the end), with no outputs, no execution counts and no metadata but what a lesson needs.
  `--fix` rewrites the file so, and changes neither sources nor types, ids or tags.
- *lesson*: tags, their order, headings, length, badges, setup, parameters, exercises, claims, and
  how it reads, as CONTRIBUTING.md describes. The author corrects these.

Usage: python tests/notebooks/form.py [--fix] [NOTEBOOK ...]     (default: notebooks/*.ipynb)
Exit status: 0 all in order, 1 something is not.
"""

import argparse
import json
import sys
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from lesson_rules import RULES, Lesson, Problem, check_address, check_claims
from nbformat import NotebookNode
from nbformat.v4 import reads_json, writes_json
from nbformat.warnings import DuplicateCellId, MissingIDFieldWarning
from reading_rules import check_plain

ROOT = Path(__file__).resolve().parents[2]

NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_METADATA = ("tags",)
#: One sentence to tell a colleague, and the lessons that it builds on; or that it is a capstone.
LESSON_METADATA = ("surprise", "builds_on", "capstone")


def canonical(notebook: NotebookNode) -> bytes:
    """The bytes the file should hold: same sources, types, ids and tags; nothing a run left."""
    cells = []
    for cell in notebook.cells:
        kept = {
            "cell_type": cell.cell_type,
            "metadata": {key: cell.metadata[key] for key in CELL_METADATA if key in cell.metadata},
            "source": cell.source,
        }
        kept |= {key: cell[key] for key in ("id", "attachments") if key in cell}
        if cell.cell_type == "code":
            kept |= {"execution_count": None, "outputs": []}
        cells.append(kept)
    kept = {name: notebook.metadata[name] for name in LESSON_METADATA if name in notebook.metadata}
    metadata = NOTEBOOK_METADATA | kept
    clean = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return (writes_json(nbformat.from_dict(clean)) + "\n").encode("utf-8")


def read(path: Path) -> Lesson | Problem:
    """The notebook in the file, or the reason why there is none to look at."""
    try:
        notebook = reads_json(path.read_text(encoding="utf-8"))
        if notebook.nbformat != 4:
            return Problem(path, "readable", f"notebook format {notebook.nbformat}; 4 is needed")
        with warnings.catch_warnings():
            # ids that are missing or used twice: the rule on ids says it better
            warnings.simplefilter("ignore", MissingIDFieldWarning)
            warnings.simplefilter("ignore", DuplicateCellId)
            nbformat.validate(nbformat.from_dict(json.loads(canonical(notebook))))
    except OSError as error:
        return Problem(path, "readable", f"cannot be read: {error.strerror}")
    except (ValueError, AttributeError, KeyError, TypeError, nbformat.ValidationError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return Problem(path, "readable", f"is no valid notebook: {reason}")
    return Lesson(path, notebook)


def check_bytes(lesson: Lesson) -> Iterator[Problem]:
    if lesson.path.read_bytes() != canonical(lesson.notebook):
        message = "is not as nbformat writes it without what a run left; --fix rewrites it"
        yield lesson.problem("bytes", message)


def gate(
    paths: Sequence[Path], claims: dict, repository: str, *, fix: bool = False
) -> list[Problem]:
    """All problems of these files; with `fix`, they are first put in canonical form.

    `claims` is the `claims` table of claims.toml, `repository` is owner/name.
    """
    problems = []
    for path in paths:
        lesson = read(path)
        if isinstance(lesson, Problem):
            problems.append(lesson)
            continue
        if fix:
            path.write_bytes(canonical(lesson.notebook))
        for rule in (check_bytes, *RULES, check_plain):
            problems += rule(lesson)
        problems += check_address(lesson, repository)
        problems += check_claims(lesson, claims)
    return problems


def load_claims() -> dict:
    text = (ROOT / "labkit" / "course" / "claims.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["claims"]


def load_repository() -> str:
    """The repository's owner/name, from the one place where its address stands."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    address = tomllib.loads(text)["project"]["urls"]["Repository"]
    return address.removeprefix("https://github.com/")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Hold notebooks to the form of a lesson.")
    parser.add_argument("--fix", action="store_true", help="rewrite what the rules fully determine")
    parser.add_argument("notebook", nargs="*", type=Path, help="default: notebooks/*.ipynb")
    options = parser.parse_args(arguments)
    paths = options.notebook or sorted((ROOT / "notebooks").glob("*.ipynb"))
    problems = gate(paths, load_claims(), load_repository(), fix=options.fix)
    for problem in sorted(problems, key=lambda problem: problem.path):
        print(problem)
    print(f"Notebooks: {len(paths)}; departures from the form: {len(problems)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
