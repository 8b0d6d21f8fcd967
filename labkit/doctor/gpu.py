"""`labkit doctor` on the GPU: found by the driver, used by PyTorch, new enough, free.

Limits: NVIDIA's driver is asked through ``nvidia-smi``; of other vendors' GPUs PyTorch is asked.
"""

import os
import re
import subprocess
from collections.abc import Sequence

from labkit.doctor.finding import Finding
from labkit.values import format_bytes

NEARLY_FULL = 0.5  # of a GPU's memory in use by others: lessons at GPU size may not fit
_INSTALL = "https://pytorch.org/get-started/locally"


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None if ``nvidia-smi`` does not find a GPU."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.check_output(command, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.split()[0]


def check_gpu() -> list[Finding]:
    """Check that PyTorch can use the GPU that the driver finds, and that it is free."""
    import torch

    from labkit.hardware.this_machine import machine

    here = machine()
    if here.can_measure:
        well = Finding("ok", "gpu", f"{here.name}: lessons measure it")
        return [well, *_too_old(), *_in_use()] if here.kind == "cuda" else [well]
    if torch.cuda.is_available():  # it answers, and then fails
        remedy = "restart the computer; see whether `nvidia-smi` shows errors or another program"
        return [Finding("problem", "gpu", here.note, remedy)]
    version = driver_version()
    if version is None:
        text = f"none to measure ({here.name}): lessons simulate the one that you name"
        return [Finding("ok", "gpu", text)]
    text = f"there is an NVIDIA driver ({version}), but this PyTorch cannot use it"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        remedy = "unset CUDA_VISIBLE_DEVICES, which may hide every GPU"
    elif torch.version.cuda is None:
        remedy = f"install a CUDA build of PyTorch: {_INSTALL}"
    else:
        remedy = f"update the driver, or install a PyTorch for a CUDA before {torch.version.cuda}"
    return [Finding("problem", "gpu", text, remedy)]


def _too_old() -> list[Finding]:
    import torch

    capability, built_for = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    if runs_on(capability, built_for):
        return []
    text = (
        f"its compute capability is {capability[0]}.{capability[1]}, and this PyTorch is built "
        f"for {', '.join(built_for)}: it stops with 'no kernel image is available'"
    )
    remedy = (
        f"install another build of PyTorch ({_INSTALL}), or simulate: set CUDA_VISIBLE_DEVICES="
    )
    return [Finding("problem", "gpu", text, remedy)]


def runs_on(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Return whether a PyTorch built for these architectures has code for a GPU's capability.

    Binary code (``sm_80``) runs on the same major and an equal or higher minor version; what the
    driver compiles (``compute_90``) on anything newer (CUDA C++ Programming Guide, "Binary
    compatibility" and "PTX compatibility"). Code for one architecture only (``sm_90a``) does not
    count. An empty list (PyTorch does not say) counts as a yes.
    """
    for name in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)", name)
        if match is None:
            continue
        version = int(match[2]), int(match[3])
        if version <= capability and (match[1] == "compute" or version[0] == capability[0]):
            return True
    return not built_for


def _in_use() -> list[Finding]:
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info()
    if free_bytes >= (1 - NEARLY_FULL) * total_bytes:
        return []
    text = f"only {format_bytes(free_bytes)} of {format_bytes(total_bytes)} are free"
    remedy = "end other kernels and programs that use it (`nvidia-smi` lists them)"
    return [Finding("note", "gpu", text, remedy)]
