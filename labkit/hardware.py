"""This machine, and the memory budget it works under.

Also the door to the GPU catalogue (`labkit.catalogue`), the CUDA adapter and cleaning up
(`labkit.cuda`) and reading snapshots (`labkit.snapshot`): import from here.

Limits: one GPU, the current one. Apple (MPS) and Intel (XPU) GPUs are named but not measured,
because PyTorch's allocators there do not report what lessons need. `pretend` caps PyTorch's
allocator, not the CUDA context or other libraries.
"""

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from labkit.catalogue import CUDA_CONTEXT_BYTES, GPUS, Gpu, gpu, gpus
from labkit.cuda import CudaMemory, clear_exception, cuda_memory, free_memory
from labkit.memory import InputError, format_bytes, positive_int
from labkit.snapshot import read_snapshot

__all__ = [
    "CUDA_CONTEXT_BYTES",
    "GPUS",
    "PUBLIC",
    "CudaMemory",
    "Gpu",
    "Machine",
    "clear_exception",
    "cuda_memory",
    "current_budget_bytes",
    "device",
    "free_memory",
    "gpu",
    "gpus",
    "machine",
    "pretend",
    "pretended",
    "read_snapshot",
]

#: What `labkit` re-exports.
PUBLIC = (
    "GPUS", "Gpu", "Machine", "cuda_memory", "clear_exception", "current_budget_bytes", "device",
    "free_memory", "gpu", "gpus", "machine", "pretend", "pretended", "read_snapshot",
)  # fmt: skip

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
_TRACKED = (
    "small runs are tracked on the CPU; figures at GPU size are simulated for the GPU you name"
)


# --- this machine ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What this computer is to the lessons.

    Attributes:
        kind: ``"cuda"``, ``"rocm"``, ``"mps"``, ``"xpu"`` or ``"cpu"``.
        name: of the GPU, or of the processor where there is none.
        capacity_bytes: memory of the GPU as the driver reports it; None on a CPU.
        note: a sentence: what is measured here and what is simulated.
        versions: of ``PACKAGES``, ``python``, ``cuda`` (or ROCm) and ``driver``; None if absent.
        bf16_native: the device computes in bfloat16 itself; False where that is not known.
        cores: CPU cores this process may use.
        host_memory_bytes: of the computer or the container, whichever is less; None if unknown.
        in_colab: running in Google Colab.
    """

    kind: str
    name: str
    capacity_bytes: int | None
    note: str
    versions: dict[str, str | None]
    bf16_native: bool
    cores: int
    host_memory_bytes: int | None
    in_colab: bool

    @property
    def can_measure(self) -> bool:
        """Whether memory is measured here on a real GPU."""
        return self.kind in ("cuda", "rocm")


def machine() -> Machine:
    """This computer. Cheap enough to ask before every run."""
    kind, name, capacity_bytes, bf16_native, note = _accelerator()
    return Machine(
        kind=kind,
        name=name,
        capacity_bytes=capacity_bytes,
        note=note,
        versions=_versions() | {"driver": _driver(kind)},
        bf16_native=bf16_native,
        cores=_cores(),
        host_memory_bytes=_host_memory_bytes(),
        in_colab="google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ,
    )


def device() -> torch.device:
    """Where an experiment runs here: ``cuda`` if it can be measured, else ``cpu``."""
    return torch.device("cuda" if _accelerator()[0] in ("cuda", "rocm") else "cpu")


def _accelerator() -> tuple[str, str, int | None, bool, str]:
    """Kind, name, capacity in bytes, native bfloat16, note."""
    broken = ""
    if torch.cuda.is_available():
        try:
            return _cuda_device()
        except (RuntimeError, AssertionError) as error:  # a driver that answers, then fails
            reason = str(error).partition("\n")[0]
            broken = f"CUDA is installed but the GPU could not be used: {reason}. "
    if torch.backends.mps.is_available():
        note = f"PyTorch cannot measure an Apple GPU's memory in detail: {_TRACKED}."
        name, capacity_bytes = f"Apple GPU ({_processor()})", torch.mps.recommended_max_memory()
        return "mps", name, capacity_bytes, False, note
    if torch.xpu.is_available():
        note = f"Lessons do not measure Intel GPUs: {_TRACKED}."
        found = torch.xpu.get_device_properties()
        return "xpu", found.name, found.total_memory, False, note
    note = f"{broken}No GPU to measure: {_TRACKED}."
    return "cpu", _processor(), None, _cpu_bf16(), note


def _cuda_device() -> tuple[str, str, int | None, bool, str]:
    name, capacity_bytes = torch.cuda.get_device_name(), cuda_memory.capacity()
    kind = "rocm" if torch.version.hip else "cuda"
    through = " through ROCm, which answers PyTorch's CUDA calls" if kind == "rocm" else ""
    # Without this argument the answer is yes even where bfloat16 is only emulated, as on a T4.
    bf16_native = torch.cuda.is_bf16_supported(including_emulation=False)
    note = f"Measured for real on {name} ({format_bytes(capacity_bytes)}){through}."
    return kind, name, capacity_bytes, bf16_native, note


@functools.cache
def _cpu_bf16() -> bool:
    ask = getattr(torch.cpu, "get_capabilities", None)  # older PyTorch lacks it
    found = ask() if ask else {}
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["torch"] = str(torch.__version__)  # with its build, "+cu130"
    found["cuda"] = torch.version.cuda or torch.version.hip
    return found


@functools.cache
def _driver(kind: str) -> str | None:
    """The GPU driver's version: from the kernel module, else from nvidia-smi (Windows)."""
    module = {"cuda": "nvidia", "rocm": "amdgpu"}.get(kind)
    if module is None:
        return None
    path = Path("/sys/module", module, "version")
    if path.is_file():
        return path.read_text().strip()
    program = shutil.which("nvidia-smi")
    if kind != "cuda" or program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # a version that is nice to have is no reason to stop a lesson
    return answer.stdout.partition("\n")[0].strip() or None


@functools.cache
def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _host_memory_bytes() -> int | None:
    found = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # a container's, versions 2 and 1
        path = Path("/sys/fs/cgroup", name)
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            found.append(int(text))
    return min(found, default=None)


# --- pretending to be another GPU --------------------------------------------------------------


@dataclass(frozen=True, eq=False)  # equal ones may nest, and each leaves by itself
class _Pretence:
    card: Gpu | None
    budget_bytes: int | None


_NONE = _Pretence(None, None)
_pretences: list[_Pretence] = []


def pretended() -> Gpu | None:
    """The GPU that the innermost `pretend` names, if any."""
    return _pretences[-1].card if _pretences else None


def current_budget_bytes() -> int | None:
    """What PyTorch's allocator may take under the innermost `pretend`; None without a limit."""
    return _pretences[-1].budget_bytes if _pretences else None


@contextmanager
def pretend(
    name: str | Gpu | None = None, *, budget_bytes: int | None = None
) -> Iterator[Gpu | None]:
    """Work as if on a smaller GPU, inside a ``with`` block.

    On a CUDA machine the allocator is capped, so a real out-of-memory error comes where the
    smaller card would raise it. Elsewhere the budget applies to what is tracked and simulated.
    Blocks nest; leaving one, by an error too, restores what was before.

    Args:
        name: a GPU of the catalogue; its ``budget_bytes`` is the limit. None with no budget
            lifts the limit for the block.
        budget_bytes: a limit in bytes, instead of a GPU.

    Yields:
        The GPU, or None for a plain budget.

    Raises:
        InputError: unknown GPU, both arguments, a budget that is no positive whole number, or a
            real card smaller than the pretended one.
    """
    if name is not None and budget_bytes is not None:
        raise InputError("pretend takes a GPU or budget_bytes, not both")
    card = gpu(name) if name is not None else None
    if budget_bytes is not None:
        budget_bytes = positive_int(budget_bytes, "budget_bytes", most=1 << 50)
    pretence = _Pretence(card, card.budget_bytes if card else budget_bytes)
    _cap(pretence)
    _pretences.append(pretence)
    try:
        yield card
    finally:
        _pretences.remove(pretence)
        _cap(_pretences[-1] if _pretences else _NONE)


def _cap(pretence: _Pretence) -> None:
    capacity_bytes = cuda_memory.capacity() if device().type == "cuda" else None
    if capacity_bytes is None:
        return
    if pretence.budget_bytes is None:
        cuda_memory.cap(1.0)
        return
    if pretence.budget_bytes > capacity_bytes:
        what = pretence.card.name if pretence.card else "That budget"
        raise InputError(
            f"{what} needs {format_bytes(pretence.budget_bytes)}, but this machine's GPU has "
            f"{format_bytes(capacity_bytes)}. Pretend to be a smaller one, or use simulate()."
        )
    cuda_memory.empty_cache()  # what is cached already would otherwise escape the cap
    cuda_memory.cap(pretence.budget_bytes / capacity_bytes)
