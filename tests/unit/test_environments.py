"""What conda and Binder build from, and a start that fits a container."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]


def test_conda_and_binder_build_what_pyproject_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name in ("environment.yml", "binder/environment.yml"):
        environment = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
        assert environment["name"] == project["name"]
        [python] = [each for each in environment["dependencies"] if "python=" in each]
        assert SpecifierSet(project["requires-python"]).contains(python.partition("=")[2])
    [torch] = [each for each in environment["dependencies"] if "pytorch" in each]
    assert torch.replace("pytorch-cpu", "torch") in project["dependencies"]
    assert os.access(ROOT / "binder" / "postBuild", os.X_OK)


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"CPU_LIMIT": "2.0"}, ["2", "2"]),
        ({"CPU_LIMIT": "0.5"}, ["1", "1"]),
        ({"CPU_LIMIT": ""}, ["1", "1"]),
        ({"CPU_LIMIT": "2", "OMP_NUM_THREADS": "3"}, ["3", "2"]),
    ],
)
def test_a_container_has_as_many_threads_as_cores_unless_told_otherwise(variables, threads):
    names = "OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"
    code = f"import os; print(*[os.environ[name] for name in {names}])"
    command = [ROOT / "binder" / "start", "python3", "-c", code]
    environment = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (done.stderr, done.stdout.split()) == ("", threads)
