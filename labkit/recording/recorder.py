"""Recording what this machine's GPU gives: `labkit record` without its command line.

A ``Recorder`` measures lessons, benchmarks and the accuracy matrix, each in a separate process, and
writes every record to ``results/<gpu>/`` atomically, as soon as it is there. What this GPU has
recorded with these versions is skipped, so that an interrupted recording continues.

Limits: a change of a lesson or of labkit is not noticed; ``again`` records anew. If the recorder
itself is killed, what it runs ends by itself, and is not recorded. The accuracy matrix is in
``benchmarks/``, which is not installed.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import filelock
from tqdm import tqdm

from labkit.course import outcomes, results, runner
from labkit.course.lessons import Lesson
from labkit.course.outcomes import Outcome
from labkit.hardware.this_machine import Machine
from labkit.recording import accuracy, benchmarks
from labkit.recording.benchmark_result import Benchmark
from labkit.recording.benchmark_worker import CANNOT
from labkit.support.files import PACKAGE, write_atomic
from labkit.support.processes import run_process
from labkit.values import InputError

RECORDED, SKIPPED, NOT_HERE, FAILED = "recorded", "recorded before", "not possible here", "failed"
LOCK = ".lock"


class Part(NamedTuple):
    """How the recording of one benchmark, or of the accuracy matrix, went."""

    name: str
    status: str
    seconds: float

    @property
    def done(self) -> bool:
        """Whether its record is there."""
        return self.status in (RECORDED, SKIPPED)


@dataclass
class Recorder:
    """Records on this machine into ``target``.

    Attributes:
        target: ``results/<gpu>``; it exists.
        work: for executed notebooks and logs; it exists.
        machine: this one.
        again: record also what is recorded already.
        timeout_seconds: limit for each lesson, each benchmark and the accuracy matrix.
        ran_elsewhere: what is not recorded because another machine ran it, or no GPU did.
    """

    target: Path
    work: Path
    machine: Machine
    again: bool = False
    timeout_seconds: float = 1800
    ran_elsewhere: list[str] = field(default_factory=list)

    def lessons(
        self, lessons: Sequence[Lesson], announce: Callable[[Outcome], None]
    ) -> runner.Course:
        """Execute the lessons that are not recorded yet, and store their results.

        Raises:
            InputError: as `runner.run`.
        """
        todo = []
        for lesson in lessons:
            if self._is_recorded(f"{lesson.number}.json", results.load_recorded):
                tqdm.write(f"{SKIPPED}  {lesson.name}")
            else:
                todo.append(lesson)
        if not todo:
            return runner.Course((), self.work)

        def store(outcome: Outcome) -> None:
            announce(outcome)
            found = outcomes.stored_result(outcome, self.work) if outcome.passed else None
            if found is not None and self._ran_here(outcome.name, found):
                results.save(found, self.target / f"{found.lesson}.json")

        return runner.run(
            todo,
            folder=self.work,
            parameters=[("size", "auto")],
            resume=not self.again,
            timeout_seconds=self.timeout_seconds,
            on_done=store,
        )

    def benchmark(self, benchmark: Benchmark) -> Part:
        """Run one benchmark in a separate process, and store its result."""
        path = self._parts / benchmark.file
        module, record = "labkit.recording.benchmark_worker", json.dumps(asdict(benchmark))
        command = [sys.executable, "-P", "-m", module, record, str(path)]
        return self._part(benchmark.name, command, path, benchmarks.load)

    def accuracy(self) -> Part:
        """Run the accuracy matrix in a separate process, and store its table."""
        folder = self._parts / "accuracy"
        path = folder / self.target.name / accuracy.FILE
        command = [sys.executable, "-P", str(accuracy_script()), "--gpu", "--out", str(folder)]
        return self._part("accuracy", command, path, accuracy.load)

    @property
    def _parts(self) -> Path:
        return self.work / "parts"  # apart from the lessons' outcomes, which are read by folder

    def _part(
        self, name: str, command: Sequence[str], path: Path, load: Callable[[Path], Any]
    ) -> Part:
        """Run ``command``, which writes ``path``, and store that file if it can be loaded."""
        if self._is_recorded(path.name, load):
            return Part(name, SKIPPED, 0.0)
        started = time.monotonic()
        self._parts.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        log = self._parts / f"{name}.log"
        ended = run_process(command, log, self.timeout_seconds)
        status = NOT_HERE if ended.code == CANNOT else FAILED
        if ended.code == 0:
            try:
                if self._ran_here(name, load(path)):
                    write_atomic(self.target / path.name, path.read_text(encoding="utf-8"))
                    status = RECORDED
            except InputError as error:
                tqdm.write(f"{name}: {error}")
        else:
            tqdm.write(f"{name}: {ended.why}" + (f" (see {log})" if log.exists() else ""))
        return Part(name, status, time.monotonic() - started)

    def _ran_here(self, name: str, record: Any) -> bool:
        where = record.machine["name"]
        if where == self.machine.name:
            return True
        self.ran_elsewhere.append(name)
        tqdm.write(f"{name} is not recorded: it ran on {where}, not on {self.machine.name}")
        return False

    def _is_recorded(self, name: str, load: Callable[[Path], Any]) -> bool:
        """Whether a valid record of this GPU and these versions is there."""
        path = self.target / name
        if self.again or not path.exists():
            return False
        try:
            machine = load(path).machine
        except InputError as error:
            tqdm.write(f"{error}. It is recorded again.")
            return False
        same_gpu = machine["name"] == self.machine.name
        return same_gpu and machine.get("versions") == dict(self.machine.versions)


def accuracy_script() -> Path:
    """Return ``benchmarks/accuracy.py`` beside the package.

    Raises:
        InputError: only the package is installed.
    """
    path = PACKAGE.parent / "benchmarks" / "accuracy.py"
    if not path.is_file():
        raise InputError(f"the accuracy matrix needs {path}: run `labkit record` from a checkout")
    return path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only recorder that works in ``folder``.

    Raises:
        InputError: another process records there.
    """
    try:
        with filelock.FileLock(folder / LOCK, blocking=False):
            yield
    except filelock.Timeout:
        raise InputError(f"another process is recording in {folder}: wait for its end") from None
