"""`labkit doctor` on what surrounds a lesson: environment variables, names, letters.

Limits: only variables that have stopped or slowed lessons are looked at.
"""

import importlib.metadata
import locale
import os
import sys
from pathlib import Path

from labkit.doctor.findings import Finding, first_line
from labkit.doctor.imports import ALLOCATOR_VARIABLES, Imports
from labkit.doctor.packages import PACKAGE

#: matplotlib's names that put a figure into the notebook, or leave it to us.
_IN_NOTEBOOK = ("agg", "inline", "nbagg", "notebook", "widget", "ipympl", "module://")


def check_shadows() -> list[Finding]:
    """What Python would take for a library: a kernel looks in its own folder first."""
    installed = importlib.metadata.packages_distributions()  # by the names that one imports
    libraries = {*sys.stdlib_module_names, "labkit", *installed}
    findings = []
    for folder in dict.fromkeys((Path.cwd(), PACKAGE.parent / "notebooks")):
        if (folder / "labkit" / "claims.toml").is_file():
            libraries.discard("labkit")  # the course's own folder
        packages = [file.parent for file in folder.glob("*/__init__.py")]
        for path in sorted([*folder.glob("*.py"), *packages]):
            if path.stem in libraries:
                text = f"`{path}` takes the place of the library {path.stem} in notebooks beside it"
                findings.append(Finding("problem", "names", text, "give it another name"))
    return findings


def check_encoding() -> list[Finding]:
    """Whether text is UTF-8 everywhere, as lessons and their outputs are."""
    shown = (getattr(sys.stdout, "encoding", None) or "unknown").lower()
    files = locale.getencoding().lower()
    if sys.flags.utf8_mode:
        files = "utf-8"
    odd = [f"{what} {name}" for what, name in (("this terminal", shown), ("files", files))
           if name.replace("_", "-") not in ("utf-8", "utf8", "cp65001")]  # fmt: skip
    if not odd:
        return []
    setting = "set PYTHONUTF8=1" if sys.platform == "win32" else "export PYTHONUTF8=1"
    also = "; unset PYTHONIOENCODING" if "PYTHONIOENCODING" in os.environ else ""
    text = f"Python's text is not UTF-8 here ({', '.join(odd)}): some output cannot be shown"
    return [Finding("note", "encoding", text, f"`{setting}{also}`")]


def check_variables(imports: Imports) -> list[Finding]:
    """Variables that PyTorch and matplotlib read: well-formed, and fit for notebooks."""
    findings = []
    for name in ALLOCATOR_VARIABLES:
        if error := imports.error(name):
            text = f"{name}={os.environ[name]!r} is nothing that PyTorch can read: "
            remedy = f"unset {name}, or set it as in expandable_segments:True"
            findings.append(Finding("problem", "variables", text + first_line(error), remedy))
    backend = os.environ.get("MPLBACKEND", "")
    if backend and not backend.lower().startswith(_IN_NOTEBOOK):
        text = f"MPLBACKEND={backend!r}: figures of yours would not appear in the notebook"
        status = "note"
        if imports.error("MPLBACKEND"):
            text = f"MPLBACKEND={backend!r} is no back end of matplotlib, which stops lessons"
            status = "problem"
        findings.append(Finding(status, "variables", text, "unset MPLBACKEND"))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads and not (threads.isdecimal() and int(threads)):
        text = f"OMP_NUM_THREADS={threads!r} is no number of threads, and is not heeded"
        findings.append(Finding("note", "variables", text, "unset OMP_NUM_THREADS"))
    elif threads and int(threads) > 2 * (os.cpu_count() or 1):
        text = f"OMP_NUM_THREADS={threads} on {os.cpu_count()} cores makes lessons slower"
        findings.append(Finding("note", "variables", text, "unset OMP_NUM_THREADS"))
    return findings
