"""What `labkit doctor` looks at: each problem by name, each with its remedy.

Python, packages, their versions and whether they can be imported, Jupyter's kernel and widgets,
folders and disks, this machine's memory and cores, environment variables, compilers, GPU and
driver.

Limits: nothing is changed or downloaded, and no network is asked. What is started ends by itself:
a Python that imports the packages, the compiler on one line, ``nvidia-smi``. Versions are compared
with what this package asks for, not with what is newest. What is looked at is this Python's
environment: Jupyter may run in another one.
"""

from labkit.doctor.environment import check_encoding, check_shadows, check_variables
from labkit.doctor.findings import Check, Finding, first_line, pip
from labkit.doctor.gpu import check_gpu, nvidia_driver
from labkit.doctor.imports import Imports
from labkit.doctor.jupyter import check_jupyter, check_kernel, check_widgets
from labkit.doctor.machine import (
    check_cache,
    check_compiler,
    check_cores,
    check_deepspeed,
    check_disk,
    check_folders,
    check_loopback,
    check_memory,
    check_shared_memory,
    check_small_model,
)
from labkit.doctor.packages import check_labkit, check_packages, check_python, required_names

__all__ = ["Finding", "examine", "nvidia_driver"]

# Those that need no PyTorch run while the packages are being imported in a process of their own.
_FIRST: tuple[Check, ...] = (
    check_python,
    check_labkit,
    check_packages,
    check_kernel,
    check_widgets,
    check_jupyter,
    check_shadows,
    check_encoding,
    check_cache,
    check_small_model,
    check_folders,
    check_disk,
    check_shared_memory,
    check_loopback,
)
_WITH_TORCH: tuple[Check, ...] = (
    check_memory,
    check_cores,
    check_compiler,
    check_deepspeed,
    check_gpu,
)


def examine() -> list[Finding]:
    """Look at everything. A check that fails itself is a problem, never an exception."""
    imports = Imports(required_names())
    findings = [finding for check in _FIRST for finding in _guarded(check)]
    findings += _guarded(imports.check)
    findings += _guarded(lambda: check_variables(imports), "variables")
    if imports.works("torch"):  # importing it might end this process
        findings += [finding for check in _WITH_TORCH for finding in _guarded(check)]
    return findings


def _guarded(check: Check, subject: str | None = None) -> list[Finding]:
    subject = subject or check.__name__.removeprefix("check_").replace("_", " ")
    try:
        return list(check())
    except Exception as error:  # a broken installation may raise anything; we go on looking
        text = f"could not be checked: {type(error).__name__}: {first_line(error)}"
        remedy = "make the environment again, as the README says; if this stays, please report it"
        if isinstance(error, ModuleNotFoundError) and error.name:
            remedy = pip(f"install {error.name.partition('.')[0]}")
        return [Finding("problem", subject, text, remedy)]
