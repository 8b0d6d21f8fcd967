"""What is recorded in a folder already, by which sources, and who is recording there now.

``recording.json`` beside the records holds a hash of what made each of them and one of the file,
so that what was recorded by the same sources, versions and GPU need not be measured again.

Limits: the lock is the operating system's (POSIX, ``flock``); on some network file systems it holds
among the processes of one computer only.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from labkit.memory import InputError
from labkit.results import read_file, write_atomic

FILE = "recording.json"
LOCK = ".recording.lock"
SCHEMA = 1


class Register:
    """Which sources made each file of a folder, and what the file held then."""

    def __init__(self, folder: Path, tell: Callable[[str], None] = print) -> None:
        self.folder, self.path = folder, folder / FILE
        self.files: dict[str, dict[str, str]] = {}
        if not self.path.exists():
            return
        try:
            self.files = read_file(self.path, _read, "a register of recordings")
        except InputError as error:
            tell(f"{error}. All is measured again.")

    def holds(self, name: str, made_by: str) -> bool:
        """Whether ``name`` is there, made by these sources, and as it was written."""
        entry, path = self.files.get(name), self.folder / name
        if entry is None or entry["made_by"] != made_by or not path.is_file():
            return False
        return entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()

    def note(self, name: str, made_by: str) -> None:
        """Remember what made ``name`` as it is now."""
        content = hashlib.sha256((self.folder / name).read_bytes()).hexdigest()
        self.files[name] = {"made_by": made_by, "sha256": content}
        record = {"schema": SCHEMA, "files": dict(sorted(self.files.items()))}
        write_atomic(self.path, json.dumps(record, indent=1) + "\n")


def _read(record: Any) -> dict[str, dict[str, str]]:
    files = record.get("files") if isinstance(record, Mapping) else None
    if not isinstance(files, Mapping) or record.get("schema") != SCHEMA:
        raise InputError(f"it must be an object with schema {SCHEMA} and files")
    for entry in files.values():
        if not isinstance(entry, Mapping) or set(entry) != {"made_by", "sha256"}:
            raise InputError("each of its files needs made_by and sha256")
        if not all(isinstance(text, str) for text in entry.values()):
            raise InputError("made_by and sha256 must be texts")
    return {name: dict(entry) for name, entry in files.items()}


def digest_of(*parts: str | bytes) -> str:
    """One hash of all ``parts``."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update((part.encode() if isinstance(part, str) else part) + b"\0")
    return digest.hexdigest()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only recorder in ``folder``. The lock of a process that died is taken over.

    Raises:
        InputError: another process records there.
    """
    import fcntl

    path = folder / LOCK
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go with its holder
        except BlockingIOError:
            pid = os.read(handle, 20).decode(errors="replace").strip()
            os.close(handle)
            who = f"process {pid}" if pid else "another process"
            raise InputError(f"{who} is recording in {folder}: wait for its end") from None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                break
        os.close(handle)  # the holder before has just removed it: this is no longer the file
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
