"""The one place that calls PyTorch's CUDA memory functions, and cleaning up after an error.

On a machine without CUDA those functions return zeros, raise, or raise something else; here
they answer None, do nothing, or say so in a sentence. On ROCm the same functions reach the AMD GPU.

Limits: the current device only.
"""

import ctypes
import gc
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch


def _asking(name: str) -> Callable[..., Any]:
    """Return a method that asks ``torch.cuda``, or answers None where no device works."""

    def ask(self: "CudaMemory", *arguments: Any) -> Any:
        return getattr(torch.cuda, name)(*arguments) if self.available else None

    return ask


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
            return False  # a broken driver: `hardware.this_machine` says so in its note
        return True

    allocated = _asking("memory_allocated")  # by live tensors
    reserved = _asking("memory_reserved")  # by the allocator, for tensors and in its cache
    peak_allocated = _asking("max_memory_allocated")  # since `reset_peaks`
    peak_reserved = _asking("max_memory_reserved")
    reset_peaks = _asking("reset_peak_memory_stats")
    synchronize = _asking("synchronize")
    empty_cache = _asking("empty_cache")
    cap = _asking("set_per_process_memory_fraction")  # of the total, 0 to 1; 1 lifts the limit

    def clear_workspaces(self) -> None:
        """Free the workspaces that cuBLAS keeps between calls; they are allocated again on use."""
        if self.available:  # a build without CUDA does not have the function
            torch._C._cuda_clearCublasWorkspaces()


cuda_memory = CudaMemory()


def free_memory() -> None:
    """Free everything that only a finished error or the cache still holds.

    After an exception the interpreter and Jupyter keep its traceback, and with it every tensor in
    every frame. This forgets it, collects garbage, frees the workspaces that cuBLAS keeps, and
    returns cached blocks to the driver, and on Linux what glibc's heap keeps of freed host memory
    to the system.

    Limits: tensors that you hold by name, or in Jupyter's ``Out``, stay. Call it outside the
    ``except`` block, where the exception is still alive.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    ipython = sys.modules.get("IPython")  # a shell can only be running if it was imported
    if ipython and (shell := ipython.get_ipython()):
        shell.InteractiveTB.tb = None
        shell.last_execution_result = None
    gc.collect()
    cuda_memory.clear_workspaces()
    cuda_memory.empty_cache()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # glibc alone has it


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
