"""DeepSpeed in this process: made ready, its disk watched, its host memory told from the device's.

    traffic = prepare()                 # in the process that trains, before anything else of it
    engine = start(model, settings)
    log = Log(folder, traffic)
    with log.phase("forward"): ...

DeepSpeed does not look at what the disk answered. Here a file's space is reserved before it is
written, so that a full disk is an error at once, and what is read must be what was written.

On a CPU the device and the host are the same memory, and DeepSpeed's copies between them are none.
`prepare` makes them copies, as they are on a GPU, and `start` and `on_host` say for the trace which
tensors a GPU run would keep in the host's memory (device ``"host"``).

Limits: written for DeepSpeed 0.19, one process per machine's disk log. What counts as the host's on
a CPU is a model of a GPU run, by what DeepSpeed was doing, not a measurement of one.
"""

import contextlib
import ctypes
import errno
import json
import logging
import os
import time
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from labkit import hardware
from labkit.deepspeed_build import can_lock, missing, operators
from labkit.disk import reserve
from labkit.memory import InputError, format_bytes
from labkit.tracker import Tracker


@dataclass
class Traffic:
    """What a process has read from a disk and written to it through DeepSpeed.

    Attributes:
        read_bytes, written_bytes: counted as they are asked for.
        waited_seconds: for the disk to be done.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    waited_seconds: float = 0.0
    _written: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict, repr=False)

    def _note(self, path: str, start: int, nbytes: int, checksum: int) -> None:
        """What now stands at ``start`` of the file, in place of all that it overlaps."""
        there = self._written.get(path, {}).items()
        apart = {at: had for at, had in there if at + had[0] <= start or start + nbytes <= at}
        self._written[path] = apart | {start: (nbytes, checksum)}


def prepare(*, nvme: bool = True) -> Traffic:
    """Make DeepSpeed ready in this process; call it before ``deepspeed.initialize``.

    Args:
        nvme: whether it is to offload to a disk.

    Raises:
        InputError: something is missing; the text says what to install.
    """
    if lack := missing(nvme=nvme):
        raise InputError(lack)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # Sums over shared memory, for many ranks on a CPU: another minute's compiling. Without it
    # DeepSpeed uses gloo, as on every system but Linux.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if hardware.device().type == "cpu":
        _copy_when_gathering()
    traffic = Traffic()
    if nvme:
        module = operators()
        module.aio_handle = watched(_plain_handle(module), traffic)
    return traffic


def _plain_handle(module: Any) -> type:
    """DeepSpeed's own class, whichever stands in its place."""
    handle = module.aio_handle
    return handle.__base__ if hasattr(handle, "traffic") else handle


class Log:
    """Seconds and bytes of each phase of each step, kept in the file ``log.json`` of a folder.

    Args:
        folder: where another process will read it with `read_log`.
        traffic: what `prepare` returned; None where no disk is in use.
    """

    def __init__(self, folder: str | os.PathLike, traffic: Traffic | None = None) -> None:
        self.file, self.traffic = Path(folder) / "log.json", traffic or Traffic()
        self.steps: list[dict[str, dict[str, float]]] = []
        self.now: dict[str, dict[str, float]] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens in the block belongs to the phase ``name`` of this step."""
        before, started = replace(self.traffic), time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.now[name] = {
            "seconds": time.perf_counter() - started,
            "waited_seconds": self.traffic.waited_seconds - before.waited_seconds,
            "read_bytes": self.traffic.read_bytes - before.read_bytes,
            "written_bytes": self.traffic.written_bytes - before.written_bytes,
        }

    def write(self) -> None:
        """The step is done: write the log."""
        self.steps.append(self.now)
        self.now = {}
        self.file.write_text(json.dumps(self.steps), encoding="utf-8")


def read_log(folder: str | os.PathLike) -> list[dict[str, dict[str, float]]]:
    """For each step, for each phase: seconds, waited_seconds, read_bytes, written_bytes."""
    return json.loads((Path(folder) / "log.json").read_text(encoding="utf-8"))


# --- watching the disk ------------------------------------------------------------------------


def watched(handle: type, traffic: Traffic) -> type:
    """A subclass of DeepSpeed's ``aio_handle`` that counts, and looks whether it was done."""

    class Handle(handle):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.reading: list[tuple[torch.Tensor, str, int]] = []
            self.pending = 0

        def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int = 0) -> int:
            try:
                reserve(path, offset + buffer.nbytes)
            except OSError:
                self.wait()  # a handle must not go while something is under way: it would abort
                raise
            traffic.written_bytes += buffer.nbytes
            traffic._note(path, offset, buffer.nbytes, _print_of(buffer))
            return self._begun(super().async_pwrite(buffer, path, offset), "written", path)

        def async_pread(self, buffer: torch.Tensor, path: str, offset: int = 0) -> int:
            if not os.path.exists(path) or os.path.getsize(path) < offset + buffer.nbytes:
                self.wait()
                raise OSError(errno.EIO, f"{path} is gone, or shorter than what was written there")
            traffic.read_bytes += buffer.nbytes
            begun = self._begun(super().async_pread(buffer, path, offset), "read", path)
            self.reading.append((buffer, path, offset))
            return begun

        def new_cpu_locked_tensor(self, count: int, example: torch.Tensor) -> torch.Tensor:
            nbytes = count * example.element_size()
            if nbytes and not can_lock(nbytes):
                raise OSError(
                    errno.ENOMEM, f"DeepSpeed wants to lock {format_bytes(nbytes)} more in memory, "
                    "and this user may not (`ulimit -l`)"
                )  # fmt: skip
            return super().new_cpu_locked_tensor(count, example)

        def _begun(self, failed: int, what: str, path: str) -> int:
            if failed:
                self.wait()
                raise OSError(
                    errno.EIO, f"{path} cannot be {what} past the page cache (O_DIRECT): choose a "
                    "folder on a local disk"
                )  # fmt: skip
            self.pending += 1
            return failed

        def wait(self) -> int:
            if not self.pending:
                return 0
            reading, self.reading, self.pending = self.reading, [], 0  # also if it fails
            started = time.perf_counter()
            done = super().wait()
            traffic.waited_seconds += time.perf_counter() - started
            for buffer, path, offset in reading:
                nbytes, expected = traffic._written.get(path, {}).get(offset, (0, 0))
                if nbytes == buffer.nbytes and _print_of(buffer) != expected:
                    raise OSError(errno.EIO, f"{path} does not hold what was written there")
            return done

    Handle.traffic = traffic
    return Handle


def _print_of(buffer: torch.Tensor) -> int:
    """Tells contents apart. Past PyTorch, so that no tracker sees it."""
    return zlib.crc32((ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr()))


# --- device or host ---------------------------------------------------------------------------


def _copy_when_gathering() -> None:
    """Alone in its world, a rank "gathers" a weight by moving it to the device: here, a copy."""
    from deepspeed.runtime.zero import partition_parameters as zero

    def copying(name: str, members: Any) -> None:
        plain = getattr(zero, name)
        if hasattr(plain, "copies"):
            return

        class Copying(plain):
            copies = True

            def __init__(self, gathered: Any) -> None:
                super().__init__(gathered)
                for parameter in members(gathered):
                    parameter.data = parameter.data.clone()

        setattr(zero, name, Copying)

    copying("NoGatherHandle", lambda parameter: [parameter])
    copying("NoGatherCoalescedHandle", list)


def start(model: torch.nn.Module, settings: dict[str, Any]) -> Any:
    """``deepspeed.initialize``, the model's parameters moved to where they will live one by one.

    (Without ``zero.Init`` DeepSpeed puts the whole model on the device first.)

    Returns:
        The engine. What it holds now is the host's, but for the buckets in which gradients are
        collected: DeepSpeed has those on the device.
    """
    import deepspeed

    with on_host():
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
        engine, *_ = deepspeed.initialize(model=model, config=settings)
    if tracker := _tracker():
        buckets = [bucket.buffer for bucket in engine.optimizer.ipg_buckets.values()]
        tracker.count_as("cpu", [tensor for tensor in buckets if tensor is not None])
    return engine


@contextlib.contextmanager
def on_host(really: bool = True) -> Iterator[None]:
    """On a CPU, what is allocated in the block and tracked counts as the host's memory.

    For what an engine whose parameters and optimizer are offloaded does there, which is its whole
    ``step()``. On a GPU tensors say themselves where they are.

    Args:
        really: False changes nothing, for a loop that serves without offloading too.
    """
    tracker = _tracker() if really else None
    with tracker.counting_as("host") if tracker else contextlib.nullcontext():
        yield


def _tracker() -> Tracker | None:
    """The one that records now, where host and device are the same memory."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    if hardware.device().type != "cpu":
        return None
    return next((m for m in _get_current_dispatch_mode_stack() if isinstance(m, Tracker)), None)
