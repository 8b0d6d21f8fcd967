"""What a lesson found: the record that notebooks emit, the runner checks and `results/` keeps.

A notebook shows it as data of MIME type ``RESULT_MIME`` (``lab.result``). What real GPUs gave for a
lesson is in ``results/<gpu>/<lesson>.json``.

Limits: traces are not stored. A number that is not finite is written as the text ``"nan"``,
``"inf"`` or ``"-inf"``, because JSON has no such numbers; only losses become numbers again.
"""

import json
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from gpumem.files import SOURCE, Read, read_file, write_atomic
from gpumem.hardware.this_machine import Machine
from gpumem.inputs import InputError, read_record, shown
from gpumem.runs import Run, Seconds, Text, Whole
from gpumem.units import format_bytes
from labkit.lesson.claims import Verdict, judge

RESULT_MIME = "application/vnd.labkit.result+json"

#: What a record may hold by itself.
Plain = Whole | float | str | bool | None
#: In ISO 8601, UTC.
Date = Annotated[str, Meta(pattern=r"^\d{4}-\d{2}-\d{2}T", max_length=40)]


class JudgementRecord(TypedDict):
    """A ``claims.Judgement`` as it is stored; what its claim says is in ``claims.toml``."""

    id: str
    verdict: Verdict
    measured: NotRequired[Plain | dict[str, Plain]]
    by_condition: NotRequired[dict[str, str]]
    mode: NotRequired[str | None]


class Recorded:
    """A record of the ``machine`` that made it."""

    machine: Machine

    @property
    def phantom(self) -> bool:
        return self.machine.phantom

    @property
    def where(self) -> str:
        """The machine's name, for a label; that of a GPU that is not there says so."""
        return f"a phantom {self.machine.name}" if self.phantom else self.machine.name


@dataclass(frozen=True)
class Result(Recorded):
    """What one execution of a lesson found and hands in.

    ``lesson`` is two digits; ``parameters`` are what it ran with, ``runs`` those of its figures,
    without traces; ``seconds`` pass from ``lab.start`` to ``lab.result``, at ``date``.
    """

    lesson: Annotated[str, Meta(pattern=r"^[0-9]{2}\Z")]
    title: Text
    machine: Machine
    parameters: dict[str, Plain | list[Plain]]
    runs: tuple[Run, ...]
    judgements: tuple[JudgementRecord, ...]
    seconds: Seconds
    date: Date
    schema: Literal[1] = 1

    def __str__(self) -> str:
        # A simulation goes on after its failure: such a peak is none that the device had.
        peaks = sorted(run.peak_bytes for run in self.runs if not run.oom)
        ends = dict.fromkeys(map(format_bytes, peaks[:1] + peaks[-1:]))
        span = ", peak " if len(ends) == 1 else ", peaks " if ends else ""
        runs = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        how = ", ".join(dict.fromkeys(run.label for run in self.runs))
        found = f"Lesson {self.lesson}: {runs} ({how}){span}{' to '.join(ends)}"
        if failed := len(self.runs) - len(peaks):
            found += f"; {failed} ran out of memory"
        judged = ", ".join(f"{each['id']}: {each['verdict']}" for each in self.judgements)
        return f"{found}. Verdicts: {judged or 'none'}."

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        runs = [run.to_dict() for run in self.runs]
        return plain(vars(self) | {"machine": asdict(self.machine), "runs": runs})

    @classmethod
    def from_dict(cls, record: Any) -> "Result":
        """Read back what ``to_dict`` wrote; an `InputError` names what is wrong or impossible."""
        if isinstance(record, Mapping) and isinstance(record.get("runs"), list):
            record = {**record, "runs": [_read_run(run) for run in record["runs"]]}
        found = read_record(cls, record, "a result")
        for number, run in enumerate(found.runs, 1):
            for problem in impossible(run):
                raise InputError(f"run {number} ({run.name}): {problem}")
        return found

    def broken_invariants(self) -> list[str]:
        """Return one sentence for each thing that is wrong with the verdicts, or if no run is
        there."""
        broken = [] if self.runs else ["the result holds no runs"]
        for entry in self.judgements:
            id, verdict = entry["id"], entry["verdict"]
            try:
                again = judge(id, entry.get("measured"), entry.get("mode")).verdict
            except InputError as error:
                broken.append(str(error))
                continue
            if again != verdict:
                text = f"is recorded as {str(verdict)!r}, but its rule gives {again!s}"
                broken.append(f"claim {id!r} {text}")
        judged = Counter(entry["id"] for entry in self.judgements)
        broken += [f"claim {id!r} is judged twice" for id in sorted(judged) if judged[id] > 1]
        return broken


def impossible(run: Run) -> list[str]:
    """Return what cannot be true of a real run, one phrase each."""
    problems = []
    if run.peak_bytes <= 0 and run.oom is None:
        problems.append("its peak is 0 bytes")
    if run.step_peaks_bytes and max(run.step_peaks_bytes) > run.peak_bytes:
        problems.append("one step's peak is above the peak of the whole run")
    if run.reserved_bytes is not None and run.reserved_bytes < run.peak_bytes:
        problems.append("it reserved fewer bytes than it allocated")
    real = run.mode in ("measured", "phantom")
    if real and run.capacity_bytes and run.peak_bytes > run.capacity_bytes:
        problems.append("it was measured above the capacity of its device")
    if run.mode in ("simulated", "phantom") and (run.losses or run.step_seconds):
        problems.append("a simulation has neither losses nor seconds")
    if run.oom is not None and run.oom.live_bytes > run.peak_bytes:
        problems.append("more bytes were live when memory ran out than at the peak")
    return problems


# --- reading and writing -----------------------------------------------------------------------


def _read_run(record: Any) -> Run:
    """Read the run of which ``plain(run.to_dict())`` was stored; raises as ``Run.from_dict``."""
    losses = record.get("losses") if isinstance(record, Mapping) else None
    if isinstance(losses, list):
        numbers = [float(loss) if loss in ("nan", "inf", "-inf") else loss for loss in losses]
        record = {**record, "losses": numbers}
    return Run.from_dict(record)


def plain(value: Any) -> Any:
    """Return ``value`` as JSON holds it: texts for numbers that are not finite, lists for tuples.

    An `InputError` says what cannot be stored.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return str(value)  # of an enumeration, too
    if value is None or isinstance(value, bool | int | float):
        return value
    raise InputError(
        f"{shown(value)} cannot be stored: a result holds texts, numbers and lists of them"
    )


def save(result: Result, path: Path | str) -> None:
    """Write ``result`` to ``path`` as JSON, atomically."""
    write_atomic(Path(path), json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n")


def lesson_number(lesson: str | int) -> str:
    """Return ``lesson`` as two digits; an `InputError` says that it is no number from 0 to 99."""
    text = str(lesson)
    if not re.fullmatch(r"\d{1,2}", text, re.ASCII):
        raise InputError(f"a lesson's number is from 0 to 99, for example '06', not {lesson!r}")
    return text.zfill(2)


def versions_text(
    machine: Machine, packages: Sequence[str] | None = ("torch", "transformers")
) -> str:
    """Return the versions of these packages, or of all, on a machine as text."""
    found = machine.versions
    return ", ".join(f"{name} {found[name]}" for name in packages or found if found.get(name))


# --- recorded on GPUs --------------------------------------------------------------------------


def result_folders() -> list[Path]:
    """Return the folders of recorded results: the repository's, then the package's own copy."""
    return [f for f in (SOURCE / "results", SOURCE / "labkit" / "recorded") if f.is_dir()]


def load_recorded(path: Path) -> Result:
    """Read ``<gpu>/<lesson>.json``, as `read_file` does; refuse it if it is of another lesson."""
    found = read_file(path, Result.from_dict, "a result")
    if found.lesson != path.stem:
        raise InputError(f"{path} holds a result of lesson {found.lesson!r}")
    return found


def results_of(lesson: str | int) -> list[Result]:
    """Return what GPUs gave for ``lesson``, one result per GPU, real ones before phantoms."""
    found = read_folders(f"{lesson_number(lesson)}.json", load_recorded)
    return sorted(found.values(), key=lambda result: result.phantom)


def all_recorded() -> dict[str, list[Result]]:
    """Return what each GPU gave for all lessons, by the name of its folder, ordered by lesson."""
    by_gpu: dict[str, list[Result]] = defaultdict(list)
    for (gpu, _), result in read_folders("[0-9]*.json", load_recorded).items():
        by_gpu[gpu].append(result)
    return dict(by_gpu)


def read_folders(pattern: str, load: Callable[[Path], Read]) -> dict[tuple[str, str], Read]:
    """Return what ``load`` reads from each ``<gpu>/<pattern>``, by GPU and file stem, sorted.

    What phantom GPUs gave is in ``phantom/<gpu>``, which is then the GPU's name here. A file that
    ``load`` refuses with `InputError` is named in a warning and left out.
    """
    found: dict[tuple[str, str], Read] = {}
    for base in result_folders():
        for path in sorted([*base.glob(f"*/{pattern}"), *base.glob(f"phantom/*/{pattern}")]):
            gpu = path.parent.relative_to(base).as_posix()
            try:
                found.setdefault((gpu, path.stem), load(path))
            except InputError as error:
                warnings.warn(f"recorded file left out: {error}", UserWarning, stacklevel=3)
    return dict(sorted(found.items()))
