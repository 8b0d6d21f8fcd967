"""Notebooks on Colab and Kaggle: how to get a GPU there, and the torchao that peft refuses.

Both lend a machine for some hours and take it back with all that was installed on it, which is why
`prepare` may remove a package there. It changes nothing on any other machine, nor on services that
keep a machine's packages (Lightning, SageMaker Studio, a server of one's own): `labkit doctor`
tells there.

Colab is told by its COLAB_RELEASE_TAG (`labkit.hardware`), Kaggle by its KAGGLE_KERNEL_RUN_TYPE,
which public notebooks read for it. Limits: the words for a GPU are those of the services' menus in
2026 and may change; neither service was at hand to try.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass

from labkit.hardware import Machine


@dataclass(frozen=True)
class Host:
    """A service that lends the machine. ``gpu`` says where in its menus a GPU is asked for."""

    name: str
    gpu: str


COLAB = Host("Colab", "Runtime → Change runtime type → T4 GPU")
KAGGLE = Host("Kaggle", "Settings → Accelerator → GPU T4 x2")
_UNINSTALL_SECONDS = 120


def host(machine: Machine) -> Host | None:
    """The service that lends ``machine``; None on a machine that keeps what is installed on it."""
    if machine.in_colab:
        return COLAB
    return KAGGLE if os.environ.get("KAGGLE_KERNEL_RUN_TYPE") else None


def for_a_gpu(machine: Machine) -> str:
    """How to get a GPU where there is none but the service lends them; else empty."""
    found = host(machine)
    if found is None or machine.can_measure:
        return ""
    return (
        f"{found.gpu}. That starts a new machine: run all cells again on it. "
        "Until then the lesson goes on, and simulates."
    )


def refused_torchao() -> str:
    """Why the installed peft refuses the installed torchao, in peft's words; empty if it does not.

    peft asks for torchao inside ``get_peft_model``, and raises there if it finds one that is too
    old, used or not (``peft.import_utils.is_torchao_available``, peft 0.19 to 0.21). Where there is
    no torchao nothing is imported; else peft is, which takes seconds.
    """
    if importlib.util.find_spec("torchao") is None:
        return ""
    from peft.import_utils import is_torchao_available

    try:
        is_torchao_available()
    except ImportError as error:
        return str(error)
    return ""


def prepare(machine: Machine) -> str:
    """Remove a torchao that peft refuses from a machine that is lent; nothing on any other.

    Removing it needs no restart of the kernel and no download, and no lesson uses it.

    Returns:
        What was done, or what could not be, in a sentence; empty if there was nothing to do.
    """
    if host(machine) is None or not (reason := refused_torchao()):
        return ""
    command = [sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", "torchao"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_UNINSTALL_SECONDS)
        answer = done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        answer = str(error)
    importlib.invalidate_caches()
    said = f"peft refuses torchao: {reason}."
    if refused_torchao():
        return f"{said} It could not be removed, so LoRA will not work here. {answer}"
    return f"{said} It was removed from this borrowed machine; no lesson needs it."
