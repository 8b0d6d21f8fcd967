"""Use DeepSpeed in this process: prepare it, count its disk traffic, say what is CPU memory.

    traffic = prepare()                 # in the process that trains, before anything else of it
    engine = start(model, settings)
    log = Log(folder, traffic)
    with log.phase("forward"): ...

DeepSpeed ignores the disk's errors. Here a file's space is reserved before it is written, so that a
full disk is an error at once, and a refused transfer is one too.

On a CPU the device's memory and the CPU's are the same, and DeepSpeed copies nothing between them.
`prepare` makes it copy, as for a GPU, and `start` and `on_host` mark in the trace which tensors a
GPU run would hold in CPU memory (device ``"host"``).

Limits: written for DeepSpeed 0.19, one process per disk log. What counts as CPU memory on a CPU is
a model of a GPU run, from what DeepSpeed was doing, not a measurement of one.
"""

import errno
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from labkit.hardware import cuda, this_machine
from labkit.toolbox.deepspeed_ops import missing, operators
from labkit.toolbox.disk import reserve
from labkit.tracker import Tracker
from labkit.values import InputError


@dataclass
class Traffic:
    """What a process has read from a disk and written to it through DeepSpeed, counted when it
    asks for the transfer, and the seconds that it has waited for the disk."""

    read_bytes: int = 0
    written_bytes: int = 0
    waited_seconds: float = 0.0


def prepare(*, nvme: bool = True) -> Traffic:
    """Prepare DeepSpeed in this process, to offload to a disk if ``nvme``.

    Raises:
        InputError: something is missing; the text says what to install.
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
    if this_machine.device().type == "cpu":
        _copy_when_gathering()
    traffic = Traffic()
    if nvme:
        module = operators()
        plain = getattr(module.aio_handle, "plain", module.aio_handle)  # prepared before
        module.aio_handle = watched(plain, traffic)
    return traffic


class Log:
    """Seconds and bytes of each phase of each step, in a file of ``folder`` for `read_log`."""

    def __init__(self, folder: str | os.PathLike, traffic: Traffic) -> None:
        self.file, self.traffic = Path(folder) / "log.json", traffic
        self.steps: list[dict[str, dict[str, float]]] = [{}]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the block to the phase ``name`` of this step."""
        before, started = asdict(self.traffic), time.perf_counter()
        yield
        cuda.cuda_memory.synchronize()
        seconds = time.perf_counter() - started
        added = {field: now - before[field] for field, now in asdict(self.traffic).items()}
        self.steps[-1][name] = {"seconds": seconds, **added}

    def write(self) -> None:
        """End the step and write the log."""
        self.file.write_text(json.dumps(self.steps), encoding="utf-8")
        self.steps.append({})


def read_log(folder: str | os.PathLike) -> list[dict[str, dict[str, float]]]:
    """Return per step and phase: seconds, waited_seconds, read_bytes, written_bytes."""
    return json.loads((Path(folder) / "log.json").read_text(encoding="utf-8"))


# --- the disk ---------------------------------------------------------------------------------


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
            started = time.perf_counter()
            done = super().wait()
            traffic.waited_seconds += time.perf_counter() - started
            return done

    return Handle


# --- GPU or CPU memory ------------------------------------------------------------------------


def _copy_when_gathering() -> None:
    """Let a single rank copy the weights that it gathers: DeepSpeed moves them to the device."""
    from deepspeed.runtime.zero import partition_parameters as zero

    def copying(plain: type, members: Callable[[Any], Iterable[torch.nn.Parameter]]) -> type:
        class Copying(plain):
            copies = True

            def __init__(self, gathered: Any) -> None:
                super().__init__(gathered)
                for parameter in members(gathered):
                    parameter.data = parameter.data.clone()

        return Copying

    if not hasattr(zero.NoGatherHandle, "copies"):
        zero.NoGatherHandle = copying(zero.NoGatherHandle, lambda parameter: [parameter])
        zero.NoGatherCoalescedHandle = copying(zero.NoGatherCoalescedHandle, list)


def start(model: torch.nn.Module, settings: dict[str, Any]) -> Any:
    """Return DeepSpeed's engine, with the parameters moved one by one to where they will live.

    (Without ``zero.Init`` DeepSpeed puts the whole model on the device first.) What the engine
    holds counts as CPU memory, except the buckets of gradients, which are on the device.
    """
    import deepspeed

    with on_host():
        deepspeed.zero.Init(module=model, config_dict_or_path=settings)
        engine, *_ = deepspeed.initialize(model=model, config=settings)
    if tracker := _tracker():
        buckets = [bucket.buffer for bucket in engine.optimizer.ipg_buckets.values()]
        tracker.count_as("cpu", [tensor for tensor in buckets if tensor is not None])
    return engine


def on_host() -> AbstractContextManager[None]:
    """Return a context in which tracked allocations of a CPU run count as the CPU's memory.

    For the ``step()`` of an engine that offloads. On a GPU tensors say where they are.
    """
    tracker = _tracker()
    return tracker.counting_as("host") if tracker else nullcontext()


def _tracker() -> Tracker | None:
    """Return the tracker that records now, on a CPU."""
    modes = _get_current_dispatch_mode_stack() if this_machine.device().type == "cpu" else ()
    return next((mode for mode in modes if isinstance(mode, Tracker)), None)
