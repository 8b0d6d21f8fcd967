"""Execute lessons and check them: ``run`` is what `labkit run` and `make course` do.

Each lesson runs in a separate process and kernel, always with this Python. The output folder gets,
per lesson: ``NAME.ipynb`` once it passed, else ``NAME.failed.ipynb`` with everything up to the
failure; ``NAME.json``, the outcome; ``NAME.log`` if something was logged.

Limits: two runs at a time need two folders.
"""

import importlib.util
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from gpumem.inputs import InputError
from labkit.course.check import check_notebook
from labkit.course.execution import Job, execute, kernel_environment
from labkit.course.outcomes import Outcome, store
from labkit.lesson.notebooks import (
    INSTALL,
    Lesson,
    check_parameters,
    declared_parameters,
    read_notebook,
    title_of,
)


@dataclass(frozen=True)
class Course:
    """The outcomes of ``run``, one per lesson, in order."""

    outcomes: tuple[Outcome, ...]
    folder: Path
    interrupted: bool = False

    @property
    def passed(self) -> bool:
        return all(outcome.passed for outcome in self.outcomes)


def run(
    lessons: Sequence[Lesson],
    *,
    folder: Path,
    parameters: Sequence[tuple[str, str]] = (),
    jobs: int = 1,
    timeout_seconds: float = 600,
    on_done: Callable[[Outcome], None] | None = None,
) -> Course:
    """Execute and check ``lessons``; a lesson that fails does not stop the others.

    Args:
        lessons: from ``lessons.find``.
        folder: where outcomes and executed notebooks go; created if need be.
        parameters: ``(name, text)`` pairs, set in every lesson.
        jobs: how many lessons at a time.
        timeout_seconds: limit per lesson.
        on_done: called in the main thread with each outcome, as soon as it is there.

    Ctrl-C stops the kernels and returns what there is, with ``interrupted`` set.
    """
    if importlib.util.find_spec("papermill") is None:
        raise InputError(f"to run lessons: {INSTALL}")
    queue = [_job(lesson, parameters, folder, timeout_seconds) for lesson in lessons]
    prepare_folder(folder)
    stop = threading.Event()
    with kernel_environment(jobs) as environment, ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(_run_one, job, environment, stop) for job in queue]
        pending = set(futures)
        while pending:
            try:
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    outcome = future.result()
                    if on_done and outcome.status in ("passed", "failed"):
                        on_done(outcome)
            except KeyboardInterrupt:
                stop.set()
            except BaseException:
                stop.set()
                raise
    outcomes = tuple(future.result() for future in futures)
    return Course(outcomes, folder, interrupted=stop.is_set())


def _job(
    lesson: Lesson, pairs: Sequence[tuple[str, str]], folder: Path, timeout_seconds: float
) -> Job:
    notebook = read_notebook(lesson.path)
    name = lesson.number or lesson.name
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    return Job(
        lesson=lesson,
        title=title_of(notebook, lesson),
        cells=len(cells),
        parameters=check_parameters(pairs, declared_parameters(notebook), name),
        folder=folder,
        timeout_seconds=timeout_seconds,
    )


def _run_one(job: Job, environment: Mapping[str, str], stop: threading.Event) -> Outcome:
    """Execute, check, and store the outcome, whatever the lesson does."""
    outcome = Outcome(job.lesson.number, job.lesson.name, job.title, "not started")
    if stop.is_set():
        return outcome
    started = time.monotonic()
    partial = job.folder / f"{job.lesson.name}.partial.ipynb"
    ended = execute(job, partial, environment, stop)
    if ended is None:
        name = partial.name if partial.exists() else ""
        return replace(outcome, status="interrupted", notebook=name)
    problems = [ended.failure] if ended.failure else []
    try:
        problems += check_notebook(read_notebook(partial), lesson=job.lesson.number)
    except InputError as error:
        problems.append(str(error))
    outcome = replace(
        outcome,
        status="failed" if problems else "passed",
        problems=tuple(problems),
        seconds=round(time.monotonic() - started, 2),
        host_peak_bytes=ended.host_peak_bytes,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return store(outcome, partial, job.folder)


def prepare_folder(folder: Path) -> None:
    """Create ``folder`` and check that it can be written; an `InputError` says that it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(
            f"cannot write to the folder {folder}: {error.strerror or error}; --out names another"
        ) from error
