"""How a lesson went, on disk: ``NAME.json`` beside the executed notebook.

An outcome is written atomically when its lesson ends; resuming and reporting read it. Its
fingerprint says what it depended on. Limits: the fingerprint covers the lesson's cells, labkit and
the recorded results, not what a lesson reads besides; so lesson 23, which reads what the others
found, is not executed again because they were.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from labkit.course.check import result_of
from labkit.course.lessons import read_notebook
from labkit.course.results import Result, Seconds, result_folders
from labkit.support.files import PACKAGE, read_file, write_atomic
from labkit.values import InputError, format_bytes, read_record

if TYPE_CHECKING:
    from labkit.hardware.this_machine import Machine

#: The environment variable that names the folder of the run that a kernel belongs to.
RUN_VARIABLE = "LABKIT_RUN_FOLDER"
Status = Literal["passed", "failed", "interrupted", "not started"]


@dataclass(frozen=True)
class Outcome:
    """How one lesson went.

    Attributes:
        number, name, title: of the lesson; the number is "" for a notebook without one.
        problems: what is wrong, one sentence each; empty if it passed.
        seconds: from the start of its process to the end of the check.
        fingerprint: of source, parameters and environment.
        notebook: file name in the output folder; "" if there is none.
        date: when it ended, ISO 8601, UTC.
        reused: it was not executed now, an earlier run's outcome still holds.
        host_peak_bytes: most CPU memory that its kernel and the kernel's descendants used
            together, as sampled, so a lower bound; None if it was not sampled.
    """

    number: str
    name: str
    title: str
    status: Status
    problems: tuple[str, ...] = ()
    seconds: Seconds = 0.0
    fingerprint: str = ""
    notebook: str = ""
    date: str = ""
    reused: bool = False
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


def environment_hash(machine: "Machine") -> str:
    """Return a digest of what a notebook's outputs depend on besides the notebook.

    That is: labkit's sources, the recorded results that lessons show, the machine with the versions
    of Python and the main packages, and the variables that choose its GPUs and their allocator.
    """
    digest = hashlib.sha256()
    files = [path for end in ("py", "toml", "j2") for path in PACKAGE.rglob(f"*.{end}")]
    named = [(path.relative_to(PACKAGE).as_posix(), path) for path in files]
    named += [(str(path), path) for each in result_folders() for path in each.rglob("*.json")]
    for name, path in sorted(named):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    variables = ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    here = [machine.kind, machine.name, machine.capacity_bytes, dict(machine.versions)]
    rest = [here, [os.environ.get(name) for name in variables]]
    digest.update(json.dumps(rest, sort_keys=True).encode())
    return digest.hexdigest()


def fingerprint(notebook: Any, parameters: Mapping[str, Any], environment: str) -> str:
    """Return a digest of what decides a lesson's outcome: cells, parameters, environment."""
    cells = [[c.cell_type, c.source, c.metadata.get("tags", [])] for c in notebook.cells]
    text = json.dumps([cells, dict(parameters), environment], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_outcome(path: Path) -> Outcome:
    """Read the outcome stored at ``path``.

    Raises:
        InputError: it is missing or damaged.
    """
    return read_file(path, lambda record: read_record(Outcome, record, "it"), "an outcome")


def read_outcomes(folder: Path) -> list[Outcome]:
    """Read all outcomes stored in ``folder``, by name.

    Raises:
        InputError: there is no such folder, nothing in it, or an outcome is damaged.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; `labkit run --out {folder}` makes it")
    outcomes = [read_outcome(path) for path in sorted(folder.glob("*.json"))]
    if not outcomes:
        raise InputError(f"{folder} holds no outcomes; `labkit run --out {folder}` makes them")
    return outcomes


def stored_result(outcome: Outcome, folder: Path) -> Result | None:
    """Return the result in an outcome's notebook; None if it has none that can be read."""
    if not outcome.notebook:
        return None
    try:
        return result_of(read_notebook(folder / outcome.notebook))
    except InputError:
        return None  # the outcome's problems already say so
