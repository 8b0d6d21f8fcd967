"""What `labkit doctor` looks at: each problem by name, each with its remedy.

Python, packages and their versions, the notebook kernel, the cache folder, disk space, a compiler,
GPU and driver. Limits: nothing is changed, downloaded or started; versions are compared with what
this package asks for, not with what is newest.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from labkit.memory import GIB, InputError, format_bytes
from labkit.small_model import cache_folder

DISTRIBUTION = "gpu-memory-lab"
PACKAGE = Path(__file__).resolve().parent
SMALLEST_PYTHON = (3, 11)
DISK_BYTES = 2 * GIB  # the small model's file, its converted copy, and the executed notebooks


class Finding(NamedTuple):
    """``status`` is ``ok``, ``note`` (works, but less) or ``problem``; then there is a remedy."""

    status: str
    subject: str
    text: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at everything. A check that fails itself is a problem, never an exception."""
    checks: tuple[Callable[[], Iterable[Finding]], ...] = (
        check_python,
        check_packages,
        check_kernel,
        check_cache,
        check_disk,
        check_compiler,
        check_gpu,
    )
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as error:  # a broken installation may raise anything; we go on looking
            subject = check.__name__.removeprefix("check_")
            text = f"could not be checked: {type(error).__name__}: {error}"
            findings.append(Finding("problem", subject, text, "reinstall: pip install -e ."))
    return findings


def check_python() -> list[Finding]:
    """The interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= SMALLEST_PYTHON:
        return [Finding("ok", "python", f"{version} ({sys.executable})")]
    least = ".".join(map(str, SMALLEST_PYTHON))
    remedy = f"install Python {least} or newer and make the environment again with it"
    return [Finding("problem", "python", f"{version} is older than {least}", remedy)]


def requirements() -> list[str]:
    """What this package asks for, from its installed metadata, else from ``pyproject.toml``.

    Raises:
        InputError: neither is there.
    """
    project = PACKAGE.parent / "pyproject.toml"
    if project.is_file():  # a working copy: its file is newer than what was installed from it
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        extras = table.get("optional-dependencies", {})
        optional = [
            f"{requirement.partition(';')[0]} ; extra == '{extra}'"
            for extra, names in extras.items()
            for requirement in names
        ]
        return [*table.get("dependencies", []), *optional]
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError(f"{DISTRIBUTION} is not installed") from error


def check_packages(wanted: Iterable[str] | None = None) -> list[Finding]:
    """Each required package: there, and in range. Those of extras are only noted if missing."""
    from packaging.requirements import Requirement

    findings: dict[str, Finding] = {}
    for line in requirements() if wanted is None else wanted:
        requirement = Requirement(line)
        marker = requirement.marker
        required = marker is None or marker.evaluate({"extra": ""})
        optional = not required and "extra" in str(marker)
        if requirement.name.lower() == DISTRIBUTION or not (required or optional):
            continue
        finding = _package(requirement.name, requirement.specifier, optional)
        known = findings.get(requirement.name)
        if known is None or known.status == "note":  # an extra may ask for the same package
            findings[requirement.name] = finding
    return list(findings.values())


def _package(name: str, wanted: "object", optional: bool) -> Finding:
    remedy = f"pip install '{name}{wanted}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if optional:
            return Finding("note", name, "optional, not installed", remedy)
        return Finding("problem", name, "is not installed", remedy)
    if not wanted.contains(version, prereleases=True):
        return Finding("problem", name, f"{version} is outside {wanted}", remedy)
    return Finding("ok", name, version)


def check_kernel() -> list[Finding]:
    """Whether notebooks can start this Python."""
    if importlib.util.find_spec("ipykernel") is None:
        text = "ipykernel is not installed: no notebook can run"
        return [Finding("problem", "kernel", text, "pip install ipykernel")]
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    remedy = f"{sys.executable} -m ipykernel install --sys-prefix"
    try:
        spec = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        return [Finding("problem", "kernel", "Jupyter knows no kernel python3", remedy)]
    command = spec.argv[0]
    this = command.startswith("python") or Path(command) == Path(sys.executable)
    if not this:
        text = f"Jupyter's python3 is {command}, another Python (`labkit run` uses this one)"
        return [Finding("note", "kernel", text, remedy)]
    return [Finding("ok", "kernel", "python3 is this Python")]


def check_cache() -> list[Finding]:
    """Whether the cache folder can be written, without making it."""
    folder = cache_folder()
    nearest = _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return [Finding("ok", "cache", str(folder))]
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror or error}"
        remedy = "set LABKIT_CACHE to a folder that you may write to"
        return [Finding("problem", "cache", text, remedy)]


def check_disk() -> list[Finding]:
    """Free space where models and executed notebooks go."""
    findings = []
    for subject, folder in (("disk (cache)", cache_folder()), ("disk (here)", Path.cwd())):
        free = shutil.disk_usage(_nearest(folder)).free
        text = f"{format_bytes(free)} free at {_nearest(folder)}"
        remedy = f"free some space: the course needs up to {format_bytes(DISK_BYTES)}"
        enough = free >= DISK_BYTES
        findings.append(
            Finding("ok", subject, text) if enough else Finding("problem", subject, text, remedy)
        )
    return findings


def _nearest(folder: Path) -> Path:
    """``folder`` itself, or the nearest parent that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def check_compiler() -> list[Finding]:
    """Whether ``torch.compile`` can work; the course does without, but shows less."""
    from labkit.compilers import missing_compiler

    lacking = missing_compiler()
    if lacking is None:
        return [Finding("ok", "compiler", "torch.compile has what it needs")]
    what, _, remedy = lacking.partition(": ")
    text = f"{what}; without it two lessons show less"
    return [Finding("note", "compiler", text, remedy.rstrip("."))]


def check_gpu() -> list[Finding]:
    """The machine, as lessons see it; whether a driver is there that PyTorch cannot use."""
    from labkit.hardware import machine

    here = machine()
    finding = Finding("ok", "gpu", f"{here.name}: {here.note}")
    driver = nvidia_driver()
    if here.can_measure or driver is None:
        return [finding]
    import torch

    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        remedy = "unset CUDA_VISIBLE_DEVICES: it hides every GPU"
    elif torch.version.cuda is None:
        remedy = "install a CUDA build of PyTorch: https://pytorch.org/get-started/locally"
    else:
        built = f"a PyTorch built for an older CUDA than {torch.version.cuda}"
        remedy = f"update the NVIDIA driver, or install {built}"
    text = f"there is an NVIDIA driver ({driver}), but this PyTorch cannot use it"
    return [finding, Finding("problem", "gpu", text, remedy)]


def nvidia_driver() -> str | None:
    """The NVIDIA driver's version where ``nvidia-smi`` finds a GPU, else None."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "not answering"
    lines = answer.stdout.split()
    return lines[0] if answer.returncode == 0 and lines else None
