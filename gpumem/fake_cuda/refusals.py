"""The user's own code: which line of it runs, and what is said where it cannot be simulated."""

import linecache
import os
import site
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import NoReturn

import torch

from gpumem.files import PACKAGES
from gpumem.inputs import InputError

_FOLDERS = (
    *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    site.getusersitepackages(),
    str(Path(torch.__file__).parents[1]),
    # An environment may lie on top of another.
    *(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")),
    *map(str, PACKAGES),
)
#: How the names of files begin that are not the user's own code.
LIBRARIES = ("<frozen ", *(folder + os.sep for folder in _FOLDERS))

NAMES_CUDA = (
    "names CUDA itself, and a simulation has fake tensors on the CPU. Use the device that the "
    'experiment is given (`device != torch.device("cpu")` says whether it is a GPU), read memory '
    "from the run that simulate returns, or run the script as it is with `labkit phantom`."
)


def is_users(code: CodeType) -> bool:
    """Return whether ``code`` is not Python's, labkit's or an installed library's."""
    return not code.co_filename.startswith(LIBRARIES)


def refuse(sentence: str) -> NoReturn:
    """Raise an `InputError` that begins with the line of the user's code that runs now."""
    raise InputError(f"{_running_line(sys._getframe(1))} {sentence}")


def refuse_cuda() -> NoReturn:
    """Refuse the line that runs now because it names CUDA itself."""
    refuse(NAMES_CUDA)


def _running_line(frame: FrameType | None) -> str:
    while frame is not None and not is_users(frame.f_code):
        frame = frame.f_back
    return "the experiment" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def _line(file: str, number: int) -> str:
    text = linecache.getline(file, number).strip()
    return f"{file}, line {number}{f', `{text}`,' if text else ''}"


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user's code in the error's traceback."""
    place, traceback = "the experiment", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_users(code):
            place = _line(code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return place
