"""Recording what this machine's GPU gives: `labkit record` without its command line.

A ``Recorder`` measures lessons, headlines and the accuracy matrix, each in a process of its own,
and keeps every record in ``results/<gpu>/`` as soon as it is there: whole, and after saying how it
differs from the one that it replaces. What is recorded already by the same sources, versions and
GPU is left alone (`labkit.register`).

Limits: killed outright, a recorder leaves the lesson or the accuracy matrix in flight to end by
itself, and nothing of it is kept; a headline ends with it. The accuracy matrix lives in
``benchmarks/``, which is not installed.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from labkit import accuracy, headlines, notebooks, outcomes, register, results
from labkit.accuracy import AccuracyTable
from labkit.child import Ended, in_child
from labkit.drift import drift, figures
from labkit.headline_records import Headline, Job
from labkit.headline_runs import CANNOT
from labkit.lessons import Lesson, read_notebook
from labkit.memory import InputError
from labkit.outcomes import Outcome
from labkit.register import digest_of
from labkit.results import Result, write_atomic

PACKAGE = Path(__file__).resolve().parent
LESSON_PARAMETERS = (("size", "auto"),)
RECORDED, UNCHANGED, NOT_HERE, FAILED = "recorded", "unchanged", "not possible here", "failed"


class Part(NamedTuple):
    """How the recording of one headline, or of the accuracy matrix, went."""

    name: str
    status: str
    seconds: float


class Recorder:
    """Records on this machine into ``target``.

    Args:
        target: ``results/<gpu>``; it exists.
        work: where executed notebooks and logs go; it exists.
        machine: this one, a ``hardware.Machine``.
        again: measure what is recorded already too.
        timeout_seconds: limit for each lesson, headline and accuracy matrix.
        tell: is given each line that there is to say.
    """

    def __init__(
        self, target: Path, work: Path, machine: Any, *, again: bool = False,
        timeout_seconds: float = 1800, tell: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        self.target, self.work, self.machine = target, work, machine
        self.again, self.timeout_seconds, self.tell = again, timeout_seconds, tell
        self.parts = work / "parts"  # apart from the outcomes of lessons, which are read by folder
        self.parts.mkdir(exist_ok=True)
        self.not_kept: list[str] = []  # what ran on another machine than this GPU
        self.environment = outcomes.environment_hash(machine, recorded=False)
        self.register = register.Register(target, tell)

    def lessons(
        self, lessons: Sequence[Lesson], announce: Callable[[Outcome], None]
    ) -> notebooks.Course:
        """Execute the lessons that are not recorded yet, and keep what they found.

        Raises:
            InputError: as `notebooks.run`.
        """
        made_by = {lesson.name: self._lesson_made_by(lesson) for lesson in lessons}
        todo = []
        for lesson in lessons:
            if self._has(f"{lesson.number}.json", made_by[lesson.name]):
                self.tell(f"{UNCHANGED}  {lesson.name}")
            else:
                todo.append(lesson)
        if not todo:
            return notebooks.Course((), self.work)

        def keep(outcome: Outcome) -> None:
            announce(outcome)
            found = outcomes.stored_result(outcome, self.work) if outcome.passed else None
            if found is None:
                return
            if found.where != self.machine.name:
                self.refuse(outcome.name, found.where)
                return
            text = json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n"
            self._keep(f"{found.lesson}.json", found, text, made_by[outcome.name])

        return notebooks.run(
            todo,
            folder=self.work,
            parameters=list(LESSON_PARAMETERS),
            resume=not self.again,  # what was executed, but not kept, when a recorder was stopped
            timeout_seconds=self.timeout_seconds,
            on_done=keep,
        )

    def _lesson_made_by(self, lesson: Lesson) -> str:
        notebook = read_notebook(lesson.path)
        return outcomes.fingerprint(notebook, dict(LESSON_PARAMETERS), self.environment)

    def headline(self, job: Job) -> Part:
        """Run one headline in a process of its own, and keep its record."""
        started = time.monotonic()
        made_by = digest_of(self.environment, json.dumps(job.to_dict()))
        if self._has(job.file, made_by):
            return Part(job.name, UNCHANGED, 0.0)
        path, log = self.parts / job.file, self.parts / f"{headlines.PREFIX}{job.name}.log"
        path.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "labkit.headline_runs", str(path)]
        ended = in_child(command, log, self.timeout_seconds, order=json.dumps(job.to_dict()))
        status = self._settle(job.name, ended, log)
        if status == RECORDED:
            status = self._kept(job.file, headlines.load, path, made_by)
        return Part(job.name, status, time.monotonic() - started)

    def accuracy(self) -> Part:
        """Run the accuracy matrix in a process of its own, and keep its table."""
        started, name = time.monotonic(), "accuracy"
        script = accuracy_script()
        if script is None:
            self.tell(NO_BENCHMARKS)
            return Part(name, NOT_HERE, 0.0)
        sources = [path.read_bytes() for path in sorted(script.parent.glob("*.py"))]
        made_by = digest_of(self.environment, *sources)
        if self._has(accuracy.FILE, made_by):
            return Part(name, UNCHANGED, 0.0)
        log, folder = self.parts / "accuracy.log", self.parts / "accuracy"
        for stale in folder.glob(f"*/{accuracy.FILE}"):
            stale.unlink()
        command = [sys.executable, "-P", str(script), "--gpu", "--out", str(folder)]
        status = self._settle(name, in_child(command, log, self.timeout_seconds), log)
        if status == RECORDED:
            (path, *_) = [*folder.glob(f"*/{accuracy.FILE}"), folder / accuracy.FILE]
            status = self._kept(accuracy.FILE, accuracy.load, path, made_by)
        return Part(name, status, time.monotonic() - started)

    def _settle(self, name: str, ended: Ended, log: Path) -> str:
        """Say why a process failed; the status."""
        if ended.code == 0:
            return RECORDED
        if ended.code == CANNOT:
            self.tell(f"{name}: {ended.why}")
            return NOT_HERE
        self.tell(f"{name}: {ended.why} (see {log})")
        return FAILED

    def _kept(self, name: str, load: Callable[[Path], Any], path: Path, made_by: str) -> str:
        """Read what a process wrote, and keep it if it can be trusted; the status."""
        try:
            found = load(path)
        except InputError as error:
            self.tell(f"not kept: {error}")
            return FAILED
        if found.machine["name"] != self.machine.name:
            self.refuse(name, found.machine["name"])
            return FAILED
        self._keep(name, found, path.read_text(encoding="utf-8"), made_by)
        return RECORDED

    def refuse(self, name: str, where: str) -> None:
        """Say that what a process measured is not of this GPU."""
        self.not_kept.append(name)
        self.tell(f"{name} is not kept: it ran on {where}, not on {self.machine.name}")

    def _has(self, name: str, made_by: str) -> bool:
        return not self.again and self.register.holds(name, made_by)

    def _keep(
        self, name: str, found: Result | Headline | AccuracyTable, text: str, made_by: str
    ) -> None:
        """Say what changes, replace the file, remember what made it."""
        path = self.target / name
        if path.exists():
            load = {Result: results.load, Headline: headlines.load}.get(type(found), accuracy.load)
            try:
                lines = drift(path.stem, figures(load(path)), figures(found))
            except InputError as error:
                lines = [f"{error}. It is replaced."]
            for line in lines:
                self.tell(line)
        write_atomic(path, text)
        self.register.note(name, made_by)


NO_BENCHMARKS = (
    "the accuracy matrix needs benchmarks/accuracy.py, which is in the repository and is not "
    "installed: run `labkit record` from a checkout"
)


def accuracy_script() -> Path | None:
    """``benchmarks/accuracy.py`` beside the package; None where only the package is installed."""
    path = PACKAGE.parent / "benchmarks" / "accuracy.py"
    return path if path.is_file() else None
