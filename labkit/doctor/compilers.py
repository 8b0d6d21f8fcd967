"""Check what ``torch.compile`` needs besides PyTorch.

On a GPU it writes Triton kernels, and a C compiler builds what starts them; on a CPU it writes C++.
Both need Python's header files. Limits: checks that a compiler is there, not that it works.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from gpumem.hardware import this_machine

_MISSING = (
    "torch.compile needs {} here: on Debian and Ubuntu `apt-get install {}`; the environment "
    "variable {} may name another."
)
_CPP_COMPILER = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")


def missing_compiler() -> str | None:
    """Return what ``torch.compile`` misses on this machine and its remedy; None if nothing."""
    if this_machine.device().type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():  # not installed, or the GPU is too old (torch/utils/_triton.py)
            return (
                "torch.compile needs Triton here: `pip install triton`, and a GPU of compute "
                "capability 7.0 or higher."
            )
        # What triton/runtime/build.py looks for.
        if not any(map(shutil.which, [os.environ.get("CC", "gcc"), "gcc", "clang"])):
            return _MISSING.format("a C compiler", "gcc", "CC")
    # What torch/_inductor/config.py calls; asking it would load all of PyTorch's compiler.
    elif not shutil.which(os.environ.get("CXX", _CPP_COMPILER)):
        return _MISSING.format("a C++ compiler", "g++", "CXX")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return (
            "torch.compile needs Python's header files here: on Debian and Ubuntu "
            f"`apt-get install python{sys.version_info.major}.{sys.version_info.minor}-dev`."
        )
    return None
