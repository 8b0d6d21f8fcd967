"""Whether packages that are installed can be imported: tried in a process of its own.

That process may crash, as packages that were compiled against others do; this one goes on. Of a
package that fails because another one failed nothing is said.

Limits: importing is all that is tried, and what peft, bitsandbytes and the allocator say when they
are asked for their own condition.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from labkit.doctor.findings import Finding, first_line, pip
from labkit.doctor.packages import on_pythonpath

#: Set for this process; kept from the other one, where each is tried by itself.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
VARIABLES = (*ALLOCATOR_VARIABLES, "MPLBACKEND")
_MODULES = {"ipython": "IPython"}
_LIMIT_SECONDS = 180

# What some libraries tell only when asked: peft raises on a torchao that it cannot use, and
# bitsandbytes puts a stand-in where its compiled part cannot be loaded.
_QUESTIONS = {
    "torchao": "import peft.import_utils; peft.import_utils.is_torchao_available()",
    "bitsandbytes library": (
        "import bitsandbytes.cextension as c\n"
        "if type(c.lib).__name__.startswith('ErrorHandler'): raise RuntimeError(c.lib.error_msg)"
    ),
}
# Their error on a full disk, for which no package is at fault: `check_folders` names it.
_NO_TEMPORARY_FOLDER = "No usable temporary directory"
_NEEDS = {"torchao": "peft", "bitsandbytes library": "bitsandbytes"}

# Standard output carries one JSON object a line: a name before it is tried, then how it went.
_CHILD = """
import json, os, sys, traceback
out = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
def tell(**what):
    out.write(json.dumps(what) + "\\n"); out.flush()
failed = set()
for name, needs, statement in json.loads(sys.argv[1]):
    if needs in failed:
        continue
    tell(name=name)
    try:
        exec(statement, {})
    except BaseException as error:
        missing = (getattr(error, "name", None) or "").partition(".")[0]
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        names = [missing, *(frame.f_globals.get("__name__") or "" for frame in frames)]
        origins = {name.partition(".")[0] for name in names}
        tell(name=name, error=f"{type(error).__name__}: {error}", through=sorted(origins))
        failed.add(name)
    else:
        tell(name=name, error=None)
        if name == "torch":  # a decorator that compiles would load half of PyTorch
            sys.modules["torch"].compile = lambda f=None, **options: f or (lambda g: g)
os._exit(0)  # to take all of it down again takes long
"""


class Imports:
    """The packages ``names``, being imported since this was made."""

    def __init__(self, names: Iterable[str]) -> None:
        names = list(names)
        self._names = [name for name in names if _installed(name)]
        self._missing = {module_of(name) for name in names} - set(map(module_of, self._names))
        trials = [(module_of(name), None, f"import {module_of(name)}") for name in self._names]
        trials += [(name, _NEEDS[name], text) for name, text in _QUESTIONS.items()]
        trials += [
            (name, "torch", f"from torch.cuda.memory import _set_allocator_settings as a; a({v!r})")
            for name in ALLOCATOR_VARIABLES
            if (v := os.environ.get(name))
        ]
        if backend := os.environ.get("MPLBACKEND"):
            statement = f"import matplotlib as m; m.rcParams['backend'] = {backend!r}"
            trials.append(("MPLBACKEND", "matplotlib", statement))
        environment = {name: v for name, v in os.environ.items() if name not in VARIABLES}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", _CHILD, json.dumps(trials)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "HF_HUB_OFFLINE": "1"},  # no library is to look for news
        )
        self._errors: dict[str, Any] | None = None
        self._unfinished: str | None = None
        self._overdue = False

    def check(self) -> list[Finding]:
        """Wait for the other process; a finding for each package at fault, or one for all."""
        errors = self._wait()
        guilty = {
            name: error
            for name, error in errors.items()
            if error and _NO_TEMPORARY_FOLDER not in error["error"]
        }
        to_blame = self._missing | set(guilty)
        findings = [
            _broken(name, error["error"])
            for name, error in guilty.items()
            if name not in VARIABLES and not (set(error["through"]) - {name}) & to_blame
        ]
        if self._unfinished:
            code = self._process.returncode
            how = "takes too long" if self._overdue else f"ends Python (exit code {code})"
            text = f"importing it {how}; what comes after it was not tried"
            findings.append(
                Finding("problem", self._unfinished, text, _reinstall(self._unfinished))
            )
        if not findings:
            well = sum(self.works(module_of(name)) for name in self._names)
            return [Finding("ok", "imports", f"{well} packages can be imported")]
        return findings

    def works(self, module: str) -> bool:
        """Whether the other process could import ``module``."""
        return self._wait().get(module, "untried") is None

    def error(self, name: str) -> str | None:
        """What ``name`` said when it was tried, if it did not work."""
        found = self._wait().get(name)
        return found["error"] if found else None

    def _wait(self) -> dict[str, Any]:
        if self._errors is None:
            self._errors = {}
            try:
                output = self._process.communicate(timeout=_LIMIT_SECONDS)[0]
            except subprocess.TimeoutExpired:
                self._overdue = True
                self._process.kill()
                output = self._process.communicate()[0]
            for line in output.decode().splitlines():
                message = json.loads(line)
                if "error" not in message:
                    self._unfinished = message["name"]
                    continue
                self._unfinished = None
                error = message["error"]
                self._errors[message["name"]] = error and message
        return self._errors


def module_of(distribution: str) -> str:
    """What to import of a package that pip calls ``distribution``."""
    return _MODULES.get(distribution, distribution.lower().replace("-", "_"))


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _broken(name: str, error: str) -> Finding:
    text = f"cannot be imported: {first_line(error)}"
    if name == "torchao":
        text = f"peft refuses it, in lessons 14, 15 and 21: {first_line(error)}"
        remedy = f"{pip('install --upgrade torchao')}, or, as no lesson needs it, "
        return Finding("problem", name, text, remedy + pip("uninstall -y torchao"))
    if name == "bitsandbytes library":
        text = f"its compiled part cannot be loaded (lessons 13 and 15): {first_line(error)}"
        return Finding("problem", "bitsandbytes", text, _reinstall("bitsandbytes"))
    return Finding("problem", name, text, _reinstall(name))


def _reinstall(module: str) -> str:
    """The remedy for a package that does not work: another one in front of it, or itself."""
    origin = _origin(module)
    if origin and on_pythonpath(origin):  # which comes before what pip installs
        return f"remove `{origin}`, or take its folder off PYTHONPATH"
    name = next((name for name, known in _MODULES.items() if known == module), module)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a question's name, not a package's
        return "make the environment again, as the README says"
    wanted = f"{name.replace('_', '-')}=={version}"
    if name != "torch":
        return pip(f"install --force-reinstall --no-deps {wanted}")
    if "+" in version:  # a build for the CPU, or for another CUDA: pip alone would change it
        return f"install torch {version} again as https://pytorch.org/get-started/locally says"
    return pip(f"install --force-reinstall {wanted}")  # or one of the libraries that it requires


def _origin(module: str) -> Path | None:
    for folder in filter(None, sys.path):
        for path in (Path(folder, module, "__init__.py"), Path(folder, f"{module}.py")):
            if path.is_file():
                return path.parent.resolve() if path.name == "__init__.py" else path.resolve()
    return None
