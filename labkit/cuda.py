"""The one place that calls PyTorch's CUDA memory functions, and cleaning up after an error.

On a machine without CUDA those functions return zeros, raise, or raise something else; here
they answer None, do nothing, or say so in a sentence. On ROCm the same functions reach the AMD GPU.

Limits: the current device only. Recording history and writing snapshots are private functions of
PyTorch (``torch.cuda.memory._record_memory_history``, ``_dump_snapshot``) and may change.
"""

import ctypes
import gc
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from labkit.memory import InputError

NO_CUDA = "No CUDA device on this machine, so PyTorch's CUDA allocator has nothing to report."


class CudaMemory:
    """PyTorch's CUDA caching allocator, or its absence. Sizes are bytes."""

    @property
    def available(self) -> bool:
        """Whether there is a CUDA (or ROCm) device that works."""
        if not torch.cuda.is_available():
            return False
        try:
            torch.cuda.init()  # some questions fail on a context that is not there yet
        except (RuntimeError, AssertionError):
            return False  # a broken driver: `hardware.machine` says so in its note
        return True

    def _ask(self, question: Callable[[], Any]) -> Any:
        return question() if self.available else None

    def capacity(self) -> int | None:
        """Total memory of the current device, as CUDA reports it."""
        return self._ask(
            lambda: torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        )

    def allocated(self) -> int | None:
        """Bytes that live tensors hold."""
        return self._ask(torch.cuda.memory_allocated)

    def reserved(self) -> int | None:
        """Bytes that the allocator holds, for tensors and in its cache."""
        return self._ask(torch.cuda.memory_reserved)

    def peak_allocated(self) -> int | None:
        """The most `allocated` since `reset_peaks`."""
        return self._ask(torch.cuda.max_memory_allocated)

    def peak_reserved(self) -> int | None:
        """The most `reserved` since `reset_peaks`."""
        return self._ask(torch.cuda.max_memory_reserved)

    def reset_peaks(self) -> None:
        """Start both peaks again from what is held now."""
        self._ask(torch.cuda.reset_peak_memory_stats)

    def free_and_total(self) -> tuple[int, int] | None:
        """What the driver says is free, other processes counted, and the total."""
        return self._ask(torch.cuda.mem_get_info)

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        self._ask(torch.cuda.synchronize)

    def empty_cache(self) -> None:
        """Return the cached blocks that no tensor uses to the driver."""
        self._ask(torch.cuda.empty_cache)

    def clear_workspaces(self) -> None:
        """Free the workspaces that cuBLAS keeps between calls; they are allocated again on use."""
        self._ask(lambda: torch._C._cuda_clearCublasWorkspaces())

    def cap(self, fraction: float) -> None:
        """Let the allocator have at most this share (0 to 1) of the total; 1.0 lifts the cap."""
        self._ask(lambda: torch.cuda.set_per_process_memory_fraction(float(fraction)))

    def summary(self) -> str:
        """``torch.cuda.memory_summary()``, or a sentence that says why there is none."""
        text = self._ask(torch.cuda.memory_summary)
        return NO_CUDA if text is None else text

    def record_history(self, on: bool, *, most_events: int = 100_000) -> None:
        """Start or stop recording every allocation with its Python stack.

        Args:
            on: start (from an empty history) or stop (the history is dropped).
            most_events: older events are forgotten beyond this many.
        """
        if on:
            self._ask(
                lambda: torch.cuda.memory._record_memory_history(
                    "all", stacks="python", max_entries=most_events
                )
            )
        else:
            self._ask(lambda: torch.cuda.memory._record_memory_history(None))

    def snapshot_to(self, path: str | Path) -> Path | None:
        """Write the allocator's snapshot as a pickle; None without CUDA. See `labkit.snapshot`.

        Raises:
            InputError: the file cannot be written.
        """
        try:
            self._ask(lambda: torch.cuda.memory._dump_snapshot(str(path)))
        except OSError as error:
            problem = f"cannot write the snapshot {str(path)!r}: {error.strerror}"
            raise InputError(problem) from error
        return Path(path) if self.available else None


cuda_memory = CudaMemory()


def free_memory() -> None:
    """Let go of everything that only a finished error or the cache still holds.

    After an exception the interpreter and Jupyter keep its traceback, and with it every tensor in
    every frame. This forgets it, collects garbage and returns cached blocks to the driver, and on
    Linux what glibc's heap keeps of freed host memory to the system.

    Limits: tensors that you hold by name, or in Jupyter's ``Out``, stay. Call it outside the
    ``except`` block: inside, the exception in hand still counts.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    shell = _shell()
    if shell is not None:
        if getattr(shell, "InteractiveTB", None) is not None:
            shell.InteractiveTB.tb = None
        shell.last_execution_result = None
    gc.collect()
    cuda_memory.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)


def _shell() -> Any:
    ipython = sys.modules.get("IPython")  # a shell can only be running if it was imported
    return ipython.get_ipython() if ipython is not None else None


def clear_exception(error: BaseException) -> None:
    """Empty the frames that ``error`` keeps alive, its causes and group members included.

    The traceback still prints. Frames that are still running are left as they are.
    """
    waiting, seen = [error], set()
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        waiting += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions
