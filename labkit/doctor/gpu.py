"""`labkit doctor` on the GPU: seen by the driver, by PyTorch, new enough, free.

Limits: NVIDIA's driver is asked through ``nvidia-smi``; of AMD's, Apple's and Intel's GPUs is said
what PyTorch says. No CUDA context is made, and nothing is computed.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from labkit.doctor.findings import Finding, first_line
from labkit.memory import GIB, MIB, format_bytes

NEARLY_FULL = 0.5  # of a card's memory in others' hands: lessons at GPU size may not fit
_QUESTION = "--query-gpu=driver_version,uuid,memory.used,memory.total"
_NO_DEVICES = 6  # exit codes of nvidia-smi's, from its manual
_NOT_LOADED = 9


class Card(NamedTuple):
    """One GPU, as ``nvidia-smi`` sees it; None where it does not tell."""

    uuid: str
    used_bytes: int | None
    total_bytes: int | None


class Driver(NamedTuple):
    """What ``nvidia-smi`` says, of every GPU, also those that are hidden from PyTorch."""

    version: str
    cards: tuple[Card, ...] = ()
    exit_code: int = 0
    error: str = ""


def nvidia_driver() -> Driver | None:
    """NVIDIA's driver where ``nvidia-smi`` finds a GPU or fails, else None."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, _QUESTION, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return Driver("not answering")
    if answer.returncode == _NO_DEVICES:
        return None
    if answer.returncode:
        words = first_line(answer.stdout) or first_line(answer.stderr) or "it gives no reason"
        return Driver("not working", exit_code=answer.returncode, error=words)
    rows = [[field.strip() for field in line.split(",")] for line in answer.stdout.splitlines()]
    whole = [row for row in rows if len(row) == len(_QUESTION.split(","))]
    cards = [Card(uuid, _bytes(used), _bytes(total)) for _, uuid, used, total in whole]
    return Driver(rows[0][0], tuple(cards)) if rows else None


def _bytes(mebibytes: str) -> int | None:
    return int(mebibytes) * MIB if mebibytes.isdecimal() else None


def check_gpu() -> list[Finding]:
    """The machine, as lessons see it; whether a driver is there that PyTorch cannot use."""
    import torch

    from labkit.hardware import machine

    here = machine()
    driver = nvidia_driver()
    if here.can_measure:
        well = Finding("ok", "gpu", f"{here.name}: lessons measure it")
        return [well] if here.kind != "cuda" else [well, *_too_old(), *_in_use(driver)]
    if torch.cuda.is_available():  # it answers, and then fails
        remedy = "restart the computer; see whether `nvidia-smi` shows errors or another program"
        return [Finding("problem", "gpu", here.note, remedy)]
    if driver is None:
        text = f"none to measure ({here.name}): lessons simulate the one that you name"
        return [Finding("ok", "gpu", text)]
    if driver.error:
        return [_failing(driver)]
    text = f"there is an NVIDIA driver ({driver.version}), but this PyTorch cannot use it"
    return [Finding("problem", "gpu", text, _remedy(driver))]


def _failing(driver: Driver) -> Finding:
    """A driver that fails; where none is loaded, there may be no GPU, and the tool alone."""
    text = f"`nvidia-smi` fails (exit code {driver.exit_code}): {driver.error}"
    remedy = "restart the computer; if that does not help, install the NVIDIA driver again"
    if driver.exit_code == _NOT_LOADED:
        return Finding("note", "gpu", text, f"where there is an NVIDIA GPU, {remedy}")
    return Finding("problem", "gpu", text, remedy)


def _remedy(driver: Driver) -> str:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return "unset CUDA_VISIBLE_DEVICES: it hides every GPU"
    if torch.version.cuda is None:
        return "install a CUDA build of PyTorch: https://pytorch.org/get-started/locally"
    if visible is not None:
        return f"unset CUDA_VISIBLE_DEVICES: there may be no GPU {visible!r}"
    if driver.version == "not answering":
        return "restart the computer; if `nvidia-smi` still hangs, install the driver again"
    return (
        f"update the NVIDIA driver, or install a PyTorch built for an older CUDA than "
        f"{torch.version.cuda}"
    )


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
        "install another build of PyTorch, https://pytorch.org/get-started/locally, or simulate: "
        "`CUDA_VISIBLE_DEVICES= make lab`"
    )
    return [Finding("problem", "gpu", text, remedy)]


def runs_on(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Whether a PyTorch built for these architectures has code for a GPU of this capability.

    Binary code (``sm_80``) runs on the same major and an equal or higher minor version; what the
    driver compiles (``compute_90``) on anything newer (CUDA C++ Programming Guide, "Binary
    compatibility" and "PTX compatibility"). Code for one architecture only (``sm_90a``) does not
    count. An empty list means that PyTorch does not tell, and is taken for a yes.
    """
    known = [re.fullmatch(r"(sm|compute)_(\d+)(\d)", name) for name in built_for]
    for match in filter(None, known):
        version = int(match[2]), int(match[3])
        same_major = version[0] == capability[0]
        if version <= capability and (match[1] == "compute" or same_major):
            return True
    return not built_for


def _in_use(driver: Driver | None) -> list[Finding]:
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    card = next((card for card in driver.cards if card.uuid == uuid), None) if driver else None
    if card is None or not card.total_bytes or card.used_bytes is None:
        return []
    if card.used_bytes <= NEARLY_FULL * card.total_bytes:
        return []
    free_bytes = card.total_bytes - card.used_bytes
    text = (
        f"others hold {card.used_bytes / GIB:.1f} of its {format_bytes(card.total_bytes)}; "
        f"{format_bytes(free_bytes)} are free"
    )
    remedy = "end other kernels and programs that use it (`nvidia-smi` lists them)"
    return [Finding("note", "gpu", text, remedy)]
