"""Begin the phantom GPU in a process as soon as it has imported torch.

Python imports this module when it starts, as ``labkit.phantom.process.environment`` has put its
folder on the path; a ``sitecustomize`` that it hides is imported, too.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)


class _OnTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        # Libraries also ask for it without importing it then, and may do so first.
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_begin(module):
            execute(module)
            from labkit.phantom.process import begin

            begin()

        spec.loader.exec_module = execute_and_begin
        return spec


if os.environ.get("LABKIT_PHANTOM"):
    sys.meta_path.insert(0, _OnTorch())

hidden = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if path != HERE]
)
if hidden is not None and hidden.loader is not None:
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))
