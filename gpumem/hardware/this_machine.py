"""This machine, and the memory budget it works under.

Limits: one GPU, the current one. An Apple GPU (MPS) is named but not measured, because PyTorch's
allocator there does not report what lessons need. `pretend` caps PyTorch's allocator, not the CUDA
context or other libraries.
"""

import functools
import importlib.metadata
import math
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from gpumem.hardware import PHANTOM_VARIABLE, catalogue, cuda
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError, positive_int
from gpumem.units import GIB, format_bytes

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
_TRACKED = (
    "small runs are tracked on the CPU; figures at GPU size are simulated for the GPU you name"
)


@dataclass(frozen=True)
class Machine:
    """What this computer is to the lessons, or as much of it as a record says.

    Attributes:
        kind: ``"cuda"``, ``"rocm"``, ``"mps"`` or ``"cpu"``.
        phantom: the GPU is not there: bytes are those of PyTorch's own CUDA code, but nothing is
            computed, so that values and seconds say nothing.
        name: of the GPU, or of the processor where there is none.
        capacity_bytes: memory of the GPU as the driver reports it; None on a CPU.
        note: a sentence: what is measured here and what is simulated.
        versions: of ``PACKAGES``, ``python``, ``cuda`` (or ROCm) and ``driver``; None if absent.
        bf16_native: the device computes in bfloat16 itself; False where that is not known.
        cores: CPU cores this process may use.
        host_memory_bytes: of the computer or the container, whichever is less.
        in_colab: running in Google Colab.
    """

    kind: str
    name: str
    capacity_bytes: int | None = None
    note: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    bf16_native: bool = False
    cores: int = 0
    host_memory_bytes: int = 0
    in_colab: bool = False
    phantom: bool = False

    @property
    def can_measure(self) -> bool:
        """Whether experiments run on CUDA here, on a real GPU or a phantom."""
        return self.kind in ("cuda", "rocm")

    @property
    def computes_on(self) -> str:
        """Where values are computed: ``"cuda"`` on a GPU that is there, else ``"cpu"``."""
        return "cuda" if self.can_measure and not self.phantom else "cpu"

    @property
    def processor(self) -> str:
        """The name of what computes values here, and takes time: for a phantom it is the CPU."""
        return "this machine's CPU" if self.phantom else self.name

    @property
    def label(self) -> str | None:
        """Where figures of this machine's GPU come from, as `Run.label`; None without a GPU."""
        where = "on a phantom" if self.phantom else "measured on"
        return f"{where} {self.name}" if self.can_measure else None


def machine() -> Machine:
    """Describe this computer. Cheap enough to ask before every run."""
    found = _accelerator()
    affinity = hasattr(os, "sched_getaffinity")  # Linux
    return Machine(
        **found,
        versions=_versions() | {"driver": _driver(found["kind"])},
        cores=len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1,
        host_memory_bytes=_host_memory_bytes(),
        in_colab="google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ,
    )


def device() -> torch.device:
    """Return where an experiment runs: ``cuda`` if it can be measured, else ``cpu``."""
    return torch.device("cuda" if _accelerator()["kind"] in ("cuda", "rocm") else "cpu")


def _accelerator() -> dict[str, Any]:
    """Return the fields of `Machine` that depend on the accelerator."""
    broken = ""
    if torch.cuda.is_available():
        try:
            return _cuda_device()
        except (RuntimeError, AssertionError) as error:  # a driver that answers, then fails
            reason = str(error).partition("\n")[0]
            broken = f"CUDA is installed but the GPU could not be used: {reason}. "
    found = {
        "kind": "cpu",
        "name": _processor(),
        "capacity_bytes": None,
        "bf16_native": _cpu_bf16(),
        "note": f"{broken}No GPU to measure: {_TRACKED}.",
    }
    if torch.backends.mps.is_available():
        found |= {"kind": "mps", "name": f"Apple GPU ({_processor()})", "bf16_native": False}
        found["capacity_bytes"] = torch.mps.recommended_max_memory()
        found["note"] = f"PyTorch cannot measure an Apple GPU's memory in detail: {_TRACKED}."
    return found


def _cuda_device() -> dict[str, Any]:
    name = torch.cuda.get_device_name()
    capacity_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    described = f"{name} ({format_bytes(capacity_bytes)})"
    through = " through ROCm, which answers PyTorch's CUDA calls" if torch.version.hip else ""
    phantom = PHANTOM_VARIABLE in os.environ
    note = f"Measured for real on {described}{through}."
    if phantom:
        note = (
            f"A phantom {described}: bytes are those of PyTorch's own CUDA code; nothing is "
            "computed or timed."
        )
    return {
        "kind": "rocm" if torch.version.hip else "cuda",
        "name": name,
        "capacity_bytes": capacity_bytes,
        # Without this argument the answer is yes even where it is only emulated, as on a T4.
        "bf16_native": torch.cuda.is_bf16_supported(including_emulation=False),
        "note": note,
        "phantom": phantom,
    }


@functools.cache
def _cpu_bf16() -> bool:
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    found["python"] = platform.python_version()
    found["torch"] = str(torch.__version__)  # with its build, "+cu130"
    found["cuda"] = torch.version.cuda or torch.version.hip
    return found


@functools.cache
def _driver(kind: str) -> str | None:
    """The version of the GPU driver's kernel module; None where Linux does not name one."""
    module = {"cuda": "nvidia", "rocm": "amdgpu"}.get(kind, "")
    path = Path("/sys/module", module, "version")
    return path.read_text().strip() if module and path.is_file() else None


@functools.cache
def _processor() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.is_file() else ""
    if found := re.search(r"^model name\s*:(.*)", text, re.MULTILINE):
        return found[1].strip()
    return platform.processor() or platform.machine() or "CPU"


def _host_memory_bytes() -> int:
    found = [psutil.virtual_memory().total]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # a container's, versions 2 and 1
        path = Path("/sys/fs/cgroup", name)
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            found.append(int(text))
    return min(found)


class _Pretence(NamedTuple):
    gpu: Gpu | None
    budget_bytes: int | None


_pretences = [_Pretence(None, None)]


def pretended() -> Gpu | None:
    """The GPU that the innermost `pretend` names, if any."""
    return _pretences[-1].gpu


def current_budget_bytes() -> int | None:
    """What PyTorch's allocator may take under the innermost `pretend`; None without a limit."""
    return _pretences[-1].budget_bytes


@contextmanager
def pretend(
    name: str | Gpu | None = None, *, budget_bytes: int | None = None
) -> Iterator[Gpu | None]:
    """Work as if on a smaller GPU, inside a ``with`` block.

    On a CUDA machine the allocator is capped, so a real out-of-memory error comes where the
    smaller GPU would raise it. Elsewhere the budget applies to what is tracked and simulated.
    Blocks nest; leaving one, by an error too, restores what was before. Yields the GPU, if any.

    Args:
        name: a GPU of the catalogue; its ``budget_bytes`` is the limit. None with no budget
            lifts the limit for the block.
        budget_bytes: a limit in bytes, instead of a GPU.

    Raises:
        InputError: unknown GPU, both arguments, a budget that is no positive whole number, or a
            real GPU smaller than the pretended one.
    """
    if name is not None and budget_bytes is not None:
        raise InputError("pretend takes a GPU or budget_bytes, not both")
    gpu = catalogue.gpu(name) if name is not None else None
    if budget_bytes is not None:
        budget_bytes = positive_int(budget_bytes, "budget_bytes", most=1 << 50)
    pretence = _Pretence(gpu, gpu.budget_bytes if gpu else budget_bytes)
    _cap(pretence)
    _pretences.append(pretence)
    try:
        yield gpu
    finally:
        _pretences.pop()
        _cap(_pretences[-1])


def _cap(pretence: _Pretence) -> None:
    here, budget_bytes = machine(), pretence.budget_bytes
    if not here.can_measure:
        return
    if budget_bytes is None:
        cuda.cuda_memory.cap(1.0)
        return
    if budget_bytes > here.capacity_bytes:
        what = pretence.gpu.name if pretence.gpu else "That budget"
        raise InputError(
            f"{what} needs {format_bytes(budget_bytes)}, but this machine's GPU has "
            f"{format_bytes(here.capacity_bytes)}. Pretend to be a smaller one, or use simulate()."
        )
    cuda.cuda_memory.empty_cache()  # what is cached already would otherwise escape the cap
    cuda.cuda_memory.cap(budget_bytes / here.capacity_bytes)


#: GPUs of one model report capacities that differ by less than this fraction: drivers and ECC.
SAME_CAPACITY = 0.06


def gpu_key(name: str, capacity_bytes: int | None = None) -> str:
    """Return the results folder of the GPU that the driver calls ``name``: its catalogue key,
    else made from its name and size ("NVIDIA A100" comes in two)."""
    if listed := _listed(name, capacity_bytes):
        return listed.key
    key = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"
    return key if capacity_bytes is None else f"{key}-{math.ceil(capacity_bytes / GIB)}gib"


def this_gpu() -> Gpu:
    """Return this GPU as in the catalogue, or with what is known of one that is not listed."""
    here = machine()
    if listed := _listed(here.name, here.capacity_bytes):
        return listed
    key = gpu_key(here.name, here.capacity_bytes)
    capability = torch.cuda.get_device_capability()
    return catalogue.unlisted(key, here.name, here.capacity_bytes, capability)


def _listed(name: str, capacity_bytes: int | None) -> Gpu | None:
    """The GPU of the catalogue with this name and size, if there is one."""
    sizes = ["", *(f" {gpu.memory_gb:g}GB" for gpu in catalogue.GPUS.values())]
    for size in sizes if capacity_bytes else [""]:
        try:
            found = catalogue.gpu(name + size)
        except InputError:  # not in the catalogue, or in several sizes
            continue
        differing_bytes = abs(found.usable_bytes - (capacity_bytes or found.usable_bytes))
        if differing_bytes <= SAME_CAPACITY * found.usable_bytes:
            return found
    return None
