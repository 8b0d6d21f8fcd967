"""What a lesson found: the record that notebooks emit, the runner checks and `results/` keeps.

- ``Result``: runs, judgements, parameters, machine and date of one execution of one lesson.
- A notebook shows it as data of MIME type ``RESULT_MIME`` (``lab.result``).
- ``save`` and ``load``: JSON files, written atomically, never trusted when read.
- ``recorded``: what real GPUs gave for a lesson, from ``results/<gpu>/<lesson>.json``;
  ``all_recorded``: for every lesson, by GPU. A broken file is named and left out.

Limits: traces are not kept, only the numbers of a run. A loss that is not finite is written as
the text ``"nan"``, ``"inf"`` or ``"-inf"``, because JSON has no such numbers.
"""

import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from labkit import claims
from labkit.memory import InputError, Run, format_bytes, is_plain, one_of, shown

RESULT_MIME = "application/vnd.labkit.result+json"
SCHEMA = 1
LARGEST_FILE_BYTES = 20 << 20
MOST_SECONDS = 1e9  # thirty years
PACKAGE = Path(__file__).resolve().parent
Read = TypeVar("Read")


@dataclass(frozen=True)
class Result:
    """One execution of one lesson.

    Attributes:
        lesson: two digits, ``"06"``.
        title: the lesson's title, for people.
        machine: the fields of ``hardware.Machine``: kind, name, versions and so on.
        parameters: what the lesson ran with (numbers, texts, booleans or None).
        runs: the runs shown in its figures, without traces.
        judgements: one object per claim: ``id``, ``says``, ``claimed``, ``verdict``,
            ``measured``, ``unit``, ``by_condition``, ``mode``, ``reasons``, ``sources``.
        seconds: from ``lab.start`` to ``lab.result``.
        date: when, in ISO 8601, UTC.
    """

    lesson: str
    title: str
    machine: Mapping[str, Any]
    parameters: Mapping[str, Any]
    runs: tuple[Run, ...]
    judgements: tuple[Mapping[str, Any], ...]
    seconds: float
    date: str

    @property
    def where(self) -> str:
        """The machine's name, for a label."""
        return str(self.machine["name"])

    def __str__(self) -> str:
        peaks = [run.peak_bytes for run in self.runs]
        span = f"peaks {format_bytes(min(peaks))} to {format_bytes(max(peaks))}" if peaks else ""
        verdicts = ", ".join(f"{j['id']}: {j['verdict']}" for j in self.judgements)
        return (
            f"Lesson {self.lesson}: {len(self.runs)} runs on {self.where}, {span}. "
            f"Verdicts: {verdicts or 'none'}."
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return {
            "schema": SCHEMA,
            "lesson": self.lesson,
            "title": self.title,
            "machine": plain(self.machine),
            "parameters": plain(self.parameters),
            "runs": [plain(run.to_dict()) for run in self.runs],
            "judgements": [plain(judgement) for judgement in self.judgements],
            "seconds": self.seconds,
            "date": self.date,
        }

    @classmethod
    def from_dict(cls, record: Any) -> "Result":
        """Read back what ``to_dict`` wrote; nothing in it is trusted.

        Raises:
            InputError: a field is missing, unknown, of the wrong kind or out of range.
        """
        return _read_result(record)

    def broken_invariants(self) -> list[str]:
        """One sentence for each thing that cannot be true of a real result; empty if none."""
        broken = [] if self.runs else ["the result holds no runs"]
        for number, run in enumerate(self.runs, 1):
            name = f"run {number} ({run.name})"
            broken += [f"{name}: {problem}" for problem in impossible(run)]
        broken += [problem for j in self.judgements for problem in _misjudged(j)]
        ids = [judgement["id"] for judgement in self.judgements]
        broken += [f"claim {i!r} is judged twice" for i in sorted(set(ids)) if ids.count(i) > 1]
        return broken


def impossible(run: Run) -> list[str]:
    """What cannot be true of a real run, a phrase each; empty if nothing is wrong."""
    problems = []
    if run.peak_bytes <= 0 and run.oom is None:
        problems.append("its peak is 0 bytes")
    if run.step_peaks_bytes and max(run.step_peaks_bytes) > run.peak_bytes:
        problems.append("one step's peak is above the peak of the whole run")
    if run.reserved_bytes is not None and run.reserved_bytes < run.peak_bytes:
        problems.append("it reserved fewer bytes than it allocated")
    if run.mode == "measured" and run.capacity_bytes and run.peak_bytes > run.capacity_bytes:
        problems.append("it was measured above the capacity of its device")
    if run.mode == "simulated" and (run.losses or run.step_seconds):
        problems.append("a simulation has neither losses nor seconds")
    if run.oom is not None and run.oom.live_bytes > run.peak_bytes:
        problems.append("more bytes were live when memory ran out than at the peak")
    return problems


def _misjudged(judgement: Mapping[str, Any]) -> list[str]:
    id, verdict = judgement["id"], judgement["verdict"]
    try:
        again = claims.judge(id, judgement.get("measured"), judgement.get("mode")).verdict
    except InputError as error:
        return [str(error)]
    if again != verdict:
        return [f"claim {id!r} is recorded as {verdict!r}, but its rule gives {again!s}"]
    return []


# --- reading, nothing trusted ------------------------------------------------------------------


def _read_result(record: Any) -> Result:
    names = {"schema", *Result.__dataclass_fields__}
    if not isinstance(record, Mapping):
        raise InputError(f"a result must be an object, not {type(record).__name__}")
    if missing := names - set(record):
        raise InputError(f"a result needs the field {sorted(missing)[0]!r}")
    if unknown := set(record) - names:
        raise InputError(f"a result has no field {shown(sorted(map(str, unknown))[0])}")
    if record["schema"] != SCHEMA or isinstance(record["schema"], bool):
        raise InputError(
            f"result schema {shown(record['schema'])} is not {SCHEMA}, the one we read"
        )
    lesson = record["lesson"]
    if not isinstance(lesson, str) or not re.fullmatch(r"\d\d", lesson, re.ASCII):
        raise InputError(f"lesson must be two digits such as '06', not {shown(lesson)}")
    if not isinstance(record["title"], str) or len(record["title"]) > 200:
        raise InputError("title must be a text of at most 200 characters")
    machine = read_machine(record["machine"])
    for key in ("runs", "judgements"):
        if not isinstance(record[key], list | tuple):
            raise InputError(f"{key} must be a list")
    return Result(
        lesson=lesson,
        title=record["title"],
        machine=machine,
        parameters=_read_parameters(record["parameters"]),
        runs=tuple(read_run(run) for run in record["runs"]),
        judgements=tuple(_read_judgement(judgement) for judgement in record["judgements"]),
        seconds=read_seconds(record["seconds"]),
        date=read_date(record["date"]),
    )


def _read_parameters(record: Any) -> dict[str, Any]:
    if not isinstance(record, Mapping):
        raise InputError("parameters must be an object")
    for name, value in record.items():
        items = value if isinstance(value, list | tuple) else [value]
        if not all(is_plain(item) for item in items):
            raise InputError(
                f"parameter {shown(name)} must be a plain value or a list of them, not "
                f"{shown(value)}"
            )
    return dict(record)


def _read_judgement(record: Any) -> dict[str, Any]:
    if not isinstance(record, Mapping):
        raise InputError("a judgement must be an object")
    for key in ("id", "verdict"):
        if not isinstance(record.get(key), str):
            raise InputError(f"a judgement needs the text {key!r}")
    for key in ("mode", "says", "claimed", "unit"):
        if not isinstance(record.get(key), str | None):
            raise InputError(
                f"a judgement's {key} must be a text or null, not {shown(record[key])}"
            )
    for key in ("sources", "reasons"):
        items = record.get(key, ())
        if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
            raise InputError(f"a judgement's {key} must be a list of texts, not {shown(items)}")
    for key in ("measured", "by_condition"):
        value = record.get(key)
        items = value.values() if isinstance(value, Mapping) else [value]
        if not all(is_plain(item) for item in items):
            raise InputError(
                f"a judgement's {key} must be a plain value or an object of them, not "
                f"{shown(value)}"
            )
    return {**record, "verdict": one_of(record["verdict"], claims.Verdict, "verdict")}


def read_run(record: Any) -> Run:
    """The run of which ``plain(run.to_dict())`` was stored.

    Raises:
        InputError: as ``Run.from_dict``.
    """
    return Run.from_dict(_with_floats(record))


def read_machine(record: Any) -> dict[str, Any]:
    """The fields of a ``hardware.Machine``, of which ``kind`` and ``name`` must be there.

    Raises:
        InputError: they are not, or a field is of another kind than it is there.
    """
    if not isinstance(record, Mapping):
        raise InputError("machine must be an object")
    for key in ("kind", "name"):
        if not isinstance(record.get(key), str) or len(record[key]) > 200:
            raise InputError(f"machine needs the text {key!r}, of at most 200 characters")
    versions = record.get("versions", {})
    if not isinstance(versions, Mapping):
        raise InputError(f"machine's versions must be an object, not {shown(versions)}")
    for key, value in [*record.items(), *versions.items()]:
        if key != "versions" and not is_plain(value):
            raise InputError(f"machine's {shown(key)} must be a plain value, not {shown(value)}")
    if not all(isinstance(version, str | None) for version in versions.values()):
        raise InputError("machine's versions must be texts or null")
    return dict(record)


def read_seconds(value: Any) -> float:
    """A duration.

    Raises:
        InputError: not a number, or negative.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < MOST_SECONDS:
        raise InputError(f"seconds must be a number, not negative, not {shown(value)}")
    return float(value)


def read_date(value: Any) -> str:
    """A date as text.

    Raises:
        InputError: not in ISO 8601.
    """
    try:
        datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"date must be in ISO 8601, not {shown(value)}") from error
    return value


_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def plain(value: Any) -> Any:
    """``value`` as JSON holds it: texts for numbers that are not finite, lists for tuples."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        f"{shown(value)} cannot be stored: a result holds texts, numbers and lists of them"
    )


def _with_floats(record: Any) -> Any:
    """The losses of a run record as numbers again."""
    if not isinstance(record, Mapping) or not isinstance(record.get("losses"), list | tuple):
        return record
    losses = [
        _NOT_FINITE.get(loss, loss) if isinstance(loss, str) else loss for loss in record["losses"]
    ]
    return {**record, "losses": losses}


# --- files -------------------------------------------------------------------------------------


def write_atomic(path: Path, text: str) -> None:
    """Write ``text`` so that ``path`` holds either what it held before, or all of it.

    Raises:
        OSError: the folder cannot be written or the disk is full; ``path`` is untouched then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def save(result: Result, path: Path | str) -> None:
    """Write ``result`` to ``path`` as JSON, atomically.

    Raises:
        OSError: as ``write_atomic``.
    """
    write_atomic(Path(path), json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n")


def load(path: Path | str) -> Result:
    """The result stored at ``path``.

    Raises:
        InputError: there is no such file, it is too large, not JSON, or not a valid result.
    """
    return read_file(Path(path), Result.from_dict, "a result")


def read_file(path: Path, read: Callable[[Any], Read], what: str) -> Read:
    """What ``read`` makes of the JSON in ``path``.

    Raises:
        InputError: there is no such file, it is too large, not JSON, or ``read`` refuses it.
    """
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise InputError(f"{path} is larger than {format_bytes(LARGEST_FILE_BYTES)}")
        return read(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # InputError is a ValueError too
        raise InputError(f"{path} is not {what} we can read: {error}") from error


def lesson_number(lesson: str | int) -> str:
    """``lesson`` as two digits.

    Raises:
        InputError: it is not a number from 0 to 99.
    """
    text = str(lesson)
    if not re.fullmatch(r"\d{1,2}", text, re.ASCII):
        raise InputError(f"a lesson's number is from 0 to 99, for example '06', not {lesson!r}")
    return text.zfill(2)


def result_folders() -> list[Path]:
    """Where recorded results are looked for: the repository's, then the package's own copy."""
    return [f for f in (PACKAGE.parent / "results", PACKAGE / "recorded") if f.is_dir()]


def known_lessons() -> set[str]:
    """The numbers of the course's lessons: those with a notebook or with exercises."""
    notebooks = (PACKAGE.parent / "notebooks").glob("[0-9][0-9]_*.ipynb")
    exercises = (PACKAGE / "exercises").glob("lesson_[0-9][0-9].py")
    return {path.name[:2] for path in notebooks} | {path.stem[-2:] for path in exercises}


def load_recorded(path: Path) -> Result:
    """The result of a recording, ``<gpu>/<lesson>.json``.

    Raises:
        InputError: as ``load``; or the course has no such lesson, the result is of another one,
            or it holds a run that cannot be.
    """
    if path.stem not in known_lessons():
        raise InputError(f"{path}: the course has no lesson {path.stem!r}")
    found = load(path)
    if found.lesson != path.stem:
        raise InputError(f"{path} holds a result of lesson {found.lesson!r}")
    for number, run in enumerate(found.runs, 1):
        for problem in impossible(run):
            raise InputError(f"{path}: run {number} ({run.name}): {problem}")
    return found


def recorded(lesson: str | int, *, folder: Path | str | None = None) -> list[Result]:
    """What real GPUs gave for ``lesson``, one result per GPU, ordered by the GPU's name.

    Args:
        lesson: ``"06"`` or ``6``.
        folder: holds ``<gpu>/<lesson>.json``; the course's own recordings if None.

    A file that cannot be read is named in a warning and left out.

    Raises:
        InputError: ``lesson`` is not a number.
    """
    found = read_folders(folder, f"{lesson_number(lesson)}.json", load_recorded)
    return list(found.values())


def all_recorded(folder: Path | str | None = None) -> dict[str, list[Result]]:
    """What each GPU gave for all lessons, by the name of its folder, ordered by lesson.

    Args:
        folder: holds ``<gpu>/<lesson>.json``; the course's own recordings if None.

    A file that cannot be read, or is of a lesson that the course has not, is named in a warning
    and left out.
    """
    found = read_folders(folder, "[0-9]*.json", load_recorded)
    return {gpu: [result for (name, _), result in found.items() if name == gpu]
            for gpu, _ in found}  # fmt: skip


def read_folders(
    folder: Path | str | None, pattern: str, load: Callable[[Path], Read]
) -> dict[tuple[str, str], Read]:
    """What ``load`` reads from each ``<gpu>/<pattern>``, by GPU and file stem, in that order.

    Args:
        folder: holds a folder per GPU; the course's own recordings if None.

    A file that ``load`` refuses with `InputError` is named in a warning and left out.
    """
    found: dict[tuple[str, str], Read] = {}
    for base in [Path(folder)] if folder is not None else result_folders():
        for path in sorted(base.glob(f"*/{pattern}")):
            try:
                found.setdefault((path.parent.name, path.stem), load(path))
            except InputError as error:
                warnings.warn(f"recorded file left out: {error}", UserWarning, stacklevel=3)
    return dict(sorted(found.items()))
