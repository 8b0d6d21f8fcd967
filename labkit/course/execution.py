"""One lesson in its own process, with a kernel of this Python, which can be stopped at any time.

Limits: a process that a lesson detached, and whose parent ended between two samples, may escape.
The peak of CPU memory is the largest of several samples a second, a lower bound.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from gpumem.files import SOURCE
from gpumem.processes import descendants, end_group, host_bytes
from labkit.lesson.notebooks import Lesson

if TYPE_CHECKING:
    import psutil

GRACE_SECONDS = 30  # for a kernel and papermill to stop by themselves after the time limit
#: Of one core, at most, for sampling memory: lessons measure seconds.
SAMPLING_SHARE = 0.02


@dataclass(frozen=True)
class Job:
    """One lesson, ready to execute."""

    lesson: Lesson
    title: str
    cells: int
    parameters: Mapping[str, Any]
    folder: Path
    timeout_seconds: float


class Ended(NamedTuple):
    """How executing a lesson ended: a sentence if something stopped it that is not in the notebook,
    and the peak of CPU memory as in `Outcome`."""

    failure: str | None
    host_peak_bytes: int | None = None


def execute(
    job: Job, partial: Path, environment: Mapping[str, str], stop: threading.Event
) -> Ended | None:
    """Execute a lesson into ``partial``, and end all that it started; None if ``stop`` was set."""
    from tqdm import tqdm

    log_path = job.folder / f"{job.lesson.name}.log"
    bar = tqdm(total=job.cells, desc=job.lesson.name, unit="cell", disable=None)  # if a terminal
    partial.unlink(missing_ok=True)
    deadline = time.monotonic() + job.timeout_seconds + GRACE_SECONDS
    known: set[psutil.Process] = set()
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
    return Ended(failure, peak_bytes or None)


def _started(
    job: Job, partial: Path, environment: Mapping[str, str], log: TextIO
) -> subprocess.Popen:
    worker = subprocess.Popen(
        # as a file: importing labkit's packages would take the time of importing torch
        [sys.executable, "-P", str(Path(__file__).with_name("papermill_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        bufsize=0,  # select() sees what is in the pipe, not what is in a buffer of ours
        env=dict(environment),
        start_new_session=True,  # Ctrl-C is for us to handle
    )
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
    with contextlib.suppress(BrokenPipeError), worker.stdin:  # broken: see its exit code
        worker.stdin.write(json.dumps(spec).encode())
    return worker


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
            "JUPYTER_PATH": _joined(scratch, os.environ.get("JUPYTER_PATH")),
            "IPYTHONDIR": str(Path(scratch, "ipython")),
            "PYTHONPATH": _joined(str(SOURCE), os.environ.get("PYTHONPATH")),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }


def _joined(first: str, rest: str | None) -> str:
    return os.pathsep.join(filter(None, [first, rest]))
