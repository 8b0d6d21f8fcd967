"""The GPU catalogue: what a named GPU holds, how fast it moves bytes, how fast it multiplies.

The figures live in ``gpus.toml`` beside this file, each with its source; this module reads and
looks them up. Standard library only.

A GPU that is not listed is described: ``"24GiB:8.9"`` is its memory and compute capability.

Limits: vendor peak rates, which no program reaches. One entry per common variant. Usable capacity
moves by a few tenths of a GiB with the driver and with ECC, so a verdict within 0.5 GiB of the
limit is a guess.
"""

import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gpumem.inputs import InputError, one_of, shown, size
from gpumem.units import GIB, MIB, format_bytes

#: What a CUDA context is assumed to take outside PyTorch's allocator where nobody has measured it.
#: It depends on the GPU, the driver and the kernels loaded: 0.1 to 0.9 GiB are seen.
CUDA_CONTEXT_BYTES = 512 * MIB
#: What a training must leave free of a GPU's budget to fit with room to spare. Kernels' own
#: workspaces are not simulated, and the capacity that GPUs of one name report differs by up to
#: 0.5 GiB: 2 to 5 % of most GPUs of the catalogue.
MARGIN = 0.05
#: Of one kind, that advice is given for.
MOST_GPUS = 1024
#: GB per second and direction of 16 lanes, by the PCI Express generation: 8, 16 and 32 GT/s with
#: 128b/130b coding, https://pcisig.com/specifications.
_LINK_GB_PER_S = {3: 15.75, 4: 31.5, 5: 63.0}
#: What is simulated unless another is named: free on Colab and Kaggle.
DEFAULT_GPU = "t4"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, of the catalogue or `unlisted`.

    Attributes:
        key: how lessons name it, ``"t4"``.
        name: how its vendor names it.
        memory_gb: capacity as the vendor prints it, in GB.
        usable_bytes: total capacity as CUDA reports it (``capacity_source``).
        context_bytes: what CUDA takes of it outside the allocator; 0 on unified memory.
        bandwidth_gb_per_s: memory bandwidth, GB (10**9 bytes) per second; None where nothing is
            known of the GPU's speed.
        nvlink_gb_per_s: what one GPU sends to others over NVLink or AMD's Infinity Fabric, in one
            direction; None where they have neither.
        host_link_gb_per_s: what its link to the host carries in one direction, where that is not
            PCI Express.
        fp32_tflops: rate in full FP32, 10**12 operations per second, a multiply-add counted as
            two; None where the vendor publishes none. TF32, which is faster, has no rate here.
        fp16_tflops: the same for dense FP16 on tensor cores.
        bf16_tflops: the same for bfloat16; None without native bfloat16 too.
        memory_type: ``"GDDR6"``, ``"HBM3"`` and so on.
        bf16_native: whether the hardware computes in bfloat16.
        unified: whether CPU and GPU share the memory.
        compute_capability: the generation of NVIDIA's hardware as (major, minor), which decides
            what kernels it runs; None for other vendors.
        multiprocessors: streaming multiprocessors, NVIDIA's SMs; None for other vendors.
        source: title and address of the vendor's document.
        capacity_source: where ``usable_bytes`` was read, or the rule it was derived by.
        context_source: ``"measured: …"``, else ``"assumed"``, or ``"none"`` on unified memory.
        note: which rate the TFLOPS are, and other small print.
    """

    key: str
    name: str
    memory_gb: float
    usable_bytes: int
    context_bytes: int
    bandwidth_gb_per_s: float | None
    nvlink_gb_per_s: float | None = None
    host_link_gb_per_s: float | None = None
    fp32_tflops: float | None = None
    fp16_tflops: float | None = None
    bf16_tflops: float | None = None
    memory_type: str
    bf16_native: bool
    unified: bool = False
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    source: str
    capacity_source: str
    context_source: str
    note: str

    @property
    def context_known(self) -> str:
        """How ``context_bytes`` is known: ``"measured"``, ``"assumed"``, or ``"none"`` there is."""
        return self.context_source.partition(":")[0]

    @property
    def budget_bytes(self) -> int:
        """What PyTorch's allocator can get: usable capacity less the context."""
        return self.usable_bytes - self.context_bytes

    @property
    def link_gb_per_s(self) -> float | None:
        """What the link to the host carries in one direction: as a rule, 16 lanes do.

        None where CPU and GPU share the memory. AMD's GPUs count as PCI Express 5.
        """
        if self.unified or self.host_link_gb_per_s:
            return self.host_link_gb_per_s
        major = self.compute_capability[0] if self.compute_capability else 9
        return _LINK_GB_PER_S[min(max(major - 4, 3), 5)]  # Volta and Turing have 3, Hopper 5

    @property
    def peer_gb_per_s(self) -> float | None:
        """What it sends to the server's other GPUs in one direction: NVLink's, else the link's."""
        return self.nvlink_gb_per_s or self.link_gb_per_s


def _read_catalogue(path: Path) -> dict[str, Gpu]:
    catalogue = {}
    for key, fields in tomllib.loads(path.read_text(encoding="utf-8")).items():
        fields["usable_bytes"] = round(fields.pop("usable_gib") * GIB)
        if fields.get("unified"):
            fields |= {"context_bytes": 0, "context_source": "none"}
        elif "context_mib" in fields:
            fields["context_bytes"] = fields.pop("context_mib") * MIB
        else:
            fields |= {"context_bytes": CUDA_CONTEXT_BYTES, "context_source": "assumed"}
        if capability := fields.get("compute_capability"):
            fields["compute_capability"] = tuple(map(int, capability.split(".")))
        # Only Apple's entries say so themselves: they publish no rate.
        fields.setdefault("bf16_native", "bf16_tflops" in fields)
        catalogue[key] = Gpu(key=key, **fields)
    return catalogue


GPUS: dict[str, Gpu] = _read_catalogue(Path(__file__).with_name("gpus.toml"))


def gpus() -> tuple[Gpu, ...]:
    """Return every GPU of the catalogue, the smallest memory first."""
    return tuple(sorted(GPUS.values(), key=lambda gpu: (gpu.usable_bytes, gpu.key)))


def larger_gpus(than: Gpu) -> Iterator[Gpu]:
    """Yield the catalogue's GPUs with more memory, the smallest first. Those that share the CPU's
    memory are none for one that does not."""
    for gpu in gpus():
        if gpu.budget_bytes > than.budget_bytes and gpu.unified == than.unified:
            yield gpu


def room_bytes(capacity_bytes: int, margin: float) -> int:
    """Return what may be taken of ``capacity_bytes`` where the share ``margin`` is to stay free, or
    raise an `InputError`."""
    if not isinstance(margin, int | float) or not 0 <= margin < 1:
        raise InputError(f"margin must be a share from 0 to below 1, not {margin!r}")
    return math.floor(capacity_bytes * (1 - margin))


# Words that name the vendor, the brand or the module, never the model. "pcie", "ti", "laptop"
# and the like do name another model, and stay.
_SILENT = {"nvidia", "amd", "apple", "tesla", "geforce", "instinct", "gpu", "graphics"}
_MODULE = re.compile(r"sxm\d*|hbm\d*e?")


def _fold(name: str) -> str:
    """``"NVIDIA A100-SXM4-40GB"`` and ``"a100-40gb"`` both become ``"a10040gb"``."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in _SILENT and not _MODULE.fullmatch(word))


def _spellings(gpu: Gpu) -> set[str]:
    folded = _fold(gpu.key)
    names = {folded, _fold(gpu.name), f"{folded}{gpu.memory_gb:g}gb"}
    return names | {name.removeprefix("rtx") for name in names}


def gpu(name: str | Gpu) -> Gpu:
    """Return the GPU called ``name``: a key or a full product name, case-insensitive.

    ``"24GiB:8.9"`` is one of 24 GiB, as CUDA reports them, and compute capability 8.9.

    Raises:
        InputError: no such GPU, or the name fits several; the message names the nearest. Of one
            described: the description makes no sense.
    """
    if isinstance(name, Gpu):
        return name
    text = str(name)
    folded = _fold(text)
    for candidate in GPUS.values():
        if folded in _spellings(candidate):
            return candidate
    in_sizes = re.compile(rf"(?:rtx)?{re.escape(folded)}\d+gb")
    sizes = [key for key in GPUS if in_sizes.fullmatch(_fold(key))]
    if sizes:
        choices = " or ".join(map(repr, sizes))
        raise InputError(f"GPU {name!r} comes in several sizes: say {choices}.")
    if ":" in text or _SIZE_ALONE.fullmatch(text.lower()):
        return _described(text)
    return GPUS[one_of(name, GPUS, "GPU")]


# --- GPUs that are not listed ---------------------------------------------------------------------

_SIZE_ALONE = re.compile(r"[-\d.]+ ?[kmgt]i?b")
_LEAST_BYTES, _MOST_BYTES = GIB, 1024 * GIB


def unlisted(key: str, name: str, usable_bytes: int, capability: tuple[int, int]) -> Gpu:
    """Return a GPU of which only the memory and NVIDIA's compute capability are known.

    Its speed is not known. The context is assumed. The multiprocessors are those of the listed GPU
    that is `_nearest`; they decide only into how many parts long sums and attention's keys are
    split, a few MiB.
    """
    return replace(
        _nearest(capability, usable_bytes),
        key=key,
        name=name,
        memory_gb=usable_bytes / GIB,
        usable_bytes=usable_bytes,
        context_bytes=CUDA_CONTEXT_BYTES,
        bandwidth_gb_per_s=None,
        nvlink_gb_per_s=None,
        host_link_gb_per_s=None,
        fp32_tflops=None,
        fp16_tflops=None,
        bf16_tflops=None,
        memory_type="unknown",
        bf16_native=capability >= (8, 0),
        compute_capability=capability,
        source="none: only its memory and compute capability are known",
        capacity_source="as given",
        context_source="assumed",
        note="Its speed is not known.",
    )


def rated(gpu: Gpu) -> Gpu:
    """Return ``gpu``, or the listed GPU nearest to it where nothing is known of its speed."""
    if gpu.bandwidth_gb_per_s is not None:
        return gpu
    return _nearest(gpu.compute_capability, gpu.usable_bytes)


def _nearest(capability: tuple[int, int], usable_bytes: int) -> Gpu:
    """Return the listed GPU of NVIDIA's with the nearest compute capability, then memory."""

    def distance(gpu: Gpu) -> tuple:
        apart = [abs(a - b) for a, b in zip(gpu.compute_capability, capability, strict=True)]
        return *apart, abs(gpu.usable_bytes - usable_bytes)

    return min((gpu for gpu in GPUS.values() if gpu.compute_capability), key=distance)


def _described(text: str) -> Gpu:
    """Return the GPU that ``"24GiB:8.9"`` describes."""
    memory, _, capability = (part.strip() for part in text.lower().partition(":"))
    if not memory or not capability:
        raise InputError(
            "a GPU that is not listed is described by its memory and compute capability, such as "
            f"24GiB:8.9, not {shown(text)}"
        )
    usable_bytes = size(memory, "a GPU's memory")
    if not _LEAST_BYTES <= usable_bytes <= _MOST_BYTES:
        least, most = map(format_bytes, (_LEAST_BYTES, _MOST_BYTES))
        raise InputError(f"a GPU's memory must be from {least} to {most}, not {shown(memory)}")
    known = {gpu.compute_capability for gpu in GPUS.values() if gpu.compute_capability}
    capabilities = {f"{major}.{minor}": (major, minor) for major, minor in sorted(known)}
    capability = one_of(capability, capabilities, "compute capability")
    name = f"NVIDIA GPU with {format_bytes(usable_bytes)} and compute capability {capability}"
    key = f"{memory.replace(' ', '')}:{capability}"
    return unlisted(key, name, usable_bytes, capabilities[capability])
