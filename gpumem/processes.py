"""End a process together with everything that it started, and say what CPU memory it uses.

Limits: a process that detached itself into another session, and whose parent has ended, is found
only if the caller has kept it (``known``).
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

END_SECONDS = 5  # to wait for killed processes; where nobody reaps them they stay zombies


def descendants(process: subprocess.Popen) -> set["psutil.Process"]:
    """Return the descendants of ``process``; an empty set once it has ended."""
    import psutil

    if process.poll() is not None:  # its id may be another process's by now
        return set()
    try:
        return set(psutil.Process(process.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


@contextlib.contextmanager
def ends_in_order() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise `SystemExit`, so that what was started ends with this process.

    A signal that is ignored or handled already stays so. For the main thread only.
    """

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    signals = [each for each in signal.Signals if each.name in ("SIGTERM", "SIGHUP")]
    mine = [each for each in signals if signal.getsignal(each) is signal.SIG_DFL]
    for each in mine:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in mine:
            signal.signal(each, signal.SIG_DFL)


def host_bytes(processes: Iterable["psutil.Process"]) -> int:
    """Return the CPU memory that ``processes`` use together.

    On Linux a page that several processes share counts for each in equal parts (proportional set
    size, `proc_pid_smaps_rollup(5)`); elsewhere this is the sum of the resident sets.
    """
    import psutil

    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
            info = process.memory_full_info()
            total += getattr(info, "pss", info.rss)
    return total


def end_group(process: subprocess.Popen, known: Iterable["psutil.Process"] = ()) -> None:
    """Kill ``process``, its process group and its descendants, and wait for them. May be repeated.

    Args:
        process: started with ``start_new_session=True``, so that it leads a group.
        known: descendants found earlier. Their parent may have ended since, and a Jupyter kernel
            or a rank of torchrun is in no group of ours.
    """
    import psutil

    doomed = {*known, *descendants(process)}
    if hasattr(os, "killpg"):  # not on Windows
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    for descendant in doomed:  # psutil compares start times, so a reused id is safe
        with contextlib.suppress(psutil.Error):  # ended, or it refuses: the others must end
            descendant.kill()
    process.wait()
    psutil.wait_procs(doomed, timeout=END_SECONDS)
