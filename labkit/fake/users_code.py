"""The user's own code: which line of it runs, and what in it a simulation cannot answer."""

import contextlib
import dis
import functools
import inspect
import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NoReturn

import torch

from labkit.support.files import PACKAGES
from labkit.values import InputError

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


def is_users(code: CodeType) -> bool:
    """Return whether ``code`` is not Python's, labkit's or an installed library's."""
    return not code.co_filename.startswith(LIBRARIES)


def refuse(sentence: str) -> NoReturn:
    """Raise an `InputError` that begins with the line of the user's code that runs now."""
    raise InputError(f"{_running_line(sys._getframe(1))} {sentence}")


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


def refuse_type_checks(experiment: Callable) -> None:
    """Refuse an experiment that compares a device's type with "cuda" or "cpu", by itself or in a
    function or class of the user's that it names.

    The simulated GPU has the type "cpu", and an attribute's value cannot be intercepted.
    """
    for code in _codes(experiment):
        instructions = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
        for at, instruction in enumerate(instructions):
            if instruction.opname not in ("COMPARE_OP", "CONTAINS_OP"):
                continue
            operands = instructions[max(0, at - 4) : at]
            values = [i.argval for i in operands if i.opname.startswith("LOAD_CONST")]
            attributes = [i.argval for i in operands if i.opname == "LOAD_ATTR"]
            if "type" in attributes and any(map(_names_device_type, values)):
                raise InputError(
                    f"{_line(code.co_filename, instruction.positions.lineno)} asks for a device's "
                    'type, which is "cpu" for the simulated GPU too. Write '
                    '`device != torch.device("cpu")`, which is true of a GPU in both.'
                )


def _names_device_type(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return any(map(_names_device_type, value))
    return value in ("cuda", "cpu")


def _codes(experiment: Callable) -> Iterator[CodeType]:
    """Yield the code of ``experiment`` and of all that it names, as far as it is the user's."""
    waiting, seen = [experiment], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, functools.partial):
            item = item.func
        elif isinstance(item, property):
            item = item.fget
        elif isinstance(item, classmethod):
            item = item.__func__
        if isinstance(item, type) and _is_users_module(sys.modules.get(item.__module__)):
            waiting += vars(item).values()
        function = inspect.unwrap(item) if callable(item) else None
        if not isinstance(function, FunctionType) or not is_users(function.__code__):
            continue
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a name that is assigned later
                waiting.append(cell.cell_contents)
        for code in _with_nested(function.__code__):
            yield code
            named = [function.__globals__.get(name) for name in code.co_names]
            waiting += named
            for module in named:
                if isinstance(module, ModuleType) and _is_users_module(module):
                    waiting += [getattr(module, name, None) for name in code.co_names]


def _is_users_module(module: ModuleType | None) -> bool:
    """Return whether ``module`` is the user's; one that is not found is, as a file run by path."""
    return not (getattr(module, "__file__", None) or "").startswith(LIBRARIES)


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)
