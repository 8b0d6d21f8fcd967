"""Notebooks on Colab and Kaggle: how to get a GPU there, and their torchao, which peft may refuse.

Both lend a machine for some hours, so `prepare` may remove a package there. On any other machine,
`labkit doctor` names the problem. Limits: the words for a GPU are those of the services' menus in
2026 and may change; neither service could be tried.
"""

import importlib
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


def prepare(machine: Machine) -> str:
    """Remove torchao from a machine that is lent, and say so; "" where there is nothing to do.

    peft (0.19 to 0.21) raises in ``get_peft_model`` where the one that is installed is too old.
    """
    if host(machine) is None or importlib.util.find_spec("torchao") is None:
        return ""
    command = [sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", "torchao"]
    done = subprocess.run(command, capture_output=True, text=True)
    importlib.invalidate_caches()
    if done.returncode:
        return f"torchao could not be removed, and peft may refuse it: {done.stderr.strip()}"
    return "Removed from this borrowed machine: peft may refuse it, and no lesson needs it."
