"""How a lesson went, on disk: ``NAME.json`` beside the executed notebook.

An outcome is written atomically when its lesson ends; resuming and reporting read it. Its
fingerprint says what it depended on. Limits: files that a lesson reads beyond its own cells,
labkit and the recorded results are not part of the fingerprint, so that lesson 23, which reads what
the others found, is not executed again because they were.
"""

import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.check import result_of
from labkit.lessons import read_notebook
from labkit.memory import InputError, format_bytes
from labkit.results import Result, read_file, read_seconds, result_folders, write_atomic

if TYPE_CHECKING:
    from labkit.hardware import Machine

#: The environment variable that names the folder of the run that a kernel belongs to.
RUN_VARIABLE = "LABKIT_RUN_FOLDER"
PACKAGE = Path(__file__).resolve().parent
MOST_HOST_BYTES = 1 << 60
STATUSES = ("passed", "failed", "interrupted", "not started")


@dataclass(frozen=True)
class Outcome:
    """How one lesson went.

    Attributes:
        number, name, title: of the lesson; the number is "" for a notebook without one.
        status: ``passed``, ``failed``, ``interrupted`` or ``not started``.
        problems: what is wrong, one sentence each; empty if it passed.
        seconds: from the start of its process to the end of the check.
        fingerprint: of source, parameters and environment.
        notebook: file name in the output folder; "" if there is none.
        date: when it ended, ISO 8601, UTC.
        reused: it was not executed now, an earlier run's outcome still holds.
        host_peak_bytes: most host memory that its kernel and all that the kernel started held
            together, as sampled, so a lower bound; None where nobody looked.
    """

    number: str
    name: str
    title: str
    status: str
    problems: tuple[str, ...] = ()
    seconds: float = 0.0
    fingerprint: str = ""
    notebook: str = ""
    date: str = ""
    reused: bool = False
    host_peak_bytes: int | None = None

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def host_peak(self) -> str:
        """``host_peak_bytes`` for people; a dash where nobody looked."""
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


def environment_hash(machine: "Machine", *, recorded: bool = True) -> str:
    """Of everything outside a notebook that its outputs depend on.

    That is: labkit's sources, the versions of Python and of all installed packages, the machine,
    and the variables that choose its GPUs and their allocator.

    Args:
        recorded: whether recorded results count too. Lessons show them; to a recorder, writing
            one must not make the others look old.
    """
    digest = hashlib.sha256()
    files = [p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".toml") and p.is_file()]
    named = [(path.relative_to(PACKAGE).as_posix(), path) for path in files]
    if recorded:
        named += [(str(path), path) for each in result_folders() for path in each.rglob("*.json")]
    for name, path in sorted(named):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    variables = ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    here = [machine.kind, machine.name, machine.capacity_bytes, dict(machine.versions)]
    rest = [sys.version, here, packages(), [os.environ.get(name) for name in variables]]
    digest.update(json.dumps(rest, sort_keys=True).encode())
    return digest.hexdigest()


def packages() -> list[str]:
    """All that is installed, with versions."""
    # Whoever imports setuptools finds what is bundled with it among his packages from then on.
    own = [entry for entry in sys.path if Path(entry).parts[-2:] != ("setuptools", "_vendor")]
    return sorted({f"{d.name}=={d.version}" for d in importlib.metadata.distributions(path=own)})


def fingerprint(notebook: Any, parameters: Mapping[str, Any], environment: str) -> str:
    """Of what decides a lesson's outcome: its cells without outputs, parameters, environment."""
    cells = [[c.cell_type, c.source, c.metadata.get("tags", [])] for c in notebook.cells]
    text = json.dumps([cells, dict(parameters), environment], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_outcome(path: Path) -> Outcome:
    """The outcome stored at ``path``.

    Raises:
        InputError: it is missing or damaged.
    """
    return read_file(path, _outcome, "an outcome")


def _outcome(record: Any) -> Outcome:
    if not isinstance(record, Mapping) or not set(record) <= set(Outcome.__dataclass_fields__):
        raise InputError("it must be an object with an outcome's fields")
    try:
        outcome = Outcome(**record)
    except TypeError as error:  # one is missing
        raise InputError(str(error)) from error
    names = (outcome.number, outcome.name, outcome.title, outcome.notebook, outcome.date)
    sound = (
        all(isinstance(text, str) for text in (*names, outcome.fingerprint))
        and outcome.status in STATUSES
        and isinstance(outcome.problems, list)
        and all(isinstance(problem, str) for problem in outcome.problems)
        and Path(outcome.notebook).name == outcome.notebook  # never outside the folder
        and isinstance(outcome.reused, bool)
        and (outcome.host_peak_bytes is None or type(outcome.host_peak_bytes) is int)
        and 0 <= (outcome.host_peak_bytes or 0) < MOST_HOST_BYTES
    )
    if not sound:
        raise InputError("a field is of the wrong kind")
    seconds = read_seconds(outcome.seconds)
    return replace(outcome, problems=tuple(outcome.problems), seconds=seconds)


def read_outcomes(folder: Path) -> list[Outcome]:
    """All outcomes stored in ``folder``, by name.

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
    """The result in an outcome's notebook; None if it has none that can be read."""
    if not outcome.notebook:
        return None
    try:
        return result_of(read_notebook(folder / outcome.notebook))
    except InputError:
        return None  # the outcome's problems already say so
