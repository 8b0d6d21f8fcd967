"""What ``torch.compile`` needs besides PyTorch, and whether it is here.

On a GPU it writes Triton kernels and has a C compiler build what starts them; on a CPU it writes
C++. Both need Python's own header files. Limits: whether a compiler is there is asked, not whether
it works.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from labkit import hardware


def missing_compiler() -> str | None:
    """What ``torch.compile`` lacks on this machine, and its remedy, as a sentence; else None."""
    if hardware.device().type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():  # not installed, or the GPU is too old (torch/utils/_triton.py)
            return (
                "torch.compile needs Triton here: `pip install triton`, and a GPU of compute "
                "capability 7.0 or higher."
            )
        # Triton builds what starts its kernels (triton/runtime/build.py).
        if not any(map(shutil.which, filter(None, [os.environ.get("CC"), "gcc", "clang"]))):
            return (
                "torch.compile needs a C compiler here: install gcc (on Debian and Ubuntu "
                "`apt-get install gcc`), or name one in the environment variable CC."
            )
        return _missing_headers()
    if cpp_compiler() is None:
        return (
            "torch.compile needs a C++ compiler here: install g++ (on Debian and Ubuntu "
            "`apt-get install g++`), or name one in the environment variable CXX."
        )
    return _missing_headers()


def cpp_compiler() -> str | None:
    """The C++ compiler that PyTorch would call (torch/_inductor/config.py), if it can be started.

    To ask PyTorch itself would load all that compiles, which takes a second.
    """
    usual = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    command = os.environ.get("CXX", usual)
    try:
        done = subprocess.run([command, "--version"], capture_output=True)
    except OSError:  # not there, or no program
        return None
    # Microsoft's does not know that question.
    return command if sys.platform == "win32" or not done.returncode else None


def _missing_headers() -> str | None:
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        version = ".".join(platform.python_version_tuple()[:2])
        return (
            "torch.compile needs Python's header files here: install them (on Debian and Ubuntu "
            f"`apt-get install python{version}-dev`)."
        )
    return None
