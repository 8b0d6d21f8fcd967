"""Keep tensors on a disk, and count what is read and written.

Limits: what was just written may be read from the system's page cache. A simulation counts bytes,
and writes nothing.
"""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumem.units import format_bytes


def reserve(path: str | os.PathLike, nbytes: int) -> None:
    """Make ``path`` a file that has room for ``nbytes`` on the disk; keep what is in it.

    An `OSError` (``ENOSPC``) says how much room there is, where that is too little.
    """
    path = Path(path)
    path.touch()
    usage = shutil.disk_usage(path.parent)
    more_bytes = nbytes - path.stat().st_size
    if usage.total and more_bytes > usage.free:  # some file systems (ramfs) have no size
        raise OSError(
            errno.ENOSPC,
            f"the disk is full: {path.name} needs {format_bytes(nbytes)}, and "
            f"{format_bytes(usage.free)} are free in {path.parent}",
        )
    if hasattr(os, "posix_fallocate"):  # not on Windows, nor on macOS
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)


class DiskStore:
    """Named tensors outside memory, each in a separate file."""

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        self.read_bytes = self.written_bytes = 0
        self._stored: dict[str, tuple[torch.Size, torch.dtype]] = {}

    @property
    def held_bytes(self) -> int:
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self._stored.values())

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write ``tensor`` into the file ``name``, which is forgotten where the disk refuses."""
        tensor = tensor.detach()
        if not isinstance(tensor, FakeTensor):
            self._stored.pop(name, None)
            (self.folder / name).write_bytes(_bytes_of(tensor.cpu().contiguous()))
        self._stored[name] = tensor.shape, tensor.dtype
        self.written_bytes += tensor.nbytes

    def get(self, name: str, device: torch.device | str) -> torch.Tensor:
        """Return the tensor in the file ``name``, on ``device``; an `OSError` if it is short."""
        shape, dtype = self._stored[name]
        tensor = torch.empty(shape, dtype=dtype)
        if not isinstance(tensor, FakeTensor):
            with open(self.folder / name, "rb") as file:
                if file.readinto(_bytes_of(tensor)) < tensor.nbytes:
                    raise OSError(errno.EIO, f"{name} is shorter than what was put there")
        self.read_bytes += tensor.nbytes
        return tensor.to(device)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(-1).view(torch.uint8).numpy()
