"""Recording what this machine's GPU gives: `labkit record` without its command line.

A ``Recorder`` measures lessons and the accuracy matrix, each in a separate process, and writes
every record to ``results/<gpu>/`` atomically, as soon as it is there. What is there already is
skipped, so that an interrupted recording continues.

Limits: a change of versions, of a lesson or of labkit is not noticed; ``again`` records anew. The
accuracy matrix is in ``benchmarks/``, which is not installed.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from gpumem.files import SOURCE, write_atomic
from gpumem.hardware.this_machine import Machine
from gpumem.inputs import InputError
from labkit.course import outcomes, runner
from labkit.course.outcomes import Outcome
from labkit.lesson import results
from labkit.lesson.notebooks import Lesson
from labkit.recording import accuracy

RECORDED, SKIPPED, FAILED = "recorded", "recorded before", "failed"


class Part(NamedTuple):
    """How the recording of one file of the accuracy matrix went."""

    name: str
    status: str
    seconds: float


@dataclass
class Recorder:
    """Records on this machine into ``target``, ``results/<gpu>``.

    ``work`` is for executed notebooks and logs; both folders exist. ``again`` records also what is
    recorded already. The time limit is for each lesson and each file of the accuracy matrix.
    ``ran_elsewhere`` is not recorded because another machine ran it, or no GPU did.
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
        """Execute the lessons that are not recorded yet, and store their results."""
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
            timeout_seconds=self.timeout_seconds,
            on_done=store,
        )

    def accuracy(self, file: str = accuracy.FILE) -> Part:
        """Run the recipes of ``file`` in a separate process, and store their table there."""
        name = file.removesuffix(".json")
        if self._is_recorded(file, accuracy.load):
            return Part(name, SKIPPED, 0.0)
        started = time.monotonic()
        folder = self.work / "parts"  # apart from the outcomes of lessons
        path = folder / ("phantom" if self.machine.phantom else "") / self.target.name / file
        path.unlink(missing_ok=True)
        log = folder / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        option = "--headlines" if file == accuracy.HEADLINES_FILE else "--gpu"
        command = [sys.executable, "-P", str(accuracy_script()), option, "--out", str(folder)]
        code, why = run_process(command, log, self.timeout_seconds)
        status = FAILED
        if code == 0:
            try:
                if self._ran_here(name, accuracy.load(path)):
                    write_atomic(self.target / file, path.read_text(encoding="utf-8"))
                    status = RECORDED
            except InputError as error:
                tqdm.write(f"{name}: {error}")
        else:
            tqdm.write(f"{name}: {why} (see {log})")
        return Part(name, status, time.monotonic() - started)

    def _ran_here(self, name: str, record: Any) -> bool:
        where = record.machine["name"]
        if where == self.machine.name:
            return True
        self.ran_elsewhere.append(name)
        tqdm.write(f"{name} is not recorded: it ran on {where}, not on {self.machine.name}")
        return False

    def _is_recorded(self, name: str, load: Callable[[Path], Any]) -> bool:
        """Whether a valid record is there."""
        path = self.target / name
        if self.again or not path.exists():
            return False
        try:
            load(path)
        except InputError as error:
            tqdm.write(f"{error}. It is recorded again.")
            return False
        return True


def run_process(
    command: Sequence[str], log: Path, timeout_seconds: float
) -> tuple[int | None, str]:
    """Run ``command`` with its output in ``log``; return its exit code, and why it ended.

    The code is None if it took too long.
    """
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    try:
        with open(log, "wb") as output:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                timeout=timeout_seconds,
                check=False,
            ).returncode
    except subprocess.TimeoutExpired:
        return None, f"stopped after {timeout_seconds:g} seconds, the time limit (see --timeout)"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
    return code, f"ended with code {code}: {last[:500]}"


def accuracy_script() -> Path:
    """Return ``benchmarks/accuracy.py`` beside the package; an `InputError` says it is missing."""
    path = SOURCE / "benchmarks" / "accuracy.py"
    if not path.is_file():
        raise InputError(f"the accuracy matrix needs {path}: run `labkit record` from a checkout")
    return path
