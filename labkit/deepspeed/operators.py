"""Compile DeepSpeed's operators for disks, once and fast.

Offloading to a disk takes two C++ operators, ``async_io`` and ``pin_memory``. DeepSpeed compiles
them on first use, each of their files with all of PyTorch's headers. Here each operator is compiled
as one file, which takes a fifth of the time:

    python -m labkit.deepspeed.operators     # builds them now; later they load in a second

Limits: written for DeepSpeed 0.19; if another version's files do not go into one, they are compiled
one by one.
"""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gpumem.files import SOURCE, cache_folder
from gpumem.hardware import this_machine

# First beside this Python, where pip puts ninja: another version would build everything again.
_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
# Constants that several files of one operator define.
_REPEATED = ("c_library_name", "c_block_size", "c_io_queue_depth")


def missing(*, nvme: bool = True) -> str | None:
    """Return what DeepSpeed misses on this machine, and its remedy; None if nothing.

    Offloading to a disk (``nvme``) takes more than offloading to the CPU.
    """
    if not importlib.util.find_spec("deepspeed"):
        return "DeepSpeed is not installed: `pip install --no-build-isolation deepspeed ninja`."
    if not nvme:
        return None
    if sys.platform != "linux":
        return "DeepSpeed offloads to a disk on Linux only."
    if not shutil.which("ninja", path=_PATH):
        return "DeepSpeed builds its operators with ninja: `pip install ninja`."
    compiler, *flags = os.environ.get("CXX", "c++"), *os.environ.get("CFLAGS", "").split()
    include = [compiler, *flags, "-E", "-x", "c++", "-include", "libaio.h", os.devnull]
    if not shutil.which(compiler) or subprocess.run(include, capture_output=True).returncode:
        return "DeepSpeed needs a C++ compiler and libaio.h: `apt-get install g++ libaio-dev`."
    if this_machine.device().type == "cuda":
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is None:
            return "DeepSpeed needs the CUDA toolkit (nvcc), or its folder as CUDA_HOME."
    return None


def build() -> None:
    """Compile the operators in a separate process, unless it was done.

    A `RuntimeError` ends with what the compiler said, or names what is missing.
    """
    if not all((build_folder() / f"{op}/{op}.so").exists() for op in ("pin_memory", "async_io")):
        command = [sys.executable, "-m", __spec__.name]
        done = subprocess.run(command, capture_output=True, text=True, cwd=SOURCE)
        if done.returncode:
            raise RuntimeError(f"DeepSpeed's operators could not be built: {done.stderr[-2000:]}")


def operators() -> Any:
    """Return DeepSpeed's module ``async_io``, compiled if that has not been done."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
    from filelock import FileLock
    from torch.utils.cpp_extension import _import_module_from_library

    folder = build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"TORCH_EXTENSIONS_DIR": str(folder), "PATH": _PATH}
    with FileLock(folder / "building"), mock.patch.dict(os.environ, settings):
        for builder in (PinMemoryBuilder, AsyncIOBuilder):
            library = folder / f"{builder.NAME}/{builder.NAME}.so"
            if not library.exists():
                # PyTorch waits forever for the lock of a build that was killed; ours is enough.
                (library.parent / "lock").unlink(missing_ok=True)
                _build(builder, folder / f"{builder.NAME}_source")
            elif builder.NAME not in builder._loaded_ops:
                # DeepSpeed finds other flags in some processes, and would build it again.
                module = _import_module_from_library(builder.NAME, library.parent, True)
                builder._loaded_ops[builder.NAME] = module
            module = builder().load(verbose=False)
    return module


def build_folder() -> Path:
    """Return where the operators are stored: other versions and processors have other folders."""
    # They are compiled for this very processor.
    processor = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[:1]
    versions = ["deepspeed", version("deepspeed"), "torch", torch.__version__]
    name = "-".join([*versions, sys.implementation.cache_tag, platform.machine(), *processor])
    return cache_folder() / "operators" / re.sub(r"[^\w.+-]+", "_", name)


def _build(builder: type, folder: Path) -> None:
    def include_paths(self: Any) -> list[str]:
        ours = ("aio/py_lib", "aio/common", "pin_memory")
        return [str(folder / part) for part in ours] + plain_paths(self)

    plain_paths = builder.include_paths
    try:
        source = str(_one_file(builder(), folder))
        with mock.patch.multiple(
            builder, sources=lambda self: [source], include_paths=include_paths
        ):
            builder().load(verbose=False)
    except (OSError, RuntimeError):  # another version's sources may not go into one file
        builder().load(verbose=False)


def _one_file(builder: Any, folder: Path) -> Path:
    """Write a file that includes all of an operator's sources, unless it exists already."""
    one_file = folder / f"{builder.NAME}.cpp"
    if one_file.exists():  # a new one would be newer than what was built from it
        return one_file
    for part in ("aio", "pin_memory"):
        origin = builder.deepspeed_src_path(f"csrc/{part}")
        shutil.copytree(origin, folder / part, dirs_exist_ok=True)
    for header in folder.rglob("*.h"):
        header.write_text(f"#pragma once\n{header.read_text(encoding='utf-8')}", encoding="utf-8")
    lines = []
    for number, source in enumerate(builder.sources()):
        lines += [f"#define {name} {name}_{number}" for name in _REPEATED]
        lines.append(f'#include "{folder / Path(source).relative_to("csrc")}"')
        lines += [f"#undef {name}" for name in _REPEATED]
    one_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return one_file


if __name__ == "__main__":
    if problem := missing():
        sys.exit(problem)
    operators()
    print(f"DeepSpeed's operators are in {build_folder()}")
