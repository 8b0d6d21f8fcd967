"""Lessons on disk: find and copy them, read their parameters, check the values people pass.

The parameters cell of a lesson holds annotated literals, one a line:

    batch_size: int = 8
    size: str = "auto"  # "auto", "cpu" or "gpu"

Annotations say what a value may be (int, float, bool or str); where the comment quotes two or more
texts, those are the only ones allowed. Limits: the cell is parsed, never executed.
"""

import ast
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gpumem.files import SOURCE, read_file, write_atomic
from gpumem.inputs import InputError, one_of, positive_int, shown
from gpumem.units import MIB, format_bytes

MOST_TEXT = 1000  # characters of a parameter's value
MOST_BYTES = 100 * MIB  # of a notebook's file, with all pictures in it
#: `labkit start` leaves it beside the lessons that it copies.
COPIED = ".gpu-memory-lab.json"
#: What opens and runs lessons is an extra.
INSTALL = (
    "pip install 'gpu-memory-lab[notebooks] @ git+https://github.com/gpu-memory-lab/gpu-memory-lab'"
)
_NUMBERS = {"int": int, "float": float}


@dataclass(frozen=True)
class Lesson:
    """A notebook: ``number`` ("06", or "" for a notebook without one), ``name``, ``path``."""

    number: str
    name: str
    path: Path


class Parameter(NamedTuple):
    """One line of a parameters cell; ``choices`` is empty where any value of its kind will do."""

    kind: str
    default: Any
    choices: tuple[str, ...]


def course_folder() -> Path:
    """Return the folder of the course's lessons: the clone's, else the package's own copy."""
    beside = SOURCE / "notebooks"
    return beside if beside.is_dir() else SOURCE / "labkit" / "notebooks"


def default_folder() -> Path:
    """Return the working directory if `labkit start` made it, else `course_folder`."""
    here = Path.cwd()
    return here if (here / COPIED).is_file() else course_folder()


def notebooks_of(folder: Path) -> list[Path]:
    """Return the notebooks of ``folder`` whose names begin with a lesson's number, in order."""
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def lesson_at(path: Path) -> Lesson:
    """Return the lesson that the notebook at ``path`` holds."""
    match = re.match(r"(\d\d)_", path.stem, re.ASCII)
    return Lesson(match[1] if match else "", path.stem, path.resolve())


def find(selected: Iterable[str] = (), *, folder: Path | None = None) -> list[Lesson]:
    """Return the lessons that ``selected`` names, each once; all of ``folder`` if it names none.

    A name is ``6``, ``06``, ``gradient_checkpointing``, ``06_gradient_checkpointing``, or a path.
    An `InputError` says that there is no such lesson or file, or none at all.
    """
    folder = folder or default_folder()
    course = [lesson_at(path) for path in notebooks_of(folder)]
    lessons = list(dict.fromkeys(_find_one(name, course) for name in selected)) or course
    if not lessons:
        raise InputError(
            f"no lessons in {folder}; run this in the course's folder, or give a notebook's path"
        )
    if len({lesson.name for lesson in lessons}) < len(lessons):
        raise InputError("two notebooks of one name: run them with different --out folders")
    return lessons


def _find_one(name: str, course: Sequence[Lesson]) -> Lesson:
    if name.endswith(".ipynb") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise InputError(f"there is no notebook {path}")
        return lesson_at(path)
    known = {lesson.name: lesson for lesson in course}
    for lesson in course:
        if name.lower().replace("-", "_") == lesson.name[3:] or name.zfill(2) == lesson.number:
            return lesson
    return known[one_of(name.replace("-", "_"), known, "lesson")]


def copy_lessons(folder: Path) -> tuple[list[str], list[str]]:
    """Copy the course's lessons into ``folder``; return the files written, and those left alone.

    Left alone is what the learner has changed, and the course, too, since it was copied. A notebook
    that was run and saved counts as changed. Lessons that the course no longer has stay. An
    `InputError` says that the record of what was copied earlier cannot be read.
    """
    record = folder / COPIED
    hashes = partial(msgspec.convert, type=dict[str, str])
    copied = read_file(record, hashes, "a record of lessons") if record.exists() else {}
    written, kept = [], []
    for source in notebooks_of(course_folder()):
        name, text = source.name, source.read_text(encoding="utf-8")
        new, old = _hash(text), None
        if (target := folder / name).exists():
            old = _hash(target.read_text(encoding="utf-8", errors="replace"))
        if old in (None, new, copied.get(name)):
            if old != new:
                write_atomic(target, text)
                written.append(name)
            copied[name] = new
        elif copied.get(name) != new:
            kept.append(name)
    write_atomic(record, json.dumps(copied, indent=1) + "\n")
    return written, kept


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_notebook(path: Path) -> Any:
    """Read the notebook at ``path`` in nbformat 4, or raise `InputError`."""
    import nbformat

    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"it is larger than {format_bytes(MOST_BYTES)}")
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)  # reading only logs what is wrong
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    # nbformat raises its own errors, ValueError, KeyError or AttributeError, as the file has it
    except Exception as error:
        text = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise InputError(f"{path} is not a valid notebook: {text}") from error
    return notebook


def title_of(notebook: Any, lesson: Lesson) -> str:
    """Return the first heading of the notebook, else the lesson's name."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (match := re.search(r"^# +(.+)$", cell.source, re.M)):
            return re.sub(r"[*`]", "", match[1]).strip()
    return lesson.name


def declared_parameters(notebook: Any) -> dict[str, Parameter]:
    """Return the parameters that the notebook's cell tagged ``parameters`` declares, in order."""
    declared = {}
    for cell in notebook.cells:
        if cell.cell_type != "code" or "parameters" not in cell.metadata.get("tags", []):
            continue
        try:
            statements = ast.parse(cell.source).body
        except SyntaxError:
            continue  # executing the cell reports it
        lines = cell.source.splitlines()
        for line in statements:
            if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Constant):
                comment = lines[line.end_lineno - 1][line.end_col_offset :]
                choices = tuple(re.findall(r'"([^"]+)"', comment))
                declared[ast.unparse(line.target)] = Parameter(
                    kind=ast.unparse(line.annotation),
                    default=line.value.value,
                    choices=choices if len(choices) > 1 else (),
                )
    return declared


def check_parameters(
    pairs: Iterable[tuple[str, str]], declared: Mapping[str, Parameter], lesson: str
) -> dict[str, Any]:
    """Return the values of ``-p NAME VALUE`` pairs, each of the kind that the lesson declares."""
    values = {}
    for name, text in pairs:
        if not declared:
            raise InputError(f"lesson {lesson} has no parameters, so -p {name} cannot be set")
        known = one_of(name, declared, f"parameter of lesson {lesson}")
        values[known] = check_value(known, text, declared[known])
    return values


def check_value(name: str, text: str, parameter: Parameter) -> Any:
    """Return ``text`` as the value of the parameter ``name``; an `InputError` refuses others."""
    if len(text) > MOST_TEXT or not text.isprintable():
        raise InputError(f"{name} must be printable text of at most {MOST_TEXT} characters")
    if parameter.kind == "str":
        return _text(name, text, parameter.choices)
    if parameter.kind == "bool":
        return one_of(text, ("true", "false"), f"value of {name}") == "true"
    if parameter.kind not in _NUMBERS:
        raise InputError(f"{name} is of type {parameter.kind}, which -p cannot set")
    try:
        value = _NUMBERS[parameter.kind](text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        example = parameter.default
        raise InputError(f"{name} must be a value such as {example!r}, not {shown(text)}")
    if value == 0 and (name == "seed" or parameter.default == 0):
        return value
    return positive_int(value, name) if parameter.kind == "int" else value


def _text(name: str, text: str, choices: Sequence[str]) -> str:
    if name == "gpu":  # before the choices: the comment may quote a few GPUs as examples
        from gpumem.hardware.catalogue import gpu

        found = gpu(text)
        if found.bandwidth_gb_per_s is None:
            raise InputError(
                f"lessons compare speeds, too, and nothing is known of the speed of {text}: "
                "name a GPU that `labkit gpus` lists"
            )
        return found.key
    return one_of(text, choices, name) if choices else text
