"""Public names that load their module when they are first used."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def public_names(
    package: str, groups: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of ``package``.

    Args:
        package: its ``__name__``.
        groups: by group and by module, the public names that the module defines.
    """
    module_of = {
        name: module
        for modules in groups.values()
        for module, names in modules.items()
        for name in names
    }
    loaded = vars(sys.modules[package])

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        loaded[name] = getattr(importlib.import_module(module_of[name]), name)
        return loaded[name]

    return sorted(module_of), load, lambda: sorted({*loaded, *module_of})
