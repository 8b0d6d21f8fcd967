"""A process and everything that it started: they end together.

Limits: a process that detached itself, and whose parent ended between two looks, may escape.
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
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
