"""One project, described in several files: they must agree, whoever edits one of them."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def requirements(lines: Iterable[str]) -> dict[str, Requirement]:
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(each.name): each for each in parsed}


def pins(name: str) -> dict[str, str]:
    """The versions of a constraints file."""
    return dict(line.split("==") for line in text(name).splitlines() if not line.startswith("#"))


CORE = requirements(PROJECT["dependencies"])
PINS, OLDEST, COLAB = pins("constraints.txt"), pins(".ci/oldest.txt"), pins(".ci/colab.txt")


# --- versions ------------------------------------------------------------------------------------


def test_every_requirement_is_pinned_within_its_range():
    built = CORE | requirements(EXTRAS["notebooks"] + EXTRAS["dev"] + EXTRAS["deepspeed"])
    assert [n for n, each in built.items() if not each.specifier.contains(PINS[n])] == []


def test_oldest_supported_versions_are_the_floors():
    supported = set(OLDEST) & set(CORE)
    assert supported == {"torch", "transformers", "peft", "bitsandbytes"}
    for name in supported:
        [floor] = [each for each in CORE[name].specifier if each.operator == ">="]
        wanted = Version(floor.version).release
        assert Version(OLDEST[name]).release[: len(wanted)] == wanted


def test_colabs_versions_meet_our_floors():
    """Else pip would have to replace what Colab's kernel has loaded, and stops instead."""
    named = COLAB.keys() & CORE.keys()
    assert {"ipython", "ipywidgets", "numpy", "transformers"} <= named
    assert [name for name in named if not CORE[name].specifier.contains(COLAB[name])] == []


def test_every_import_is_declared():
    imported = set()
    for path in (ROOT / "labkit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    allowed = set(CORE) | set(requirements(EXTRAS["notebooks"] + EXTRAS["deepspeed"]))
    allowed.add("pytest")  # which alone imports labkit.phantom.pytest_plugin
    providers = metadata.packages_distributions()
    for name in imported - set(sys.stdlib_module_names) - {"labkit"}:
        if name in providers:  # not where an extra is not installed
            assert {canonicalize_name(each) for each in providers[name]} & allowed, name


HASHED = re.compile(
    r"([a-z0-9-]+)={2,3}([0-9][0-9a-z.]*)( ; [^\\]+)? \\\n"  # name, version, marker
    r"((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)"
)


def test_locks_hold_hashes_and_the_versions_of_the_constraints():
    held = {}
    for path in sorted((ROOT / ".ci" / "locked").glob("*.txt")):
        lines = "".join(line for line in path.open(encoding="utf-8") if not line.startswith("#"))
        assert HASHED.sub("", lines) == "", f"{path.name} holds a line without a hash"
        for name, version, marker, _ in HASHED.findall(lines):
            assert PINS.get(name, version) == version, name
            if (
                path.stem == "phantom"
            ):  # all of it is Linux's, and lies over what the others install
                continue
            assert held.setdefault(name, version) == version
            assert name in PINS or marker, f"{name} is not pinned, and not of one system alone"
    assert set(PINS) - set(held) == {"torch"}


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda p: p.name)
def test_a_workflow_reads_only_and_pins_its_actions(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"].values()
    actions = [step["uses"] for job in jobs for step in job["steps"] if "uses" in step]
    assert actions
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)
    for job in jobs:
        for row in job.get("strategy", {}).get("matrix", {}).get("include", []):
            assert (ROOT / row["constraints"]).is_file()
            assert SpecifierSet(PROJECT["requires-python"]).contains(f"{row['python']}.0")


# --- what is said about the project --------------------------------------------------------------


def test_version_is_the_same_everywhere():
    citation = yaml.safe_load(text("CITATION.cff"))
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"] == "MIT"
    assert f"## {PROJECT['version']}" in text("CHANGELOG.md")


def test_the_map_of_the_course_says_what_the_lessons_say(monkeypatch):
    """Questions, minutes, hardware and surprises, in the README and in lesson 00: `make map`."""
    monkeypatch.syspath_prepend(ROOT / "site")
    import course_map

    for path, content in course_map.written().items():
        assert path.read_text(encoding="utf-8") == content, path
    lessons = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert set(re.findall(r"notebooks/(\w+\.ipynb)", text("README.md"))) == lessons


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_that_people_are_told_of_exist(name):
    targets = set(re.findall(r"\bmake ([a-z][a-z-]*)", text(name)))
    rules = set(re.findall(r"^([a-z-]+):", text("Makefile"), flags=re.MULTILINE))
    assert targets
    assert targets <= rules


def test_architecture_names_every_module():
    rows = re.findall(r"^\| (`.*?) \|", text("docs/ARCHITECTURE.md"), flags=re.MULTILINE)
    described = set(re.findall(r"`(\w+)/?`", " ".join(rows)))
    modules = {path.stem for path in (ROOT / "labkit").glob("*.py")} - {"__init__", "__main__"}
    packages = {path.parent.name for path in (ROOT / "labkit").glob("*/__init__.py")}
    assert modules | packages == described


def test_each_test_that_security_md_names_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text("SECURITY.md"))
    assert len(named) > 10
    for path, function in named:
        assert f"def {function}(" in text(path), (path, function)


def test_no_internal_paths_in_what_is_published():
    for name in ("pyproject.toml", "constraints.txt", "environment.yml", "Makefile", ".ci/run"):
        published = text(name).replace(PROJECT["urls"]["Repository"], "")
        assert not re.search(r"(?<![\w.~$/{-])/(?:work|root|home|opt)/|https?://", published), name
