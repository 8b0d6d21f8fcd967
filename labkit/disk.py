"""Tensors on a disk: a folder that is always removed, direct reads and writes, the disk's speed.

    with Scratch() as folder:
        shelf = Shelf(folder)
        shelf.put("weights", tensor)
        tensor = shelf.get("weights", device)
    shelf.read_bytes, shelf.written_bytes

Files are opened past the page cache (``O_DIRECT``) where the file system allows it: otherwise a
"disk" that was just written answers from memory. A file's space is reserved before it is written,
so that a full disk is an error at once, never a short file.

Limits: what a disk's own cache holds counts as the disk. Nothing is forced onto the medium
(``fsync``). A simulation counts bytes, and has no seconds.
"""

import contextlib
import errno
import io
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from labkit.memory import MIB, InputError, format_bytes, positive_int

BLOCK_BYTES = 4096  # direct transfers go in whole blocks, from aligned memory

# A process of its own waits until its input ends, which it does however its parent ends, and then
# removes the folder. Others may still be writing into it: it tries again for a while.
_KEEPER = """
import shutil, sys, time
sys.stdin.read()
for _ in range(100):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    try:
        open(sys.argv[1]).close()
    except FileNotFoundError:
        break
    except OSError:
        time.sleep(0.1)
"""
_KEEPER_SECONDS = 15  # longer than it tries


class Scratch:
    """A new folder for files that nobody is to find later.

    It is removed by `close`, at the end of a ``with`` block, when the object is forgotten, and
    when this process ends, be it killed. (Not when the machine loses power.)

    Args:
        parent: the folder to make it in, on the disk that is to be used; by default where
            temporary files go.

    Raises:
        InputError: no folder can be made there.
    """

    def __init__(self, parent: str | os.PathLike | None = None) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix="labkit-disk-", dir=parent))
        except OSError as error:
            raise InputError(f"no folder can be made in {parent}: {error.strerror}") from None
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )

        self.close = weakref.finalize(self, _remove, keeper, self.path, os.getpid())
        """Remove the folder and all that is in it, now."""

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: Any) -> None:
        self.close()


def _remove(keeper: subprocess.Popen, path: Path, maker: int) -> None:
    if os.getpid() != maker:
        return  # a forked copy of the process ends: the folder is not its own
    shutil.rmtree(path, ignore_errors=True)
    keeper.stdin.close()  # now it removes what others have written meanwhile
    if not path.exists():
        keeper.kill()  # a forked copy that lives holds its input open
    with contextlib.suppress(subprocess.TimeoutExpired):  # then it goes on when that copy ends
        keeper.wait(_KEEPER_SECONDS)


def files(folder: str | os.PathLike) -> dict[str, int]:
    """Every file under ``folder``: its path from there, and its bytes."""
    found = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in found}


def reserve(path: str | os.PathLike, nbytes: int) -> None:
    """Make ``path`` a file whose ``nbytes`` bytes have their place on the disk.

    Raises:
        OSError: (``ENOSPC`` or ``EDQUOT``) there is no room; the text says how much there is.
    """
    # Not opened to append: where a file system cannot reserve, the C library refuses that.
    with open(path, "r+b", opener=_made_if_missing) as file:
        more_bytes = nbytes - os.fstat(file.fileno()).st_size
        total_bytes, _, free_bytes = shutil.disk_usage(Path(path).parent)
        try:
            # Some file systems would fill the disk to find that out; some (ramfs) have no size.
            if total_bytes and more_bytes > free_bytes:
                raise OSError(errno.ENOSPC, "")
            if hasattr(os, "posix_fallocate"):  # not on Windows, nor on macOS
                os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"the disk is full: {Path(path).name} needs {format_bytes(nbytes)}, and "
                f"{format_bytes(free_bytes)} are free in {Path(path).parent}",
            ) from None


def _made_if_missing(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o666)


class Shelf:
    """Named tensors, each in a file of its own, outside memory.

    Attributes:
        read_bytes, written_bytes: of all tensors read and written so far.
        seconds: spent on it.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        self.read_bytes = self.written_bytes = 0
        self.seconds = 0.0
        self._kept: dict[str, tuple[torch.Size, torch.dtype]] = {}

    @property
    def held_bytes(self) -> int:
        """Of all tensors that lie here now."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self._kept.values())

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write ``tensor`` into the file ``name``, in place of what was there.

        Raises:
            OSError: the disk is full (what was there still is), or refuses.
        """
        started = time.perf_counter()
        tensor = tensor.detach()
        if not isinstance(tensor, FakeTensor) and tensor.nbytes:
            path = self.folder / name
            reserve(path, _whole(tensor.nbytes))  # what was there is whole until here
            self._kept.pop(name, None)
            with contextlib.closing(mmap.mmap(-1, _whole(tensor.nbytes))) as memory:
                memory[: tensor.nbytes] = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
                with _opened(path, "r+b") as file:
                    _move(file.write, memory)
        self._kept[name] = tensor.shape, tensor.dtype
        self.written_bytes += tensor.nbytes
        self.seconds += time.perf_counter() - started

    def get(self, name: str, device: torch.device | str) -> torch.Tensor:
        """The tensor in the file ``name``, on ``device``.

        Raises:
            KeyError: nothing was put there.
            OSError: the file is gone or short, or the disk refuses.
        """
        started = time.perf_counter()
        shape, dtype = self._kept[name]
        host = torch.empty(shape, dtype=dtype)
        if not isinstance(host, FakeTensor) and host.nbytes:
            with contextlib.closing(mmap.mmap(-1, _whole(host.nbytes))) as memory:
                with _opened(self.folder / name, "rb") as file:
                    _move(file.readinto, memory)
                host.view(-1).view(torch.uint8).numpy()[:] = memoryview(memory)[: host.nbytes]
        found = host.to(device)
        self.read_bytes += host.nbytes
        self.seconds += time.perf_counter() - started
        return found


class DiskSpeed(NamedTuple):
    """Bytes per second of long transfers; ``direct``: past the page cache."""

    read: float
    write: float
    direct: bool


def disk_speed(folder: str | os.PathLike, *, size_bytes: int = 256 * MIB) -> DiskSpeed:
    """Time writing and then reading a file of ``size_bytes`` in ``folder``; it is removed.

    Raises:
        InputError: ``size_bytes`` is not a positive whole number.
        OSError: the disk is full.
    """
    piece = min(8 * MIB, _whole(positive_int(size_bytes, "size_bytes")))
    pieces = -(-size_bytes // piece)
    number, name = tempfile.mkstemp(prefix="speed-", dir=folder)
    os.close(number)
    path, seconds = Path(name), []
    try:
        reserve(path, pieces * piece)
        with contextlib.closing(mmap.mmap(-1, piece)) as memory:
            memory[:] = os.urandom(piece)  # zeros are not stored by every disk
            for mode, name in (("r+b", "write"), ("rb", "readinto")):
                with _opened(path, mode) as file:
                    started = time.perf_counter()
                    for _ in range(pieces):
                        _move(getattr(file, name), memory)
                    seconds.append(time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)
    writing, reading = (pieces * piece / each for each in seconds)
    return DiskSpeed(reading, writing, direct(folder))


def direct(folder: str | os.PathLike) -> bool:
    """Whether files in ``folder`` can be opened past the page cache."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            os.close(os.open(file.name, os.O_RDONLY | getattr(os, "O_DIRECT", 0)))
        except OSError:
            return False
    return hasattr(os, "O_DIRECT")


def _whole(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def _opened(path: str | os.PathLike, mode: str) -> io.FileIO:
    """Unbuffered, and past the page cache where the file system has that."""

    def past_the_cache(path: str, flags: int) -> int:
        try:
            return os.open(path, flags | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return os.open(path, flags)

    return open(path, mode, buffering=0, opener=past_the_cache)


def _move(move: Callable[[memoryview], int], memory: mmap.mmap) -> None:
    """All of ``memory``: a file may take or give less than it is asked for."""
    with memoryview(memory) as view:
        done = 0
        while done < len(view):
            with view[done:] as rest:
                moved = move(rest)
            if not moved:
                raise OSError(errno.EIO, "the file is shorter than what was put there")
            done += moved
