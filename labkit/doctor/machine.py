"""`labkit doctor` on the computer: folders, disks, memory, cores, loopback, compilers.

Limits: that a folder can be written is tried with one byte in a file that has no name. How much
memory others will want later is not known.
"""

import glob
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from labkit.doctor.findings import Finding, own_pip, pip, quoted
from labkit.doctor.packages import PACKAGE
from labkit.memory import GIB, MIB, format_bytes
from labkit.small_model import (
    GGUF_NAME,
    INSTALL,
    REPOSITORY,
    WEIGHTS,
    cache_folder,
    converted_folder,
    is_intact,
)
from labkit.small_model import PACKAGE as MODEL_PACKAGE

DISK_BYTES = 2 * GIB  # the small model's file, its converted copy, and the executed notebooks
MEMORY_BYTES = 2 * GIB  # each lesson fits, as on Binder; some then leave a part out
AMPLE_BYTES = 4 * GIB  # the largest lesson takes 3.2 GiB where it sees more than this
_CGROUP = Path("/sys/fs/cgroup")
SHARED_BYTES = 128 * MIB  # Docker gives 64 MiB unless told otherwise
STALE_SECONDS = 15 * 60  # longer than compiling an operator takes
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_YES = ("1", "ON", "YES", "TRUE")  # as huggingface_hub reads them (huggingface_hub/constants.py)


def nearest(folder: Path) -> Path:
    """``folder`` itself, or the nearest parent that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if _exists(place))


def _exists(place: Path) -> bool:
    try:
        return place.exists()
    except PermissionError:  # below a folder that we may not enter: `unwritable` then says so
        return True


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written in ``folder``; None if something can."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"\0")  # on a full disk a file can still be made
    except OSError as error:
        return error.strerror or str(error)
    return None


def check_cache() -> list[Finding]:
    """Whether the cache folder can be written, or need not be. It is not made."""
    folder = cache_folder()
    reason = unwritable(nearest(folder))
    if reason is None:
        return [Finding("ok", "cache", f"`{folder}`")]
    if _holds_the_model():
        return [Finding("ok", "cache", f"`{folder}`: read only ({reason}), the model is in it")]
    remedy = "set LABKIT_CACHE to a folder that you may write to"
    return [Finding("problem", "cache", f"`{folder}` cannot be written: {reason}", remedy)]


def _holds_the_model() -> bool:
    folder = converted_folder()
    return os.access(folder, os.R_OK | os.X_OK) and is_intact(folder)


def check_small_model() -> list[Finding]:
    """Whether the pretrained model can be had when a lesson asks for it."""
    # Unlike Path.glob, this finds nothing in a folder that may not be read, and does not raise.
    if glob.glob(f"SmolLM2-135M-*/{WEIGHTS}", root_dir=cache_folder()):
        return [Finding("ok", "small model", "converted, in the cache")]
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    if any(Path(folder, GGUF_NAME).is_file() for folder in folders):
        return [Finding("ok", "small model", "in its package; lessons convert it once")]
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(REPOSITORY, WEIGHTS), str):
        return [Finding("ok", "small model", "in the hub's cache")]
    install = pip(INSTALL.removeprefix("pip "))
    offline = [name for name in _OFFLINE if os.environ.get(name, "").upper() in _YES]
    if offline:
        text = f"it is not on this machine, and {offline[0]} forbids to fetch it: lessons stop"
        return [Finding("problem", "small model", text, f"{install}, or unset {offline[0]}")]
    text = "not here yet: lessons fetch it from the hub (270 MB) when they need it"
    return [Finding("note", "small model", text, f"for use without a network: {install}")]


def check_folders() -> list[Finding]:
    """Whether lessons and their outputs can be written, and temporary files."""
    findings = []
    notebooks = PACKAGE.parent / "notebooks"
    if notebooks.is_dir() and (reason := unwritable(notebooks)):
        text = f"`{notebooks}` cannot be written ({reason}): lessons write files beside themselves"
        remedy = "copy the course to a folder of your own, and open it there"
        findings.append(Finding("problem", "notebooks", text, remedy))
    if reason := unwritable(Path.cwd()):
        text = f"`{Path.cwd()}` cannot be written ({reason}), where `labkit run` puts its results"
        remedy = "work in a folder of your own, or add `--out` and such a folder"
        findings.append(Finding("note", "here", text, remedy))
    chosen = os.environ.get("TMPDIR") or ""
    try:
        used = tempfile.gettempdir()
    except FileNotFoundError:
        text = "there is no folder for temporary files that can be written"
        remedy = "set TMPDIR to a folder that you may write to, or free some space"
        return [*findings, Finding("problem", "temporary files", text, remedy)]
    if chosen and os.path.abspath(chosen) != used:
        text = f"TMPDIR={chosen!r} cannot be written, and `{used}` is used instead"
        remedy = "unset TMPDIR, or set it to a folder that you may write to"
        findings.append(Finding("note", "temporary files", text, remedy))
    return findings


def check_disk() -> list[Finding]:
    """Free space where models, executed notebooks and temporary files go."""
    findings, seen = [], set()
    places = {"cache": cache_folder(), "here": Path.cwd(), "temporary": _temporary_folder()}
    for what, folder in places.items():
        place = nearest(folder)
        if what == "cache" and unwritable(place) and _holds_the_model():
            continue  # nothing goes there
        try:
            disk = os.stat(place).st_dev
        except PermissionError:  # another check says so
            continue
        if disk in seen:
            continue
        seen.add(disk)
        free_bytes = shutil.disk_usage(place).free
        text = f"{format_bytes(free_bytes)} free at `{place}`"
        if free_bytes >= DISK_BYTES:
            findings.append(Finding("ok", f"disk ({what})", text))
            continue
        remedy = f"free some space: the course needs up to {format_bytes(DISK_BYTES)}"
        findings.append(Finding("problem", f"disk ({what})", text, remedy))
    return findings


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # none can be written: the usual one may be full
        return Path("/tmp")


def check_memory() -> list[Finding]:
    """Whether a lesson finds memory enough: the computer's, or the container's."""
    import psutil

    from labkit.hardware import machine

    host = psutil.virtual_memory()
    total_bytes = machine().host_memory_bytes or host.total
    free_bytes = min(host.available, total_bytes, _container_free_bytes() or total_bytes)
    if total_bytes < MEMORY_BYTES:
        text = f"{format_bytes(total_bytes)} in all: the system may end lessons"
        remedy = f"give the computer, container or hub {format_bytes(MEMORY_BYTES)} or more"
        return [Finding("problem", "memory", text, remedy)]
    text = f"{format_bytes(free_bytes)} of {format_bytes(total_bytes)} are free"
    if free_bytes < AMPLE_BYTES:
        remedy = (
            "run one lesson at a time, and end other programs and kernels: "
            f"one lesson fits in {format_bytes(MEMORY_BYTES)}"
        )
        return [Finding("note", "memory", text, remedy)]
    return [Finding("ok", "memory", text)]


def _container_free_bytes() -> int | None:
    """What a container (Linux, cgroups of version 2) has left; None without a limit."""
    try:
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        of_kind = {kind: int(amount) for kind, amount in map(str.split, lines)}
    except (OSError, ValueError):  # none, or of version 1; no limit is the word "max"
        return None
    # Pages of files give way to whoever needs the memory.
    return max(1, limit - used + of_kind["active_file"] + of_kind["inactive_file"])


def check_cores() -> list[Finding]:
    """Lessons of several processes want a core for each of two."""
    from labkit.hardware import machine

    cores = machine().cores
    if cores >= 2:
        return [Finding("ok", "cores", str(cores))]
    text = "one core: lessons take longer, above all 18 and 19, which run two processes"
    return [Finding("note", "cores", text, "give the container, hub or task set two cores")]


def check_shared_memory() -> list[Finding]:
    """Room in ``/dev/shm``, through which worker processes hand tensors over on Linux."""
    if sys.platform != "linux":
        return []
    place = Path("/dev/shm")
    free_bytes = shutil.disk_usage(place).free if place.is_dir() else 0
    if free_bytes >= SHARED_BYTES:
        return [Finding("ok", "shared memory", f"{format_bytes(free_bytes)} free")]
    text = f"{format_bytes(free_bytes)} free in `{place}`: workers that load data may end ("
    remedy = "start the container with `--shm-size=1g`, or remove what fills it"
    return [Finding("note", "shared memory", f"{text}bus error)", remedy)]


def check_loopback() -> list[Finding]:
    """Whether processes of this machine reach each other, as a notebook and its kernel do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        text = f"127.0.0.1 cannot be used ({error.strerror or error}): no kernel can be reached"
        remedy = "let the firewall pass it, or switch it on (Linux, as root): `ip link set lo up`"
        return [Finding("problem", "loopback", text, remedy)]
    return [Finding("ok", "loopback", "processes reach each other")]


def check_compiler() -> list[Finding]:
    """Whether ``torch.compile`` can work; the course does without, but shows less."""
    from labkit.compilers import missing_compiler

    named = os.environ.get("CXX")
    lacking = own_pip(missing_compiler() or "")
    if not lacking and (words := _compilers_complaint()):
        text = f"the C++ compiler cannot compile one line ({words}): two lessons show less"
        remedy = "unset CXX" if named else "install it again, with its standard library"
        return [Finding("note", "compiler", text, remedy)]
    if not lacking:
        return [Finding("ok", "compiler", "torch.compile has what it needs")]
    what, _, remedy = lacking.partition(": ")
    if named and shutil.which(named) is None and "C++" in what:
        remedy = f"unset CXX, which names {named!r}; or {remedy}"
    text = f"{what}; without it two lessons show less"
    return [Finding("note", "compiler", text, remedy.rstrip("."))]


def _compilers_complaint() -> str | None:
    """The first words of a C++ compiler that fails on a line; None if it works, or is not asked."""
    from labkit import hardware

    if sys.platform == "win32" or hardware.device().type == "cuda":
        return None
    from labkit.compilers import cpp_compiler

    command = [cpp_compiler(), "-fsyntax-only", "-x", "c++", "-"]
    done = subprocess.run(
        command, input="#include <vector>\n", capture_output=True, text=True, timeout=60
    )
    return (done.stderr.strip() or "no reason given").splitlines()[0] if done.returncode else None


def check_deepspeed() -> list[Finding]:
    """Whether DeepSpeed can offload here, which parts of two lessons show; locks left behind."""
    from torch.utils.cpp_extension import get_default_build_root

    from labkit.deepspeed_build import missing

    findings = []
    if lack := missing():
        what, _, remedy = own_pip(lack.rstrip(".")).partition(": ")
        text = f"{what}; parts of lessons 16 and 17 are left out"
        findings.append(Finding("note", "deepspeed", text, remedy or "none; the lessons say so"))
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]):
        if time.time() - lock.stat().st_mtime > STALE_SECONDS:
            text = f"compiling an operator of PyTorch was broken off, and left `{lock}`: the next "
            remedy = f"remove the file {quoted(lock)}, unless a compiler is at work"
            findings.append(Finding("note", "operators", f"{text}try waits for ever", remedy))
    return findings or [Finding("ok", "deepspeed", "has what it needs")]
