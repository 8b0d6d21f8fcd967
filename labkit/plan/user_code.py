"""An experiment of the user's own, as a function or as ``FILE.py:FUNCTION``.

Limits: the file is the user's code, and it is run.
"""

import ast
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.values import InputError

_FILE = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


def own_experiment(model: Any) -> Callable | None:
    """Return the user's function if ``model`` is one or names one; None for any other model.

    Raises:
        InputError: the file cannot be run, or has no such function.
    """
    if callable(model) and not isinstance(model, type):
        return model
    if not isinstance(model, str):
        return None
    found = _FILE.fullmatch(model)
    if found is None:
        if model.endswith(".py"):
            raise InputError(f"say which function of {model} is the experiment: {model}:NAME")
        return None
    path = Path(found[1]).expanduser()
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}")
    module = _imported(path)
    function = getattr(module, found[2], None)
    if not callable(function):
        raise InputError(f"{path} has no function {found[2]!r}")
    return function


def _imported(path: Path) -> Any:
    """Import the user's file, which finds what lies beside it, as with ``python FILE``."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        raise InputError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    return module


def argument_value(text: str) -> Any:
    """Read ``"8"``, ``"0.5"``, ``"True"``, ``"None"`` as Python does; other text stays text."""
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
    return value if isinstance(value, int | float | bool | str | None) else text
