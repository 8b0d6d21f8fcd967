"""`labkit doctor` on Python and its packages: present, in range, tested, importable."""

import importlib.metadata
import os
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from typing import NamedTuple

from gpumem.files import SOURCE

DISTRIBUTION = "gpu-memory-lab"
#: What the course has been tested with; the package itself refuses what is older.
TESTED = {"torch": "<2.16", "transformers": "<5.24", "peft": "<0.22", "bitsandbytes": "<0.51"}
IMPORTED = (
    "numpy",
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "datasets",
    "matplotlib",
    "ipywidgets",
)
IMPORT_SECONDS = 180

# Says the name of each package before importing it: the last name is that of the one that failed.
_IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    print(name, flush=True)
    importlib.import_module(name)
print("all work")
"""


class Finding(NamedTuple):
    """What a check found: ``ok``, ``note`` (works, but shows less) or ``problem``."""

    status: str
    subject: str
    text: str
    remedy: str = ""


def pip_install(arguments: str) -> str:
    """Return the command that installs packages for this Python."""
    return f"`{shlex.quote(sys.executable)} -m pip install {arguments}`"


def check_python() -> list[Finding]:
    """Return which Python and which labkit these are."""
    python = ".".join(map(str, sys.version_info[:3]))
    return [
        Finding("ok", "python", f"{python} ({sys.executable})"),
        Finding("ok", "labkit", f"{importlib.metadata.version(DISTRIBUTION)} ({SOURCE})"),
    ]


def check_packages() -> list[Finding]:
    """Check that each required package is present, in range, and not newer than tested."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    findings, present = [], 0
    for line in importlib.metadata.requires(DISTRIBUTION) or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": "notebooks"}):
            continue
        name, wanted = requirement.name, requirement.specifier
        remedy = pip_install(f'"{name}{wanted}"')
        try:
            version = importlib.metadata.version(name)
        except PackageNotFoundError:
            found = Finding("problem", name, "is not installed", remedy)
            if marker is not None and "extra" in str(marker):
                text = "is not installed, and lessons are opened and run with it"
                found = Finding("note", name, text, remedy)
            findings.append(found)
            continue
        tested = SpecifierSet(TESTED.get(name, ""))
        if not wanted.contains(version, prereleases=True):
            findings.append(Finding("problem", name, f"{version} is outside {wanted}", remedy))
        elif not tested.contains(version, prereleases=True):
            text = f"{version} is newer than what the course has been tested with ({tested})"
            remedy = "if a lesson fails, " + pip_install(f'"{name}{wanted & tested}"')
            findings.append(Finding("note", name, text, remedy))
        else:
            present += 1
    return [Finding("ok", "packages", f"{present} are present and in range"), *findings]


class Imports:
    """Packages being imported in another process, which they may end."""

    def __init__(self) -> None:
        self.torch_works = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-c", _IMPORT, *IMPORTED],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )

    def check(self) -> list[Finding]:
        """Wait for the imports, and name the first package that fails."""
        try:
            said, errors = self._process.communicate(timeout=IMPORT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            said, errors = self._process.communicate()
        names = [word for word in said.split() if word in IMPORTED]
        self.torch_works = "torch" in names[:-1]
        if said.endswith("all work\n"):
            return [Finding("ok", "imports", f"{len(IMPORTED)} packages work")]
        name, code = names[-1], self._process.returncode
        text = f"importing it ends Python ({code})"
        if code == 1 and errors.strip():
            text = f"cannot be imported: {errors.strip().splitlines()[-1]}"
        remedy = pip_install(f"--force-reinstall --no-deps {name}")
        if name == "torch":
            remedy = "install PyTorch again: https://pytorch.org/get-started/locally"
        return [Finding("problem", name, text, remedy)]
