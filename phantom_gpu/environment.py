"""Start processes on a phantom GPU.

`environment` gives the variables of a process whose CUDA calls are answered by the stub libraries.
Python calls `begin` there as soon as torch is imported; ``startup/sitecustomize.py`` sees to that.
"""

import ctypes
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from gpumem.hardware import PHANTOM_VARIABLE, catalogue
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError
from gpumem.units import KIB
from phantom_gpu.build_stubs import find_wheel, stub_libraries

#: Holds what a process is to watch itself for, as JSON of `phantom_gpu.watch_script.Orders`.
WATCH_VARIABLE = "LABKIT_PHANTOM_WATCH"
#: What a context takes, and the file in which a program's processes count what they hold.
SHARED_VARIABLE = "LABKIT_PHANTOM_SHARED"
MOST_GPUS = 16
STARTUP = Path(__file__).parent / "startup"
#: Shared memory that a block may have, by compute capability: NVIDIA's CUDA C++ Programming Guide,
#: "Technical Specifications per Compute Capability".
SHARED_KIB = {
    (7, 0): 96,
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (12, 0): 99,
}


def environment(gpu: Gpu, count: int = 1) -> dict[str, str]:
    """Return this process's environment, extended for one that finds ``count`` GPUs like ``gpu``.

    Args:
        gpu: of the catalogue, made by NVIDIA.
        count: how many, 1 to 16.

    Raises:
        InputError: the GPU is not NVIDIA's, the count is out of range, this interpreter's torch is
            no CUDA build, or the libraries cannot be built.
    """
    if gpu.compute_capability is None:
        raise InputError(f"{gpu.name} has no CUDA; a phantom GPU is one of NVIDIA's")
    if not 1 <= count <= MOST_GPUS:
        raise InputError(f"a phantom machine has 1 to {MOST_GPUS} GPUs, not {count}")
    libraries = stub_libraries(find_wheel())
    fields = (  # read in this order by native/cuda.cpp
        gpu.name,
        *gpu.compute_capability,
        gpu.multiprocessors,
        SHARED_KIB[gpu.compute_capability] * KIB,
        gpu.usable_bytes,
        gpu.context_bytes,
        count,
    )
    preload = [*map(str, libraries), *os.environ.get("LD_PRELOAD", "").split(":")]
    paths = [str(STARTUP), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return dict(os.environ) | {
        PHANTOM_VARIABLE: ";".join(map(str, fields)),
        "LD_PRELOAD": ":".join(filter(None, preload)),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TRITON_LIBCUDA_PATH": str(libraries[0].parent),
    }


def environment_of(named: str) -> dict[str, str]:
    """Return `environment` of the GPU ``named``: ``"a100-80gb"``, or ``"h100x4"`` for four."""
    several = re.fullmatch(r"(.+)x(\d{1,3})", named)
    name, count = (several[1], int(several[2])) if several else (named, 1)
    return environment(catalogue.gpu(name), count)


def restart_on(named: str) -> None:
    """Replace this process by the same command on the GPU ``named``, unless it runs on one."""
    if PHANTOM_VARIABLE not in os.environ:
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, environment_of(named))


def begin(torch: Any) -> None:
    """Make this process's torch ready for the phantom GPU."""
    from phantom_gpu.known_values import KnownValues

    # cuDNN's attention keeps what only cuDNN knows the size of; other kernels take its place, also
    # where `sdpa_kernel` allows it among others.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch._C._set_sdp_use_cudnn = lambda enabled: None
    if cudnn := torch.backends.cudnn._cudnn:  # None in a CPU build, which a program may start
        cudnn.getRuntimeVersion = cudnn.getCompileVersion
    known = KnownValues()
    known.__enter__()
    runtime = ctypes.CDLL(None)
    if hasattr(runtime, "phantom_followed_by"):  # a program may start others without the libraries
        runtime.phantom_followed_by(ctypes.py_object(known))
    known.print_what_is_known()
    if orders := os.environ.get(WATCH_VARIABLE):
        from phantom_gpu.watch_script import Orders, Watch

        watch = Watch(Orders(**json.loads(orders)))
        known.on_unknown, known.note_fault = watch.read_unknown, watch.note_fault
        known.on_operator = watch.on_operator
        watch.begin()
