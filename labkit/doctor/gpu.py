"""`labkit doctor` on the GPU: found by the driver, used by PyTorch, free.

Limits: NVIDIA's driver is asked through ``nvidia-smi``; of other vendors' GPUs PyTorch is asked.
"""

import os
import subprocess

import torch

from gpumem.hardware import this_machine
from gpumem.inputs import format_bytes
from labkit.doctor.packages import Finding

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
    here = this_machine.machine()
    if here.phantom:
        return [Finding("ok", "gpu", here.note)]
    if here.can_measure:
        return [_computes(here.name), *_in_use()]
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


def _computes(name: str) -> Finding:
    """Check that this build of PyTorch has code for the GPU, by using it."""
    try:
        torch.ones(1, device="cuda").add(1).item()
    except RuntimeError as error:  # "no kernel image is available" where the GPU is too old
        reason = str(error).partition("\n")[0]
        remedy = f"install another build of PyTorch ({_INSTALL}), or set CUDA_VISIBLE_DEVICES="
        return Finding("problem", "gpu", f"{name} cannot compute: {reason}", remedy)
    return Finding("ok", "gpu", f"{name}: lessons measure it")


def _in_use() -> list[Finding]:
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    if free_bytes >= (1 - NEARLY_FULL) * total_bytes:
        return []
    text = f"only {format_bytes(free_bytes)} of {format_bytes(total_bytes)} are free"
    remedy = "end other kernels and programs that use it (`nvidia-smi` lists them)"
    return [Finding("note", "gpu", text, remedy)]
