"""Keep tensors on a disk, count what is read and written, and time a write.

Limits: what was just written may be read from the system's page cache. A simulation counts bytes,
and writes nothing.
"""

import errno
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor


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


def write_speed(folder: str | os.PathLike, nbytes: int = 256 << 20) -> float:
    """Return the bytes per second of one file written to ``folder``, which is removed again.

    The clock stops when the system says that the drive has all of it. A drive writes a long stream
    more slowly than a file that fits its cache.
    """
    file = Path(folder) / "write-speed"
    content = os.urandom(nbytes)  # which no drive can compress
    try:
        began = time.perf_counter()
        with open(file, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        return nbytes / (time.perf_counter() - began)
    finally:
        file.unlink(missing_ok=True)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(-1).view(torch.uint8).numpy()
