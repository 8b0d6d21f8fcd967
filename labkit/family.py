"""A process and everything that it started: what memory they hold, and that they end together.

Limits: a process that detached itself, and whose parent ended between two looks, may escape. Pages
that a program outside the family shares, mostly those of libraries, count only in part.
"""

import contextlib
import subprocess
import threading
from typing import Any


class Family:
    """``head``, its descendants, and theirs."""

    def __init__(self, head: subprocess.Popen) -> None:
        self.head = head
        self._known: set[Any] = set()
        self._lock = threading.Lock()

    def look(self) -> None:
        """Remember the descendants: they are found no more once their parent is gone."""
        import psutil

        with self._lock, contextlib.suppress(psutil.NoSuchProcess):
            if self.head.poll() is None:  # until then its id is not another process's
                head = psutil.Process(self.head.pid)
                self._known.update([head, *head.children(recursive=True)])

    def descendants_bytes(self) -> int:
        """Host memory that the descendants hold now, without ``head``'s own.

        A page that several processes share counts for each in equal parts (Linux's proportional
        set size, `proc_pid_smaps_rollup(5)`), so that none is counted twice. Where the system does
        not tell, it is the resident set, and shared pages count for each process.
        """
        import psutil

        self.look()
        with self._lock:
            found = list(self._known)
        held = 0
        for process in found:
            if process.pid != self.head.pid:
                with contextlib.suppress(psutil.Error):  # it has just ended, or is another user's
                    info = process.memory_full_info()
                    held += getattr(info, "pss", info.rss)
        return held

    def kill(self) -> None:
        """Stop all of them at once. Safe to repeat, and after they have ended."""
        import psutil

        self.look()
        with self._lock:
            found = set(self._known)
        halted: set[Any] = set()
        while new := found - halted:  # first all halt, so that nobody starts another meanwhile
            for process in new:  # psutil compares start times, so a reused id is safe
                with contextlib.suppress(psutil.Error):
                    process.suspend()
                    found.update(process.children(recursive=True))
            halted |= new
        self.head.kill()
        for process in halted:
            with contextlib.suppress(psutil.Error):  # one that refuses must not save the others
                process.kill()
