"""`labkit doctor` on Python and on packages: there, in range, at one with each other.

Limits: versions come from what pip has noted beside each package. Extras other than those for
learners are not looked at.
"""

import importlib.metadata
import os
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from labkit.doctor.findings import Finding, pip
from labkit.memory import InputError

DISTRIBUTION = "gpu-memory-lab"
PACKAGE = Path(__file__).resolve().parents[1]
#: What learners install beyond the package itself, and what it is for.
EXTRAS = {"notebooks": "to open lessons and to run them here"}
#: Required packages that commands use and lessons do not; importing them takes a second.
COMMANDS_ONLY = ("nbformat", "fpdf2")
MOST_NAMED = 6


def check_python() -> list[Finding]:
    """Which Python this is. (One that is too old does not come so far.)"""
    version = ".".join(map(str, sys.version_info[:3]))
    return [Finding("ok", "python", f"{version} (`{sys.executable}`)")]


def check_labkit() -> list[Finding]:
    """Whether labkit is the one of the course that the learner is in, and there is one of it."""
    import labkit

    checkout = PACKAGE.parent
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "labkit" / "claims.toml").is_file() and (folder / "notebooks").is_dir():
            if folder.resolve() != checkout:
                text = f"you are in the course in `{folder}`, but labkit comes from `{checkout}`"
                return [Finding("problem", "labkit", text, pip(f"install -e {_shown(folder)}"))]
            break
    noted = {found.version for found in importlib.metadata.distributions(name=DISTRIBUTION)}
    other = sorted(noted - {labkit.__version__})
    if other:
        text = f"{labkit.__version__} in `{checkout}`, but pip has noted {', '.join(other)}"
        return [Finding("note", "labkit", text, pip(f"install -e {_shown(checkout)}"))]
    return [Finding("ok", "labkit", f"{labkit.__version__} (`{checkout}`)")]


def _shown(folder: Path) -> str:
    return "." if folder == Path.cwd() else f'"{folder}"'


def requirements() -> list[str]:
    """What this package asks for, from its installed metadata, else from ``pyproject.toml``.

    Raises:
        ValueError: neither is there, or the file cannot be read.
    """
    project = PACKAGE.parent / "pyproject.toml"
    if project.is_file():  # a working copy: its file is newer than what was installed from it
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        extras = table.get("optional-dependencies", {})
        optional = [
            f"{requirement.partition(';')[0]} ; extra == '{extra}'"
            for extra, names in extras.items()
            for requirement in names
        ]
        return [*table.get("dependencies", []), *optional]
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError(f"{DISTRIBUTION} is not installed") from error


def required_names() -> list[str]:
    """The packages that lessons import, PyTorch first, and the kernel; none if nobody knows."""
    try:
        from packaging.requirements import Requirement

        wanted = [Requirement(line).name for line in requirements() if "extra ==" not in line]
    except (ValueError, ImportError):  # `check_packages` says so
        return []
    names = set(wanted) - set(COMMANDS_ONLY)
    # Where NumPy or PyTorch fail, others do too: they come before them.
    return ["numpy", "torch", *sorted((names | {"ipykernel"}) - {"numpy", "torch"})]


def on_pythonpath(place: Path) -> bool:
    """Whether Python finds ``place`` through the variable PYTHONPATH."""
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return any(place.resolve().is_relative_to(Path(entry).resolve()) for entry in entries)


def check_packages(wanted: Iterable[str] | None = None) -> list[Finding]:
    """Each required package: there, and in range. Those of extras are only noted if missing."""
    from packaging.requirements import Requirement

    findings: list[Finding] = []
    lacking: dict[str, list[str]] = {}
    well: dict[str, str] = {}
    for line in requirements() if wanted is None else wanted:
        requirement = Requirement(line)
        extra = _extra(requirement)
        if extra is None or requirement.name.lower() == DISTRIBUTION:
            continue
        name, version = requirement.name, _version(requirement.name)
        if version is None and extra:
            lacking.setdefault(extra, []).append(name)
        elif version is None:
            remedy = pip(f'install "{name}{requirement.specifier}"')
            findings.append(Finding("problem", name, "is not installed", remedy))
        elif not requirement.specifier.contains(version, prereleases=True):
            findings.append(_outside(name, version, requirement.specifier))
        else:
            well[name] = version
    findings += [_without(extra, names) for extra, names in lacking.items()]
    findings += _at_odds(well)
    first = ", ".join(f"{name} {version}" for name, version in list(well.items())[:MOST_NAMED])
    more = len(well) - MOST_NAMED
    text = f"{first} and {more} more are as asked for" if more > 0 else first
    return [Finding("ok", "packages", text), *findings] if well else findings


def _extra(requirement: Any) -> str | None:
    """The learners' extra that asks for it, "" if the package itself does, None if neither."""
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return ""
    return next((extra for extra in EXTRAS if marker.evaluate({"extra": extra})), None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _without(extra: str, names: list[str]) -> Finding:
    verb = "is" if len(names) == 1 else "are"
    text = f"{', '.join(names)} {verb} not installed, which you need {EXTRAS[extra]}"
    checkout = PACKAGE.parent
    if (checkout / "pyproject.toml").is_file():
        where = "" if checkout == Path.cwd() else str(checkout)
        return Finding("note", extra, text, pip(f'install -e "{where or "."}[{extra}]"'))
    return Finding("note", extra, text, pip(f'install "{DISTRIBUTION}[{extra}]"'))


def _outside(name: str, version: str, wanted: Any) -> Finding:
    text = f"{version} is outside {wanted}"
    place = Path(str(importlib.metadata.distribution(name).locate_file("")))
    if on_pythonpath(place):  # which comes before what pip installs
        remedy = f"remove {name} from `{place}`, or take that folder off PYTHONPATH"
        return Finding("problem", name, f"{text} in `{place}`", remedy)
    return Finding("problem", name, text, pip(f'install "{name}{wanted}"'))


def _at_odds(installed: dict[str, str]) -> list[Finding]:
    """What these packages ask of others, where those are missing or of another version."""
    from packaging.requirements import Requirement

    findings = {}
    for name in installed:
        for line in importlib.metadata.requires(name) or ():
            asked = Requirement(line)
            if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
                continue
            version = _version(asked.name)
            if version is not None and asked.specifier.contains(version, prereleases=True):
                continue
            has = f"{version} is installed" if version else "it is not installed"
            text = f"{name} asks for {asked.name}{asked.specifier}, and {has}"
            remedy = pip(f'install "{asked.name}{asked.specifier}"')
            findings[asked.name] = Finding("note", asked.name, text, remedy)
    return list(findings.values())
