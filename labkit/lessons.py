"""Lessons on disk: find them, read their parameters, check the values people pass.

The parameters cell of a lesson holds annotated literals, one a line:

    batch_size: int = 8
    size: str = "auto"  # "auto", "cpu" or "gpu"

Its annotations say what a value may be; where the comment quotes two or more texts, those are
the only ones allowed. Limits: the cell is parsed, never executed.
"""

import ast
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from labkit.memory import MIB, InputError, format_bytes, one_of, positive_int, shown

PACKAGE = Path(__file__).resolve().parent
#: Characters that a parameter's value may have.
MOST_TEXT = 1000
#: Of a notebook's file, with all pictures in it.
MOST_BYTES = 100 * MIB
#: Where `labkit run` writes unless told otherwise.
RUN_FOLDER = Path("build", "course")
_JSON_MIME = re.compile(r"application/(.*\+)?json")


@dataclass(frozen=True)
class Lesson:
    """A notebook: ``number`` ("06", or "" for a notebook without one), ``name``, ``path``."""

    number: str
    name: str
    path: Path

    @property
    def topic(self) -> str:
        """``gradient_checkpointing`` for ``06_gradient_checkpointing``."""
        return self.name[3:] if self.number else self.name


class Parameter(NamedTuple):
    """One line of a parameters cell; ``choices`` is empty where any value of its kind will do."""

    kind: str
    default: Any
    choices: tuple[str, ...]


# --- finding -----------------------------------------------------------------------------------


def default_folder() -> Path:
    """The course's ``notebooks`` folder: beside the package, else in the working directory."""
    beside = PACKAGE.parent / "notebooks"
    return beside if beside.is_dir() else Path.cwd() / "notebooks"


def lesson_at(path: Path) -> Lesson:
    """The lesson that the notebook at ``path`` holds."""
    match = re.match(r"(\d\d)_", path.stem, re.ASCII)
    return Lesson(match[1] if match else "", path.stem, path.resolve())


def find(selected: Iterable[str] = (), *, folder: Path | None = None) -> list[Lesson]:
    """The lessons that ``selected`` names, each once; all of ``folder`` if it names none.

    Each name is a number (``6``, ``06``), a name (``gradient_checkpointing`` or
    ``06_gradient_checkpointing``), or the path of a notebook.

    Raises:
        InputError: no such lesson or file, or there are no lessons at all.
    """
    folder = folder or default_folder()
    course = [lesson_at(path) for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))]
    selected = list(selected)
    lessons = [_find_one(name, course) for name in selected] if selected else course
    if not lessons:
        raise InputError(
            f"no lessons in {folder}; run this in the course's folder, or give a notebook's path"
        )
    unique = {lesson.path: lesson for lesson in lessons}
    names: dict[str, Lesson] = {}
    for lesson in unique.values():
        other = names.setdefault(lesson.name, lesson)
        if other is not lesson:
            raise InputError(
                f"{lesson.path} and {other.path} have one name, and so would their results; "
                "run them one after the other with different --out folders"
            )
    return list(unique.values())


def _find_one(name: str, course: Sequence[Lesson]) -> Lesson:
    if name.endswith(".ipynb") or "/" in name or "\\" in name:
        return _find_path(Path(name))
    if re.fullmatch(r"\d{1,2}", name, re.ASCII):
        for lesson in course:
            if lesson.number == name.zfill(2):
                return lesson
    by_name = {known: lesson for lesson in course for known in (lesson.topic, lesson.name)}
    folded = name.lower().replace("-", "_")
    if folded in by_name:
        return by_name[folded]
    names = [lesson.name for lesson in course]
    if near := difflib.get_close_matches(folded, by_name, n=1, cutoff=0.4):
        hint = f" Did you mean {by_name[near[0]].name!r}?"
    elif name.isdigit() and course:
        nearest = min(course, key=lambda lesson: abs(int(lesson.number) - int(name)))
        hint = f" The nearest is {nearest.name!r}."
    else:
        hint = ""
    raise InputError(
        f"unknown lesson {name!r}.{hint} "
        f"A lesson is a number, a name or a notebook's path. Known: {', '.join(names) or 'none'}."
    )


def _find_path(path: Path) -> Lesson:
    if path.is_file():
        if path.suffix != ".ipynb":
            raise InputError(f"{path} is not a notebook: a lesson's file ends in .ipynb")
        return lesson_at(path)
    parent = path.parent
    beside = [p.name for p in parent.glob("*.ipynb")] if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.4)
    hint = f" Did you mean {parent / near[0]}?" if near else ""
    raise InputError(f"there is no notebook {path}.{hint}")


def read_notebook(path: Path) -> Any:
    """The notebook at ``path`` in nbformat 4.

    Raises:
        InputError: it cannot be read or is not a notebook.
    """
    import nbformat

    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"it is larger than {format_bytes(MOST_BYTES)}")
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook, relax_add_props=True)  # reading only logs what is wrong
        _check_contents(notebook)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    # nbformat raises its own errors, ValueError, KeyError or AttributeError, as the file has it
    except Exception as error:
        text = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise InputError(f"{path} is not a valid notebook: {text}") from error
    return notebook


def is_of_its_type(bundle: Mapping[str, Any]) -> bool:
    """Whether what stands under each MIME type is text, in one piece or in lines, or JSON."""
    return all(
        _JSON_MIME.fullmatch(kind)
        or isinstance(value, str)
        or (isinstance(value, list) and all(isinstance(line, str) for line in value))
        for kind, value in bundle.items()
    )


def _check_contents(notebook: Any) -> None:
    """Refuse what no Jupyter program writes and the schema, relaxed, lets pass: we look into it."""
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    bundles = [output.get("data", {}) for output in shown]
    bundles += [each for cell in notebook.cells for each in cell.get("attachments", {}).values()]
    if not all(is_of_its_type(bundle) for bundle in bundles):
        raise InputError("what an output or an attachment shows must be text or JSON")
    parts = [notebook, *notebook.cells]
    written = [part.metadata.get("papermill", {}) for part in parts]
    written += [entry.get("parameters", {}) for entry in written if isinstance(entry, Mapping)]
    if not all(isinstance(entry, Mapping) for entry in written):
        raise InputError("papermill's metadata must be objects")


def title_of(notebook: Any, lesson: Lesson) -> str:
    """The first heading of the notebook, else the lesson's name."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (match := re.search(r"^# +(.+)$", cell.source, re.M)):
            return re.sub(r"[*`]", "", match[1]).strip()
    return lesson.name


# --- parameters --------------------------------------------------------------------------------


def declared_parameters(notebook: Any) -> dict[str, Parameter]:
    """The parameters that the notebook's cell tagged ``parameters`` declares, in order.

    Lines that are not assignments of a literal are left out: they cannot be replaced safely.
    """
    declared: dict[str, Parameter] = {}
    for cell in notebook.cells:
        if cell.cell_type != "code" or "parameters" not in cell.metadata.get("tags", []):
            continue
        try:
            statements = ast.parse(cell.source).body
        except SyntaxError:
            continue  # executing the cell reports it
        lines = cell.source.splitlines()
        for statement in statements:
            declared.update(_declaration(statement, lines))
    return declared


def _declaration(statement: ast.stmt, lines: Sequence[str]) -> dict[str, Parameter]:
    if isinstance(statement, ast.AnnAssign):
        target, kind = statement.target, ast.unparse(statement.annotation)
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target, kind = statement.targets[0], ""
    else:
        return {}
    if not isinstance(target, ast.Name) or statement.value is None:
        return {}
    try:
        default = ast.literal_eval(statement.value)
    except ValueError:
        return {}
    comment = lines[(statement.end_lineno or 1) - 1][statement.end_col_offset or 0 :]
    choices = tuple(dict.fromkeys(re.findall(r'"([^"]+)"', comment)))
    allowed = choices if isinstance(default, str) and len(choices) > 1 else ()
    return {target.id: Parameter(kind or type(default).__name__, default, allowed)}


def check_parameters(
    pairs: Iterable[tuple[str, str]], declared: Mapping[str, Parameter], lesson: str
) -> dict[str, Any]:
    """The values of ``-p NAME VALUE`` pairs, each of the kind that the lesson declares.

    Raises:
        InputError: the lesson has no such parameter, or the value will not do.
    """
    values = {}
    for name, text in pairs:
        if not declared:
            raise InputError(f"lesson {lesson} has no parameters, so -p {name} cannot be set")
        known = one_of(name, declared, f"parameter of lesson {lesson}")
        values[known] = check_value(known, text, declared[known])
    return values


def check_value(name: str, text: str, parameter: Parameter) -> Any:
    """``text`` as the value of the parameter ``name``.

    Raises:
        InputError: it is not of the parameter's kind, or not among what is allowed.
    """
    if len(text) > MOST_TEXT or not _can_be_stored(text):
        raise InputError(f"{name} must be a text of at most {MOST_TEXT} characters, in Unicode")
    kind = parameter.kind.replace(" ", "")
    if kind.endswith("|None"):
        if text.lower() == "none":
            return None
        kind = kind.removesuffix("|None")
    if kind == "int":
        return _whole_number(name, text, parameter.default)
    if kind == "float":
        return _number(name, text)
    if kind == "bool":
        return one_of(text, ("true", "false"), f"value of {name}") == "true"
    if kind == "str":
        return _text(name, text, parameter.choices)
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise InputError(
            f"{name} must be a literal such as {parameter.default!r}, not {shown(text)}"
        ) from error
    if type(value) is not type(parameter.default) or not _is_json(value):
        raise InputError(f"{name} must be of the kind of {parameter.default!r}, not {shown(text)}")
    return value


def _can_be_stored(text: str) -> bool:
    """Whether UTF-8 has all its characters: bytes of a command line that are none have no code."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_json(value: Any) -> bool:
    """Whether ``value`` reaches the notebook as it is: by way of JSON."""
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int | None) or (isinstance(value, str) and _can_be_stored(value))


def _whole_number(name: str, text: str, default: Any) -> int:
    try:
        value = int(text)
    except ValueError as error:
        raise InputError(
            f"{name} must be a whole number such as {default}, not {shown(text)}"
        ) from error
    if value == 0 and (name == "seed" or default == 0):
        return 0
    return positive_int(value, name)


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise InputError(f"{name} must be a number, not {shown(text)}") from error
    if not math.isfinite(value):
        raise InputError(f"{name} must be a finite number, not {shown(text)}")
    return value


def _text(name: str, text: str, choices: Sequence[str]) -> str:
    if name == "gpu":  # before the choices: the comment may quote a few cards as examples
        from labkit.hardware import gpu

        return gpu(text).key
    if choices:
        return one_of(text, choices, name)
    if name == "precision":
        from labkit.models import PRECISIONS

        return one_of(text, PRECISIONS, "precision")
    if name in ("model", "model_name"):
        from labkit.models import model_info

        return model_info(text).name
    return text
