"""`labkit doctor`: what is wrong with this machine's set-up, each problem with its remedy.

Limits: nothing is changed or downloaded. Only this Python's environment is checked: Jupyter may
run in another one. NVIDIA's driver is asked through ``nvidia-smi``; of other vendors' GPUs PyTorch
is asked. Of a compiler it is checked that it is there, not that it works.
"""

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpumem.files import SOURCE, cache_folder
from gpumem.units import GIB, format_bytes

DISTRIBUTION = "gpu-memory-lab"
#: What lessons need, smallest first; `labkit phantom` needs none of them.
EXTRAS = ("estimate", "figures", "course", "notebooks")
#: What the course has been tested with; the package itself refuses what is older.
TESTED = {"torch": "<2.16", "transformers": "<5.24", "peft": "<0.22", "bitsandbytes": "<0.51"}
IMPORTED = "numpy torch transformers peft bitsandbytes accelerate datasets matplotlib ipywidgets"
#: Where one of these fails, PyTorch was imported before; else importing it might end this process.
_AFTER_TORCH = set(IMPORTED.split()) - {"numpy", "torch"}
IMPORT_SECONDS = 180
# Says the name of each package before importing it: the last name is that of the one that failed.
_IMPORT = """
import sys
for name in sys.argv[1:]:
    print(name, flush=True)
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # one that is not installed at all is found by its version
            raise
"""
_TORCH = "https://pytorch.org/get-started/locally"

DISK_BYTES = 2 * GIB  # the small model's file, its converted copy, and the executed notebooks
MEMORY_BYTES = 2 * GIB  # each lesson fits, as on Binder; some then leave a part out
AMPLE_BYTES = 4 * GIB  # the largest lesson takes 3.2 GiB where it sees more than this
NEARLY_FULL = 0.5  # of a GPU's memory in use by others: lessons at GPU size may not fit

_CPP_COMPILER = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
_NO_COMPILER = (
    "torch.compile needs {} here: on Debian and Ubuntu `apt-get install {}`; the environment "
    "variable {} may name another."
)


class Finding(NamedTuple):
    """``status`` is ``ok``, ``note`` (works, but shows less) or ``problem``."""

    status: str
    subject: str
    text: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Check everything. A check that fails itself is a problem, never an exception."""
    checks = [check_python, check_packages, check_disk, check_small_model]
    imports = _guarded(check_imports)
    if {finding.subject for finding in imports if finding.status == "problem"} <= _AFTER_TORCH:
        checks += [check_memory, check_compiler, check_gpu]
    return [*(finding for check in checks for finding in _guarded(check)), *imports]


def _guarded(check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # a broken installation may raise anything: the other checks go on
        subject = check.__name__.removeprefix("check_").replace("_", " ")
        text = f"could not be checked: {type(error).__name__}: {error}"
        remedy = "install the packages again, as the README says; if this stays, please report it"
        return [Finding("problem", subject, text, remedy)]


def as_text(findings: Iterable[Finding]) -> str:
    """Return a line for each finding, problems last, and one for each remedy.

    Lines are not wrapped, so that a command can be pasted.
    """
    order = ("ok", "note", "problem")
    ordered = sorted(findings, key=lambda finding: order.index(finding.status))
    width = max(len(finding.subject) for finding in ordered)
    lines = []
    for finding in ordered:
        lines.append(f"{finding.status:<8} {finding.subject:<{width}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':8} {'':{width}}  -> {finding.remedy}")
    problems = sum(finding.status == "problem" for finding in ordered)
    lines.append(f"Problems: {problems}." if problems else "All is well.")
    return "\n".join(lines)


# --- Python and its packages ---------------------------------------------------------------------


def check_python() -> Iterator[Finding]:
    """Say which Python and which labkit these are."""
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", "python", f"{python} ({sys.executable})")
    yield Finding("ok", "labkit", f"{importlib.metadata.version(DISTRIBUTION)} ({SOURCE})")


def requirements() -> Iterator[tuple[Any, list[str]]]:
    """Yield what the course requires, each with the extras that bring it; no extra, always."""
    from packaging.requirements import Requirement

    for line in importlib.metadata.requires(DISTRIBUTION) or []:
        requirement = Requirement(line)
        marker = requirement.marker
        extras = [extra for extra in EXTRAS if marker and marker.evaluate({"extra": extra})]
        if requirement.name != DISTRIBUTION and (extras or marker is None):
            yield requirement, extras


def check_packages() -> Iterator[Finding]:
    """Check that each required package is present, in range, and not newer than tested."""
    from packaging.specifiers import SpecifierSet

    present = 0
    for requirement, extras in requirements():
        name, wanted = requirement.name, requirement.specifier
        tested = SpecifierSet(TESTED.get(name, ""))
        remedy = _pip_install(f'"{name}{wanted}"')
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            status, text = "problem", "is not installed"
            if extras:
                status, text = "note", f"{text}, and the extra {extras[0]!r} asks for it"
            yield Finding(status, name, text, remedy)
            continue
        if not wanted.contains(version, prereleases=True):
            yield Finding("problem", name, f"{version} is outside {wanted}", remedy)
        elif not tested.contains(version, prereleases=True):
            text = f"{version} is newer than what the course has been tested with ({tested})"
            remedy = "if a lesson fails, " + _pip_install(f'"{name}{wanted & tested}"')
            yield Finding("note", name, text, remedy)
        else:
            present += 1
    yield Finding("ok", "packages", f"{present} are present and in range")


def check_imports() -> Iterator[Finding]:
    """Import packages in another process, which they may end; name the first that fails."""
    names = IMPORTED.split()
    command = [sys.executable, "-P", "-W", "ignore", "-c", _IMPORT, *names]
    options = {"stdin": subprocess.DEVNULL, "env": {**os.environ, "HF_HUB_OFFLINE": "1"}}
    try:
        done = subprocess.run(command, capture_output=True, timeout=IMPORT_SECONDS, **options)
    except subprocess.TimeoutExpired as error:
        said, text = error.stdout, f"importing it takes more than {IMPORT_SECONDS} seconds"
    else:
        said, errors = done.stdout, done.stderr.decode(errors="replace").strip()
        if done.returncode == 0:
            yield Finding("ok", "imports", "all that are installed work")
            return
        text = f"importing it ends Python ({done.returncode})"
        if done.returncode == 1 and errors:
            text = f"cannot be imported: {errors.splitlines()[-1]}"
    name = [word for word in said.decode(errors="replace").split() if word in names][-1]
    remedy = _pip_install(f"--force-reinstall --no-deps {name}")
    if name == "torch":
        remedy = f"install PyTorch again: {_TORCH}"
    yield Finding("problem", name, text, remedy)


def _pip_install(arguments: str) -> str:
    return f"`{shlex.quote(sys.executable)} -m pip install {arguments}`"


# --- the computer --------------------------------------------------------------------------------


def check_disk() -> Iterator[Finding]:
    """Check that lessons can write, and have room: in the cache, here, in temporary files."""
    from gpumem.models import pretrained

    folders = {
        "results": (Path.cwd(), "work in"),
        "temporary files": (Path(tempfile.gettempdir()), "set TMPDIR to"),
    }
    if not pretrained.converted_folder().is_dir():  # a class may share one, read only
        folders["cache"] = (cache_folder(), "set LABKIT_CACHE to")
    for use, (folder, choose) in folders.items():
        folder = folder.absolute()
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        free_bytes = shutil.disk_usage(existing).free
        text, remedy = f"{format_bytes(free_bytes)} free at {existing}", ""
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            text, remedy = f"{existing} cannot be written", f"{choose} a folder that can be"
        elif free_bytes < DISK_BYTES:
            remedy = f"free some space: the course needs up to {format_bytes(DISK_BYTES)}"
        yield Finding("problem" if remedy else "ok", f"disk ({use})", text, remedy)


def check_memory() -> Iterator[Finding]:
    """Check that a lesson finds enough memory: the computer's, or the container's."""
    import psutil

    from gpumem.hardware.this_machine import machine

    total_bytes = machine().host_memory_bytes
    free_bytes = min(psutil.virtual_memory().available, total_bytes)
    text = f"{format_bytes(free_bytes)} of {format_bytes(total_bytes)} are free"
    if total_bytes < MEMORY_BYTES:
        remedy = f"give the computer, container or hub {format_bytes(MEMORY_BYTES)} or more"
        yield Finding("problem", "memory", f"{text}: the system may end lessons", remedy)
    elif free_bytes < AMPLE_BYTES:
        remedy = "run one lesson at a time, and end other programs and kernels"
        yield Finding("note", "memory", text, remedy)
    else:
        yield Finding("ok", "memory", text)


def check_small_model() -> Iterator[Finding]:
    """Check that the pretrained model is on this machine. Nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache

    from gpumem.models import pretrained

    found = pretrained.converted_folder().is_dir() or importlib.util.find_spec(pretrained.PACKAGE)
    file = try_to_load_from_cache(pretrained.REPOSITORY, pretrained.WEIGHTS)
    if found or isinstance(file, str):
        yield Finding("ok", "small model", "on this machine")
        return
    text = "not here yet: lessons fetch it from the hub (270 MB) when they need it"
    remedy = f"for use without a network: `{pretrained.INSTALL}`"
    yield Finding("note", "small model", text, remedy)


def check_compiler() -> Iterator[Finding]:
    """Check what ``torch.compile`` needs; without it lessons show less."""
    problem = missing_compiler()
    if problem is None:
        yield Finding("ok", "compiler", "has what it needs")
    else:
        text, _, remedy = problem.partition(": ")
        yield Finding(
            "note", "compiler", f"{text.rstrip('.')}; without it two lessons show less", remedy
        )


def missing_compiler() -> str | None:
    """Return what ``torch.compile`` misses on this machine and its remedy; None if nothing.

    On a GPU it writes Triton kernels, and a C compiler builds what starts them; on a CPU it writes
    C++. Both need Python's header files.
    """
    from gpumem.hardware import this_machine

    if this_machine.device().type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():  # not installed, or the GPU is too old (torch/utils/_triton.py)
            return (
                "torch.compile needs Triton here: `pip install triton`, and a GPU of compute "
                "capability 7.0 or higher."
            )
        # What triton/runtime/build.py looks for.
        if not any(map(shutil.which, [os.environ.get("CC", "gcc"), "gcc", "clang"])):
            return _NO_COMPILER.format("a C compiler", "gcc", "CC")
    # What torch/_inductor/config.py calls; asking it would load all of PyTorch's compiler.
    elif not shutil.which(os.environ.get("CXX", _CPP_COMPILER)):
        return _NO_COMPILER.format("a C++ compiler", "g++", "CXX")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return (
            "torch.compile needs Python's header files here: on Debian and Ubuntu "
            f"`apt-get install python{sys.version_info.major}.{sys.version_info.minor}-dev`."
        )
    return None


# --- the GPU -------------------------------------------------------------------------------------


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None if ``nvidia-smi`` does not find a GPU."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.check_output(command, text=True, timeout=20).split()[0]
    except (OSError, subprocess.SubprocessError):
        return None


def check_gpu() -> Iterator[Finding]:
    """Check that PyTorch can use the GPU that the driver finds, and that it is free."""
    import torch

    from gpumem.hardware import this_machine

    here = this_machine.machine()
    if here.phantom:
        yield Finding("ok", "gpu", here.note)
    elif here.can_measure:
        yield from _check_real_gpu(here.name)
    elif torch.cuda.is_available():  # it answers, and then fails
        remedy = "restart the computer; see whether `nvidia-smi` shows errors or another program"
        yield Finding("problem", "gpu", here.note, remedy)
    elif (version := driver_version()) is None:
        text = f"none to measure ({here.name}): lessons simulate the one that you name"
        yield Finding("ok", "gpu", text)
    else:
        cuda = torch.version.cuda
        remedy = f"update the driver, or install a PyTorch for a CUDA before {cuda}"
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            remedy = "unset CUDA_VISIBLE_DEVICES, which may hide every GPU"
        elif cuda is None:
            remedy = f"install a CUDA build of PyTorch: {_TORCH}"
        text = f"there is an NVIDIA driver ({version}), but this PyTorch cannot use it"
        yield Finding("problem", "gpu", text, remedy)


def _check_real_gpu(name: str) -> Iterator[Finding]:
    import torch

    try:
        torch.ones(1, device="cuda").add(1).item()
        yield Finding("ok", "gpu", f"{name}: lessons measure it")
    except RuntimeError as error:  # "no kernel image is available" where the GPU is too old
        reason = str(error).partition("\n")[0]
        remedy = f"install another build of PyTorch ({_TORCH}), or set CUDA_VISIBLE_DEVICES="
        yield Finding("problem", "gpu", f"{name} cannot compute: {reason}", remedy)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    if free_bytes < (1 - NEARLY_FULL) * total_bytes:
        text = f"only {format_bytes(free_bytes)} of {format_bytes(total_bytes)} are free"
        remedy = "end other kernels and programs that use it (`nvidia-smi` lists them)"
        yield Finding("note", "gpu", text, remedy)
