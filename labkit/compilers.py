"""What ``torch.compile`` needs besides PyTorch, and whether it is here.

On a GPU it writes Triton kernels, on a CPU C++, which the system's compiler and Python's own
header files turn into code. Limits: whether the compiler is there is asked, not whether it works.
"""

import platform
import sysconfig
from pathlib import Path

from labkit import hardware


def missing_compiler() -> str | None:
    """What ``torch.compile`` lacks on this machine, and its remedy, as a sentence; else None."""
    if hardware.device().type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "torch.compile needs Triton here: `pip install triton`."
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return (
            "torch.compile needs a C++ compiler here: install g++ (on Debian and Ubuntu "
            "`apt-get install g++`), or name one in the environment variable CXX."
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        version = ".".join(platform.python_version_tuple()[:2])
        return (
            "torch.compile needs Python's header files here: install them (on Debian and Ubuntu "
            f"`apt-get install python{version}-dev`)."
        )
    return None
