"""The fixture `phantom_gpu` where no phantom GPU can be made: skipped or failed, and for free."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from phantom_gpu import pytest_plugin

TESTS = """
import sys

def test_nothing_heavy_is_imported():
    assert not {"torch", "numpy", "psutil", "gpumem.inputs"} & set(sys.modules)

def test_training_fits(phantom_gpu):
    raise AssertionError("there is no phantom GPU to give")
"""


def test_the_entry_point_names_the_plugin():
    root = Path(__file__).resolve().parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"phantom_gpu": pytest_plugin.__name__}


@pytest.mark.parametrize(
    ("options", "outcome", "reason"),
    [
        ((), "1 passed, 1 skipped", "SKIPPED [1] test_fit.py:7: "),
        (("--phantom-required",), "1 passed, 1 error", "ERROR test_fit.py::test_training_fits - "),
    ],
)
def test_without_a_phantom_the_test_is_skipped_or_fails(tmp_path, options, outcome, reason):
    (tmp_path / "test_fit.py").write_text(TESTS)
    plugin = ("-p", pytest_plugin.__name__)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", *plugin, *options],
        cwd=tmp_path,
        env=os.environ | {"PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "300"},
        capture_output=True,
        text=True,
    )
    assert f"= {outcome} in" in done.stdout
    [line] = [line for line in done.stdout.splitlines() if line.startswith(reason)]
    assert "the phantom GPU" in line  # the rest says what is missing on this machine
