"""How a lesson went, on disk: ``NAME.json`` beside the executed notebook, for the report."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from gpumem.files import read_file, write_atomic
from gpumem.inputs import InputError, read_record
from gpumem.runs import Seconds
from gpumem.units import format_bytes
from labkit.course.check import result_of
from labkit.lesson.notebooks import read_notebook
from labkit.lesson.results import Result

Status = Literal["passed", "failed", "interrupted", "not started"]


@dataclass(frozen=True)
class Outcome:
    """How one lesson's execution went; what it found is its `Result`.

    ``number`` is "" for a notebook without one, ``notebook`` a file in the output folder or "".
    ``host_peak_bytes`` is the most CPU memory that its kernel and the kernel's descendants used
    together, as sampled, so a lower bound; None if it was not sampled.
    """

    number: str
    name: str
    title: str
    status: Status
    problems: tuple[str, ...] = ()
    seconds: Seconds = 0.0
    notebook: str = ""
    date: str = ""
    host_peak_bytes: Annotated[int, Meta(ge=0, lt=1 << 60)] | None = None

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def host_peak(self) -> str:
        """``host_peak_bytes`` with its unit; a dash if it was not sampled."""
        return "–" if self.host_peak_bytes is None else format_bytes(self.host_peak_bytes)


def store(outcome: Outcome, partial: Path, folder: Path) -> Outcome:
    """Give the notebook its name and write the outcome beside it."""
    passed, failed = folder / f"{outcome.name}.ipynb", folder / f"{outcome.name}.failed.ipynb"
    target = passed if outcome.passed else failed
    try:
        if partial.exists():
            os.replace(partial, target)
            outcome = replace(outcome, notebook=target.name)
        (failed if outcome.passed else passed).unlink(missing_ok=True)
        text = json.dumps(asdict(outcome), indent=1) + "\n"
        write_atomic(folder / f"{outcome.name}.json", text)
    except OSError as error:
        problem = f"its outcome could not be stored in {folder}: {error.strerror or error}"
        return replace(outcome, status="failed", problems=(*outcome.problems, problem))
    return outcome


def read_outcomes(folder: Path) -> list[Outcome]:
    """Read all outcomes stored in ``folder``, by name; an `InputError` says why there are none."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; `labkit run --out {folder}` makes it")
    outcomes = [
        read_file(path, lambda record: read_record(Outcome, record, "it"), "an outcome")
        for path in sorted(folder.glob("*.json"))
    ]
    if not outcomes:
        raise InputError(f"{folder} holds no outcomes; `labkit run --out {folder}` makes them")
    return outcomes


def stored_result(outcome: Outcome, folder: Path) -> Result | None:
    """Return the result in an outcome's notebook; None if it has none that can be read."""
    with suppress(InputError):  # the outcome's problems already say so
        return result_of(read_notebook(folder / outcome.notebook)) if outcome.notebook else None
