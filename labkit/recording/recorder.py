"""Recording what this machine's GPU gives, and checking what others sent in: `labkit record`.

A ``Recorder`` measures lessons and the accuracy matrix, each in a separate process, and writes
every record to ``results/<gpu>/`` atomically, as soon as it is there. What is there already is
skipped, so that an interrupted recording continues.

Limits: a change of versions, of a lesson or of labkit is not noticed; ``again`` records anew. The
accuracy matrix is in ``benchmarks/``, which is not installed. `problems` believes figures that
could be true.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gpumem.files import SOURCE, write_atomic
from gpumem.hardware.this_machine import Machine, gpu_key
from gpumem.inputs import InputError
from labkit.course import outcomes, runner
from labkit.course.outcomes import Outcome
from labkit.lesson import results
from labkit.lesson.notebooks import Lesson
from labkit.lesson.results import Result
from labkit.recording import accuracy
from labkit.recording.accuracy import AccuracyTable

RECORDED, SKIPPED, FAILED = "recorded", "recorded before", "failed"


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

    def accuracy(self, file: str = accuracy.FILE) -> str:
        """Run the recipes of ``file`` in a process and store their table; return how that went."""
        if self._is_recorded(file, accuracy.load):
            return SKIPPED
        name, folder = file.removesuffix(".json"), self.work / "parts"  # apart from lessons' files
        path = folder / ("phantom" if self.machine.phantom else "") / self.target.name / file
        path.unlink(missing_ok=True)
        folder.mkdir(exist_ok=True)
        option = "--headlines" if file == accuracy.HEADLINES_FILE else "--gpu"
        command = [sys.executable, "-P", str(accuracy_script()), option, "--out", str(folder)]
        log = folder / f"{name}.log"
        code, why = run_process(command, log, self.timeout_seconds)
        try:
            if code != 0:
                raise InputError(f"{why} (see {log})")
            if not self._ran_here(name, accuracy.load(path)):
                return FAILED
        except InputError as error:
            tqdm.write(f"{name}: {error}")
            return FAILED
        write_atomic(self.target / file, path.read_text(encoding="utf-8"))
        return RECORDED

    def _ran_here(self, name: str, record: Any) -> bool:
        where = record.machine["name"]
        if where == self.machine.name:
            return True
        self.ran_elsewhere.append(name)
        tqdm.write(f"{name} is not recorded: it ran on {where}, not on {self.machine.name}")
        return False

    def _is_recorded(self, name: str, load: Callable[[Path], Any]) -> bool:
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
    environment = {**os.environ, "PYTHONPATH": runner.before("PYTHONPATH", str(SOURCE))}
    try:
        with open(log, "wb") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            done = subprocess.run(command, env=environment, timeout=timeout_seconds, **streams)
    except subprocess.TimeoutExpired:
        return None, f"stopped after {timeout_seconds:g} seconds, the time limit (see --timeout)"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
    return done.returncode, f"ended with code {done.returncode}: {last[:500]}"


def accuracy_script() -> Path:
    """Return ``benchmarks/accuracy.py`` beside the package; an `InputError` says it is missing."""
    path = SOURCE / "benchmarks" / "accuracy.py"
    if not path.is_file():
        raise InputError(f"the accuracy matrix needs {path}: run `labkit record` from a checkout")
    return path


# --- what others sent in ------------------------------------------------------------------------


def problems(folder: Path) -> list[str]:
    """Return what is wrong with the recordings in ``folder``, ``results/<gpu>``, in sentences.

    There may be only files that `labkit record` writes, of the GPU that the folder is named after.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; `labkit record` makes results/<gpu>")
    found = []
    for path in sorted(folder.iterdir()):
        try:
            found += [f"{path.name}: {problem}" for problem in _record_problems(path)]
        except InputError as error:
            found.append(f"{path.name}: {error}")
    return found


def _record_problems(path: Path) -> Iterator[str]:
    load = accuracy.load if path.name in accuracy.FILES else results.load_recorded
    record = load(path)
    kind, name = record.machine["kind"], record.machine["name"]
    if kind not in ("cuda", "rocm"):
        yield f"it was made on {kind!r}, not on a GPU"
    if record.phantom != (path.parent.parent.name == "phantom"):
        place = "belongs into" if record.phantom else "does not belong into"
        yield f"it {place} results/phantom"
    # The accuracy matrix does not say how large the GPU is.
    key = gpu_key(name, record.machine.get("capacity_bytes"))
    if path.parent.resolve().name != key and not isinstance(record, AccuracyTable):
        yield f"the folder of {name!r} is called {key}"
    if isinstance(record, Result):
        yield from record.broken_invariants()
