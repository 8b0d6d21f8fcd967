"""One lesson in a process of its own, with a kernel of this Python, that ends when we say so.

``execute`` starts ``labkit.worker``, follows its progress, and afterwards stops whatever the
worker and its kernel left behind. Meanwhile it samples the memory that they hold.

Limits: a process that a lesson started and detached, and whose parent ended between two looks, may
escape. The peak of host memory is the largest of several samples a second, a lower bound: what is
freed again at once may fall between two.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.family import Family
from labkit.lessons import Lesson
from labkit.outcomes import RUN_VARIABLE

PACKAGE = Path(__file__).resolve().parent
GRACE_SECONDS = 30  # what a kernel and papermill get to stop by themselves after the time limit
#: Of one core, at most, for sampling memory: lessons measure seconds.
SAMPLING_SHARE = 0.02


@dataclass(frozen=True)
class Job:
    """One lesson, ready to execute."""

    lesson: Lesson
    title: str
    cells: int
    parameters: Mapping[str, Any]
    fingerprint: str
    folder: Path
    timeout_seconds: float


@dataclass(frozen=True)
class Ended:
    """How executing a lesson ended.

    Attributes:
        failure: a sentence if something stopped it that is not in the notebook.
        host_peak_bytes: most host memory that its kernel and all that the kernel started held
            together, as sampled; None if no sample was taken.
    """

    failure: str | None
    host_peak_bytes: int | None = None


class Stopped(Exception):  # noqa: N818 - not an error: somebody pressed Ctrl-C
    """The lesson was stopped before its end."""


def execute(
    job: Job,
    partial: Path,
    environment: Mapping[str, str],
    stop: threading.Event,
    progress: bool,
) -> Ended:
    """Run the worker to its end.

    Raises:
        Stopped: ``stop`` was set before it ended.
    """
    from tqdm import tqdm

    try:
        partial.unlink(missing_ok=True)
        log = open(job.folder / f"{job.lesson.name}.log", "w+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        return Ended(f"{job.folder} cannot be written: {error.strerror or error}")
    bar = tqdm(
        total=job.cells,
        desc=job.lesson.name,
        unit="cell",
        disable=None if progress else True,  # None: only on a terminal
    )
    with log, bar:
        worker = subprocess.Popen(
            [sys.executable, "-P", str(PACKAGE / "worker.py")],  # as a file: it needs no torch
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        family = _Worker(worker)
        watch = threading.Thread(target=family.watch, args=(stop, job.timeout_seconds))
        watch.start()
        try:
            last = _talk(worker, job, partial, bar, family)
        finally:
            family.end()
            watch.join()
        bar.n = job.cells if last == {"failure": None} else bar.n
    with contextlib.suppress(OSError):
        if not (job.folder / f"{job.lesson.name}.log").stat().st_size:
            (job.folder / f"{job.lesson.name}.log").unlink()
    if "failure" in last:
        failure = last["failure"]
    elif stop.is_set():
        raise Stopped
    elif family.overdue:
        failure = f"stopped after {job.timeout_seconds:g} seconds: its kernel did not react"
    else:
        failure = f"its process ended with code {worker.returncode} before it was finished"
    return Ended(failure, family.peak_bytes or None)


def _talk(
    worker: subprocess.Popen, job: Job, partial: Path, bar: Any, family: "_Worker"
) -> dict[str, Any]:
    """Hand the job over and follow it; the last message."""
    message: dict[str, Any] = {}
    order = {
        "source": str(job.lesson.path),
        "target": str(partial.resolve()),
        "folder": str(job.lesson.path.parent),
        "parameters": dict(job.parameters),
        "timeout_seconds": job.timeout_seconds,
    }
    with contextlib.suppress(BrokenPipeError):  # it died at once; its end code tells
        worker.stdin.write(json.dumps(order))
        worker.stdin.close()
    first = True
    for line in worker.stdout:
        message = json.loads(line)
        if "cell" in message:
            bar.update(0 if first else 1)
            first = False
            family.look()
    worker.wait()
    return message


class _Worker(Family):
    """A worker, its kernel, and whatever the kernel started."""

    def __init__(self, worker: subprocess.Popen) -> None:
        super().__init__(worker)
        self.overdue = False
        self.peak_bytes = 0
        self.ended = threading.Event()

    def watch(self, stop: threading.Event, timeout_seconds: float) -> None:
        """Sample memory; kill all when ``stop`` is set, or the worker overruns its time limit."""
        deadline = time.monotonic() + timeout_seconds + GRACE_SECONDS
        next_sample = 0.0
        while not self.ended.wait(0.1):
            self.overdue = time.monotonic() > deadline
            if stop.is_set() or self.overdue:
                self.kill()
                return
            if time.monotonic() >= next_sample:
                begun = time.thread_time()  # not the clock's: while we wait, others work
                self.peak_bytes = max(self.peak_bytes, self.descendants_bytes())
                taken = time.thread_time() - begun
                next_sample = time.monotonic() + taken / SAMPLING_SHARE

    def end(self) -> None:
        """After the worker's end: stop what it left behind."""
        self.ended.set()
        self.kill()
        self.head.wait()
        self.head.stdout.close()


@contextlib.contextmanager
def kernel_environment(folder: Path) -> Iterator[dict[str, str]]:
    """Environment variables that make ``python3`` mean this Python, this labkit, no user setup.

    A lesson that reads what the others found is told the run's ``folder``.
    """
    from ipykernel.kernelspec import get_kernel_dict

    with tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True) as scratch:
        kernel = Path(scratch, "kernels", "python3")
        kernel.mkdir(parents=True)
        (kernel / "kernel.json").write_text(json.dumps(get_kernel_dict()), encoding="utf-8")
        modules = ["labkit"] + [
            ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            for path in sorted(PACKAGE.rglob("*.py"))
        ]
        # Python hides deprecation warnings of imported modules; ours must show, to be checked
        shown = [f"default::DeprecationWarning:{m.removesuffix('.__init__')}" for m in modules]
        yield {
            **os.environ,
            "JUPYTER_PATH": _joined(scratch, os.environ.get("JUPYTER_PATH")),
            "IPYTHONDIR": str(Path(scratch, "ipython")),
            "PYTHONPATH": _joined(str(PACKAGE.parent), os.environ.get("PYTHONPATH")),
            "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), *shown])),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            RUN_VARIABLE: str(folder.resolve()),
        }


def _joined(first: str, rest: str | None) -> str:
    return os.pathsep.join(filter(None, [first, rest]))
