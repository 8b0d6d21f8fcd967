"""DeepSpeed's operators for disks: whether they can be had here, and built once.

    missing()       # None, or what to install, as a sentence
    build()         # compiles them if they have not been
    operators()     # DeepSpeed's module async_io, in this process

Offloading to a disk needs two C++ operators of DeepSpeed's, ``async_io`` and ``pin_memory``. It
compiles them on first use, each of their files with all of PyTorch's headers. Here each operator is
compiled as one file, in a fifth of the time, and only once:

    python -m labkit.deepspeed_build     # builds them now; afterwards they are loaded in a second

Limits: written for DeepSpeed 0.19; of another version whose files cannot be put together the files
are compiled one by one. Whether a compiler is there is asked, not whether it works.
"""

import contextlib
import ctypes
import importlib.util
import mmap
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from labkit import hardware
from labkit.memory import MIB, format_bytes
from labkit.small_model import cache_folder

LOCKED_BYTES = 128 * MIB  # more than the course's own runs lock; large models need more
# Constants that several files of one operator define, each for itself.
_REPEATED = ("c_library_name", "c_block_size", "c_io_queue_depth")


def missing(*, nvme: bool = True) -> str | None:
    """What DeepSpeed lacks on this machine, and its remedy, as a sentence; None if nothing.

    Args:
        nvme: whether it is to offload to a disk, which takes more.
    """
    if not importlib.util.find_spec("deepspeed"):
        also = " and for a disk, on Debian and Ubuntu, `apt-get install g++ libaio-dev`"
        return (
            "DeepSpeed is not installed: `pip install --no-build-isolation deepspeed ninja`"
            f"{also if nvme else ''}."
        )
    if not nvme:
        return None
    if sys.platform != "linux":
        return "DeepSpeed offloads to a disk on Linux only."
    if not shutil.which("ninja", path=_path()):
        return "DeepSpeed builds its operators with ninja: `pip install ninja`."
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        return (
            f"DeepSpeed's operators need a C++ compiler, and there is no {compiler}: on Debian and "
            "Ubuntu `apt-get install g++`."
        )
    for header, package in (("libaio.h", "libaio-dev"), ("Python.h", "python3-dev")):
        if not _has_header(compiler, header):
            return (
                f"DeepSpeed's operator for disks needs {header}: on Debian and Ubuntu "
                f"`apt-get install {package}`."
            )
    if not can_lock(LOCKED_BYTES):
        return (
            "DeepSpeed locks its buffers for a disk in memory, and this user may lock less than "
            f"{format_bytes(LOCKED_BYTES)}: raise the limit with `ulimit -l unlimited`, or for a "
            "container with `docker run --ulimit memlock=-1`."
        )
    if hardware.device().type == "cuda":
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is None:
            return (
                "DeepSpeed's operators for a GPU need the CUDA toolkit (nvcc): install it, or name "
                "its folder in the environment variable CUDA_HOME."
            )
    return None


def can_lock(nbytes: int) -> bool:
    """Whether this process may lock so many bytes more in memory. It tries."""
    with contextlib.closing(mmap.mmap(-1, nbytes)) as memory:
        start = ctypes.c_char.from_buffer(memory)
        libc, address = ctypes.CDLL(None), ctypes.c_void_p(ctypes.addressof(start))
        locked = libc.mlock(address, ctypes.c_size_t(nbytes)) == 0
        if locked:
            libc.munlock(address, ctypes.c_size_t(nbytes))
        del start  # a mapping in use cannot be closed
    return locked


def _has_header(compiler: str, header: str) -> bool:
    command = [compiler, "-E", "-x", "c++", "-", "-I", sysconfig.get_path("include")]
    command += os.environ.get("CFLAGS", "").split()
    text = f"#include <{header}>\n"
    return not subprocess.run(command, input=text, capture_output=True, text=True).returncode


def _path() -> str:
    """Where programs are looked for: first beside this Python, where pip puts ninja. (Another
    version of ninja does not know what this one has built, and builds it again.)"""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def build() -> float:
    """Compile the operators if they have not been, in a process of their own.

    Returns:
        The seconds that it took; next to none where they were there.

    Raises:
        RuntimeError: something is missing, or the compiler failed; the text ends with its words.
    """
    started = time.perf_counter()
    if all((build_folder() / name / f"{name}.so").exists() for name in ("pin_memory", "async_io")):
        return time.perf_counter() - started
    command = [sys.executable, "-m", "labkit.deepspeed_build"]
    here = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": here}
    )
    if done.returncode:
        raise RuntimeError(f"DeepSpeed's operators could not be built: {done.stderr[-2000:]}")
    return time.perf_counter() - started


def operators() -> Any:
    """DeepSpeed's module ``async_io``, compiled if it has not been. Others wait meanwhile.

    Raises:
        RuntimeError: the compiler failed.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

    folder = build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"TORCH_EXTENSIONS_DIR": str(folder), "PATH": _path()}
    with mock.patch.dict(os.environ, settings), _alone(folder):
        for builder in (PinMemoryBuilder, AsyncIOBuilder):
            # PyTorch waits for ever for a lock that a killed build has left. Nobody but us builds
            # here, one at a time.
            (folder / builder.NAME / "lock").unlink(missing_ok=True)
            module = _load(builder, folder / f"{builder.NAME}_source")
    return module


def build_folder() -> Path:
    """Where the operators are kept: other versions, and other processors, build their own."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    parts = ["deepspeed", version("deepspeed"), "torch", torch.__version__, python]
    # They are compiled for the very processor that is here.
    name = "-".join([*parts, platform.machine(), *_processor()])
    return cache_folder() / "operators" / re.sub(r"[^\w.+-]+", "_", name)


def _processor() -> list[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return [line.partition(":")[2].strip()]
    return []


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    import fcntl

    with open(folder / "building", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel lets go of it when its holder dies
        yield


def _load(builder: type, folder: Path) -> Any:
    """One operator: from one file, else (another version's sources may not bear it) as it is."""
    plain = builder.sources, builder.include_paths
    try:
        together = _one_file(builder(), folder)
        builder.sources = lambda self: [str(together)]
        builder.include_paths = lambda self: [
            str(path) for path in (folder / "aio/py_lib", folder / "aio/common",
                                   folder / "pin_memory")
        ] + [path for path in plain[1](self) if os.path.isabs(path)]  # fmt: skip
        return builder().load(verbose=False)
    except (OSError, RuntimeError):
        builder.sources, builder.include_paths = plain
        return builder().load(verbose=False)
    finally:
        builder.sources, builder.include_paths = plain


def _one_file(builder: Any, folder: Path) -> Path:
    """Write DeepSpeed's sources of one operator, all in one, unless it stands there already."""
    together = folder / f"{builder.NAME}.cpp"
    if together.exists():  # a new one would be newer than what was built from it
        return together
    origin = Path(builder.deepspeed_src_path("csrc"))
    for part in ("aio", "pin_memory"):
        shutil.copytree(origin / part, folder / part, dirs_exist_ok=True)
    for header in folder.rglob("*.h"):
        text = header.read_text(encoding="utf-8")
        if not text.startswith("#pragma once"):
            header.write_text(f"#pragma once\n{text}", encoding="utf-8")
    lines = []
    for number, source in enumerate(builder.sources()):
        lines += [f"#define {name} {name}_{number}" for name in _REPEATED]
        lines += [f'#include "{folder / Path(source).relative_to("csrc")}"']
        lines += [f"#undef {name}" for name in _REPEATED]
    together.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return together


if __name__ == "__main__":
    if lack := missing():
        sys.exit(lack)
    operators()
    print(f"DeepSpeed's operators are in {build_folder()}")
