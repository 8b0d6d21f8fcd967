"""`labkit doctor` on the computer: disks, memory, the small model, compilers."""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from gpumem.files import cache_folder
from gpumem.inputs import GIB, format_bytes
from gpumem.models import pretrained
from labkit.doctor.packages import Finding

DISK_BYTES = 2 * GIB  # the small model's file, its converted copy, and the executed notebooks
MEMORY_BYTES = 2 * GIB  # each lesson fits, as on Binder; some then leave a part out
AMPLE_BYTES = 4 * GIB  # the largest lesson takes 3.2 GiB where it sees more than this


def check_disk() -> list[Finding]:
    """Check that lessons can write, and have room: in the cache, here, in temporary files."""
    folders = {
        "results": (Path.cwd(), "work in"),
        "temporary files": (Path(tempfile.gettempdir()), "set TMPDIR to"),
    }
    if not pretrained.converted_folder().is_dir():  # a class may share one, read only
        folders["cache"] = (cache_folder(), "set LABKIT_CACHE to")
    findings = []
    for use, (folder, choose) in folders.items():
        folder = folder.absolute()
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        free_bytes = shutil.disk_usage(existing).free
        text, remedy = f"{format_bytes(free_bytes)} free at {existing}", ""
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            text, remedy = f"{existing} cannot be written", f"{choose} a folder that can be"
        elif free_bytes < DISK_BYTES:
            remedy = f"free some space: the course needs up to {format_bytes(DISK_BYTES)}"
        findings.append(Finding("problem" if remedy else "ok", f"disk ({use})", text, remedy))
    return findings


def check_memory() -> list[Finding]:
    """Check that a lesson finds enough memory: the computer's, or the container's."""
    import psutil

    from gpumem.hardware.this_machine import machine

    total_bytes = machine().host_memory_bytes
    free_bytes = min(psutil.virtual_memory().available, total_bytes)
    text = f"{format_bytes(free_bytes)} of {format_bytes(total_bytes)} are free"
    if total_bytes < MEMORY_BYTES:
        remedy = f"give the computer, container or hub {format_bytes(MEMORY_BYTES)} or more"
        return [Finding("problem", "memory", f"{text}: the system may end lessons", remedy)]
    if free_bytes < AMPLE_BYTES:
        remedy = "run one lesson at a time, and end other programs and kernels"
        return [Finding("note", "memory", text, remedy)]
    return [Finding("ok", "memory", text)]


def check_small_model() -> list[Finding]:
    """Check that the pretrained model is on this machine. Nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache

    found = pretrained.converted_folder().is_dir() or importlib.util.find_spec(pretrained.PACKAGE)
    file = try_to_load_from_cache(pretrained.REPOSITORY, pretrained.WEIGHTS)
    if found or isinstance(file, str):
        return [Finding("ok", "small model", "on this machine")]
    text = "not here yet: lessons fetch it from the hub (270 MB) when they need it"
    remedy = f"for use without a network: `{pretrained.INSTALL}`"
    return [Finding("note", "small model", text, remedy)]


def check_compiler() -> list[Finding]:
    """Check what ``torch.compile`` needs; the course does without, but shows less."""
    from labkit.doctor.compilers import missing_compiler

    return [_optional("compiler", missing_compiler(), "without it two lessons show less")]


def check_deepspeed() -> list[Finding]:
    """Check whether DeepSpeed can offload here, which parts of two lessons show."""
    from labkit.deepspeed.operators import missing

    return [_optional("deepspeed", missing(), "parts of lessons 17 and 18 are left out")]


def _optional(subject: str, problem: str | None, consequence: str) -> Finding:
    """Return what follows from ``problem``, which is a sentence with its remedy behind a colon."""
    if problem is None:
        return Finding("ok", subject, "has what it needs")
    text, _, remedy = problem.partition(": ")
    return Finding("note", subject, f"{text.rstrip('.')}; {consequence}", remedy)
