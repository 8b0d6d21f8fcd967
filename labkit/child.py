"""A command as a process of its own, which ends in time, and with it all that it started.

Its standard input stays open until it ends, so that a command that reads from it notices the death
of whoever runs it. Limits: those of `labkit.family`.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from labkit.family import Family

PACKAGE = Path(__file__).resolve().parent


class Ended(NamedTuple):
    """How a process ended: its exit code (None if it was stopped), and why it failed."""

    code: int | None
    why: str


def in_child(
    command: Sequence[str], log: Path, timeout_seconds: float, *, order: str = ""
) -> Ended:
    """Run ``command`` to its end with its output in ``log``, and all it started with it.

    Args:
        command: what to run.
        log: a file; it is removed if nothing was written.
        timeout_seconds: after so long it is stopped.
        order: a line for its standard input, which stays open until it ends.
    """
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    with open(log, "wb") as output:
        child = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=output, stderr=output,
            env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip
        family, deadline = Family(child), time.monotonic() + timeout_seconds
        try:
            with contextlib.suppress(BrokenPipeError):  # it died at once; its end code tells
                child.stdin.write(order.encode() + b"\n")
                child.stdin.flush()
            while child.poll() is None and time.monotonic() < deadline:
                family.look()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.25)
            code = child.poll()
        finally:
            family.kill()
            child.wait()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
    return Ended(code, _why(code, log, timeout_seconds))


def _why(code: int | None, log: Path, timeout_seconds: float) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if not lines:
        log.unlink()
    if code is None:
        return f"stopped after {timeout_seconds:g} seconds, the time limit (--timeout raises it)"
    if code < 0:
        return (
            f"its process was ended by signal {-code}: it crashed, or the system stopped it, most "
            "often because the computer's own memory ran out"
        )
    return lines[-1][:500] if lines else f"its process ended with code {code}"
