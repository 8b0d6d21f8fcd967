"""Execute lessons and check them: ``run`` is what `labkit run` and `make course` do.

Each lesson runs in a separate process, which can be stopped at any time, with a kernel of this
Python. The output folder gets, per lesson: ``NAME.ipynb`` once it passed, else
``NAME.failed.ipynb`` with everything up to the failure; ``NAME.json``, the outcome; ``NAME.log`` if
something was logged.

Limits: two runs at a time need two folders. A process that a lesson detached, and whose parent
ended between two samples, may escape. The peak of CPU memory is the largest of several samples a
second, a lower bound.
"""

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from gpumem.files import SOURCE
from gpumem.inputs import InputError
from gpumem.processes import descendants, end_group, host_bytes
from labkit.course.check import check_notebook, code_cells
from labkit.course.outcomes import Outcome, store
from labkit.lesson.notebooks import (
    INSTALL,
    Lesson,
    check_parameters,
    declared_parameters,
    read_notebook,
    title_of,
)

GRACE_SECONDS = 30  # for a kernel and papermill to stop by themselves after the time limit
#: Of one core, at most, for sampling memory: lessons measure seconds.
SAMPLING_SHARE = 0.02


@dataclass(frozen=True)
class LessonJob:
    """One lesson, ready to execute."""

    lesson: Lesson
    title: str
    cells: int
    parameters: Mapping[str, Any]
    folder: Path
    timeout_seconds: float


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

    ``parameters`` are pairs of name and text, set in every lesson; ``jobs`` lessons run at a time.
    ``on_done`` is called in the main thread with each outcome, as soon as it is there. Ctrl-C stops
    the kernels and returns what there is, with ``interrupted`` set.
    """
    if importlib.util.find_spec("papermill") is None:
        raise InputError(f"to run lessons: {INSTALL}")
    queue = []
    for lesson in lessons:
        book = read_notebook(lesson.path)
        name = lesson.number or lesson.name
        values = check_parameters(parameters, declared_parameters(book), name)
        title, cells = title_of(book, lesson), len(list(code_cells(book)))
        queue.append(LessonJob(lesson, title, cells, values, folder, timeout_seconds))
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
            except BaseException as error:
                stop.set()
                if not isinstance(error, KeyboardInterrupt):
                    raise
    outcomes = tuple(future.result() for future in futures)
    return Course(outcomes, folder, interrupted=stop.is_set())


def _run_one(job: LessonJob, environment: Mapping[str, str], stop: threading.Event) -> Outcome:
    outcome = Outcome(job.lesson.number, job.lesson.name, job.title, "not started")
    if stop.is_set():
        return outcome
    started = time.monotonic()
    partial = job.folder / f"{job.lesson.name}.partial.ipynb"
    ended = execute(job, partial, environment, stop)
    if ended is None:
        name = partial.name if partial.exists() else ""
        return replace(outcome, status="interrupted", notebook=name)
    failure, host_peak_bytes = ended
    problems = [failure] if failure else []
    try:
        problems += check_notebook(read_notebook(partial), lesson=job.lesson.number)
    except InputError as error:
        problems.append(str(error))
    outcome = replace(
        outcome,
        status="failed" if problems else "passed",
        problems=tuple(problems),
        seconds=round(time.monotonic() - started, 2),
        host_peak_bytes=host_peak_bytes,
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


# --- one lesson in its process --------------------------------------------------------------------


def execute(
    job: LessonJob, partial: Path, environment: Mapping[str, str], stop: threading.Event
) -> tuple[str | None, int | None] | None:
    """Execute a lesson into ``partial``, and end all that it started.

    Returns a sentence if something stopped it that is not in the notebook, and the peak of CPU
    memory as in `Outcome`; None if ``stop`` was set.
    """
    from tqdm import tqdm

    log_path = job.folder / f"{job.lesson.name}.log"
    bar = tqdm(total=job.cells, desc=job.lesson.name, unit="cell", disable=None)  # if a terminal
    partial.unlink(missing_ok=True)
    deadline = time.monotonic() + job.timeout_seconds + GRACE_SECONDS
    known: set[Any] = set()  # processes
    message: dict[str, Any] = {}
    peak_bytes, next_sample = 0, 0.0
    with open(log_path, "w", encoding="utf-8") as log, bar:
        worker = _started(job, partial, environment, log)
        try:
            while not stop.is_set() and time.monotonic() < deadline:
                if select.select([worker.stdout], [], [], 0.1)[0]:
                    line = worker.stdout.readline()
                    if not line:
                        worker.wait(GRACE_SECONDS)
                        break
                    if "cell" in message:
                        bar.update()
                    message = json.loads(line)
                    known |= descendants(worker)
                if time.monotonic() >= next_sample:
                    started = time.thread_time()
                    known |= descendants(worker)
                    peak_bytes = max(peak_bytes, host_bytes(known))
                    taken = time.thread_time() - started
                    next_sample = time.monotonic() + taken / SAMPLING_SHARE
        finally:
            end_group(worker, known)
            worker.stdout.close()
    if not log_path.stat().st_size:
        log_path.unlink()
    if "failure" in message:
        failure = message["failure"]
    elif stop.is_set():
        return None
    elif time.monotonic() >= deadline:
        failure = f"stopped after {job.timeout_seconds:g} seconds: its kernel did not react"
    else:
        failure = f"its process ended with code {worker.returncode} before it was finished"
    return failure, peak_bytes or None


def _started(
    job: LessonJob, partial: Path, environment: Mapping[str, str], log: TextIO
) -> subprocess.Popen:
    folder = job.lesson.path.parent
    if folder.is_relative_to(SOURCE / "labkit"):  # a lesson may write where it runs
        folder = Path.cwd()
    spec = {
        "source": str(job.lesson.path),
        "target": str(partial.resolve()),
        "folder": str(folder),
        "parameters": dict(job.parameters),
        "timeout_seconds": job.timeout_seconds,
    }
    # As a file: importing labkit's packages would take the time of importing torch.
    script = Path(__file__).with_name("papermill_worker.py")
    return subprocess.Popen(
        [sys.executable, "-P", str(script), json.dumps(spec)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        bufsize=0,  # select() sees what is in the pipe, not what is in a buffer of ours
        env=dict(environment),
        start_new_session=True,  # Ctrl-C is for us to handle
    )


@contextlib.contextmanager
def kernel_environment(jobs: int = 1) -> Iterator[dict[str, str]]:
    """Yield variables that make ``python3`` mean this Python, this labkit, no user's settings.

    The cores are divided among ``jobs``.
    """
    from ipykernel.kernelspec import get_kernel_dict

    from gpumem.hardware.this_machine import machine

    with tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True) as scratch:
        kernel = Path(scratch, "kernels", "python3")
        kernel.mkdir(parents=True)
        (kernel / "kernel.json").write_text(json.dumps(get_kernel_dict()), encoding="utf-8")
        threads = max(1, machine().cores // jobs)
        yield {
            # OpenMP's threads spin while they wait for each other, and where another process has
            # the core that one of them needs, all wait: lesson 15 took five times as long.
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": str(threads),
            **os.environ,
            "JUPYTER_PATH": before("JUPYTER_PATH", scratch),
            "IPYTHONDIR": str(Path(scratch, "ipython")),
            "PYTHONPATH": before("PYTHONPATH", str(SOURCE)),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }


def before(variable: str, folder: str) -> str:
    """Return the folders that an environment variable lists, after one more."""
    return os.pathsep.join(filter(None, [folder, os.environ.get(variable)]))
