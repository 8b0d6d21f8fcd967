"""Notebooks on Colab and Kaggle: how to get a GPU there, and the torchao that peft refuses.

Both lend a machine for some hours, so `prepare` may remove a package there. On any other machine,
`labkit doctor` names the problem. Limits: the words for a GPU are those of the services' menus in
2026 and may change; neither service could be tried.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys

from gpumem.hardware.this_machine import Machine

COLAB = "Runtime → Change runtime type → T4 GPU"
KAGGLE = "Settings → Accelerator → GPU T4 x2"


def host(machine: Machine) -> str | None:
    """Return where the service that lends ``machine`` offers a GPU; None if it is not lent."""
    if machine.in_colab:
        return COLAB
    return KAGGLE if os.environ.get("KAGGLE_KERNEL_RUN_TYPE") else None


def for_a_gpu(machine: Machine) -> str:
    """Return how to get a GPU if there is none and the service lends them; else ""."""
    menu = host(machine)
    if menu is None or machine.can_measure:
        return ""
    return (
        f"{menu}. That starts a new machine: run all cells again on it. "
        "Until then the lesson simulates."
    )


def refused_torchao() -> str:
    """Return why the installed peft refuses the installed torchao, in peft's words; "" if it does
    not. peft (0.19 to 0.21) asks in ``get_peft_model``, and raises if torchao is too old."""
    if importlib.util.find_spec("torchao") is None:
        return ""
    from peft.import_utils import is_torchao_available

    try:
        is_torchao_available()
    except ImportError as error:
        return str(error)
    return ""


def prepare(machine: Machine) -> str:
    """Remove a torchao that peft refuses from a machine that is lent, and say so; "" if not."""
    if host(machine) is None or not (reason := refused_torchao()):
        return ""
    command = [sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", "torchao"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120).stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        answer = str(error)
    importlib.invalidate_caches()
    said = f"peft refuses torchao: {reason}."
    if refused_torchao():
        return f"{said} It could not be removed, so LoRA will not work here. {answer}"
    return f"{said} It was removed from this borrowed machine; no lesson needs it."
