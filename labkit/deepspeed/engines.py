"""Use DeepSpeed in this process: prepare it, and count its disk traffic.

    traffic = prepare()                 # in the process that trains, before anything else of it
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    traffic.read_bytes, traffic.written_bytes

DeepSpeed ignores the disk's errors. Here a file's space is reserved before it is written, so that a
full disk is an error at once, and a refused transfer is one too.

Limits: written for DeepSpeed 0.19. Bytes count when a transfer is asked for.
"""

import errno
import logging
import warnings
from dataclasses import dataclass

import torch

from gpumem.inputs import InputError
from labkit.deepspeed.disk import reserve
from labkit.deepspeed.operators import missing, operators


@dataclass
class Traffic:
    """What a process has read from a disk and written to it through DeepSpeed."""

    read_bytes: int = 0
    written_bytes: int = 0


def prepare(*, nvme: bool = True) -> Traffic:
    """Prepare DeepSpeed in this process, to offload to a disk if ``nvme``.

    An `InputError` says what to install, if something is missing.
    """
    if problem := missing(nvme=nvme):
        raise InputError(problem)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # Sums over shared memory, for many ranks on a CPU: another minute's compiling. Without it
    # DeepSpeed uses gloo, as on every system but Linux.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    traffic = Traffic()
    if nvme:
        module = operators()
        plain = getattr(module.aio_handle, "plain", module.aio_handle)  # prepared before
        module.aio_handle = watched(plain, traffic)
    return traffic


def watched(handle: type, traffic: Traffic) -> type:
    """Return a subclass of DeepSpeed's ``aio_handle`` that counts, and raises what it ignores."""

    class Handle(handle):
        plain = handle
        pending = 0

        def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int = 0) -> int:
            try:
                reserve(path, offset + buffer.nbytes)
            except OSError:
                self.wait()  # freeing a handle with a transfer under way aborts the process
                raise
            traffic.written_bytes += buffer.nbytes
            return self._started(super().async_pwrite(buffer, path, offset), path)

        def async_pread(self, buffer: torch.Tensor, path: str, offset: int = 0) -> int:
            traffic.read_bytes += buffer.nbytes
            return self._started(super().async_pread(buffer, path, offset), path)

        def _started(self, failed: int, path: str) -> int:
            if failed:
                self.wait()
                reason = f"the disk refuses direct transfers (O_DIRECT) with {path}"
                raise OSError(errno.EIO, f"{reason}: choose a folder on a local disk")
            self.pending += 1
            return failed

        def wait(self) -> int:
            if not self.pending:  # DeepSpeed's own would abort
                return 0
            self.pending = 0
            return super().wait()

    return Handle
