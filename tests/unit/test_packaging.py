"""One project, described in several files, which must agree."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata

import pytest
import yaml
from installed import ROOT, pins
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from gpumem.hardware import catalogue

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def requirements(lines: Iterable[str]) -> dict[str, Requirement]:
    parsed = [Requirement(line) for line in lines]
    return {canonicalize_name(each.name): each for each in parsed}


CORE = requirements(PROJECT["dependencies"])


def with_extras(*extras: str) -> dict[str, Requirement]:
    """What an installation with these extras asks for, those that they name included."""
    found = dict(CORE)
    for extra in extras:
        listed = requirements(EXTRAS[extra])
        found |= listed | with_extras(*listed.pop("gpu-memory-lab", Requirement("x")).extras)
    return found


# --- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("versions", ["constraints.txt", ".ci/oldest.txt", ".ci/colab.txt"])
def test_versions_lie_within_the_ranges_that_we_ask_for(versions):
    """Colab's too, or pip would have to replace what its kernel has loaded, and stops instead."""
    wanted = with_extras("course")
    held = {name: each for name, each in pins(versions).items() if name in wanted}
    assert {"transformers", "peft"} <= held.keys()
    assert [name for name in held if not wanted[name].specifier.contains(held[name])] == []


@pytest.mark.parametrize(
    ("package", "extras"),
    [
        ("gpumem", ("estimate", "figures")),
        ("phantom_gpu", ("estimate", "figures", "notebooks")),  # its kernel is Jupyter's
        ("labkit", ("notebooks",)),
    ],
)
def test_every_import_is_declared(package, extras):
    imported = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    allowed = {*with_extras(*extras), "pytest", "gpu-memory-lab"}  # pytest imports its plugin
    providers = metadata.packages_distributions()
    for name in imported - set(sys.stdlib_module_names):
        if name in providers:  # not where an extra is not installed
            assert {canonicalize_name(each) for each in providers[name]} & allowed, name


def test_locks_hold_hashes_and_the_versions_of_the_constraints():
    pinned, held = pins("constraints.txt"), set()
    for path in (ROOT / ".ci" / "locked").glob("*.txt"):
        entries = re.findall(r"^([a-z].*)\n(.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
        for entry, following in entries:
            name, version = re.match(r"([a-z0-9-]+)={2,3}(\S+)", entry).groups()
            assert following.startswith("    --hash=sha256:"), name
            assert pinned.get(name, version) == version, name
            held.add(name)
    assert pinned.keys() <= held


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda p: p.name)
def test_a_workflow_reads_only_and_pins_its_actions(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"].values()
    actions = [step["uses"] for job in jobs for step in job["steps"] if "uses" in step]
    assert actions
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)


# --- conda and Binder ----------------------------------------------------------------------------


def test_conda_and_binder_build_what_pyproject_asks_for():
    for name in ("environment.yml", "binder/environment.yml"):
        environment = yaml.safe_load(text(name))
        assert environment["name"] == PROJECT["name"]
        [python] = [each for each in environment["dependencies"] if "python=" in each]
        assert SpecifierSet(PROJECT["requires-python"]).contains(python.partition("=")[2])
    [torch] = [each for each in environment["dependencies"] if "pytorch" in each]
    assert torch.replace("pytorch-cpu", "torch") in PROJECT["dependencies"]
    assert os.access(ROOT / "binder" / "postBuild", os.X_OK)


def test_a_development_container_is_made_by_make():
    """In the image's Python, by commands that `make` knows; its kernel is a GPU's of the table."""
    container = json.loads(text(".devcontainer/devcontainer.json"))
    assert SpecifierSet(PROJECT["requires-python"]).contains(container["image"][7:11])
    [make, target, given] = container["postCreateCommand"].split()
    assert make == "make"
    assert catalogue.gpu(given.removeprefix("GPU=")).key in given
    asked = subprocess.run([make, "-n", target, given], cwd=ROOT, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    assert f"labkit phantom --gpu {given[4:]} --install-kernel" in asked.stdout
    settings = container["customizations"]["vscode"]["settings"]
    folder = settings["python.defaultInterpreterPath"].split("/")[1]
    assert f"VENV ?= {folder}\n" in text("Makefile")
    assert (ROOT / container["customizations"]["codespaces"]["openFiles"][0]).is_file()


@pytest.mark.parametrize(
    ("limit", "own", "threads"),
    [
        ("2.0", {}, "2 2"),
        ("0.5", {}, "1 1"),
        ("", {}, "1 1"),
        ("2", {"OMP_NUM_THREADS": "3"}, "3 2"),
    ],
)
def test_a_container_has_as_many_threads_as_cores_unless_told_otherwise(limit, own, threads):
    names = "OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"
    code = f"import os; print(*[os.environ[name] for name in {names}])"
    command = [ROOT / "binder" / "start", "python3", "-c", code]
    environment = {"PATH": os.environ["PATH"], "CPU_LIMIT": limit, **own}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (done.stderr, done.stdout.strip()) == ("", threads)


# --- what is said about the project --------------------------------------------------------------


def test_the_map_of_the_course_says_what_the_lessons_say(monkeypatch):
    """Questions and minutes, in the README and in lesson 00: `make map`."""
    monkeypatch.syspath_prepend(ROOT / "site")
    import course_map

    for path, content in course_map.written().items():
        assert path.read_text(encoding="utf-8") == content, path
    lessons = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert set(re.findall(r"notebooks/(\w+\.ipynb)", text("README.md"))) == lessons


def test_each_test_that_security_md_names_is_there():
    for path, function in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text("SECURITY.md")):
        assert f"def {function}(" in text(path), (path, function)
