"""Hosted notebooks: how to get a GPU, torchao that peft may refuse, what setup leaves as it is.

The tests below the line need Colab's versions, and run in `make test-colab` alone.
"""

import json
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from installed import ROOT, empty_environment, packages_here, put_below

from gpumem.hardware import this_machine
from labkit.lesson import colab, session

HERE = replace(this_machine.machine(), kind="cpu", in_colab=False)
COLAB = replace(HERE, in_colab=True)


def pins() -> dict[str, str]:
    """The versions in .ci/colab.txt."""
    lines = (ROOT / ".ci" / "colab.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    for name in ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)


# --- how to get a GPU --------------------------------------------------------------------------


def test_colab_and_kaggle_say_where_their_gpus_are(monkeypatch, capsys):
    assert colab.for_a_gpu(HERE) == ""
    assert "Runtime → Change runtime type → T4 GPU" in colab.for_a_gpu(COLAB)
    assert colab.for_a_gpu(replace(COLAB, kind="cuda")) == ""
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert "Settings → Accelerator" in colab.for_a_gpu(HERE)
    monkeypatch.setattr(colab, "prepare", lambda machine: "")
    monkeypatch.setattr(this_machine, "machine", lambda: HERE)
    session.start("00")
    assert "Settings → Accelerator" in " ".join(capsys.readouterr().out.split())


# --- torchao -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "words"), [(0, "Removed"), (1, "no permission")])
def test_torchao_is_removed_from_a_lent_machine_only(monkeypatch, code, words):
    def run(command, **options):
        commands.append(command[1:])
        return SimpleNamespace(returncode=code, stderr="no permission\n")

    commands = []
    monkeypatch.setattr(colab.subprocess, "run", run)
    monkeypatch.setattr(colab.importlib.util, "find_spec", lambda name: name)
    assert colab.prepare(HERE) == ""
    assert commands == []
    assert words in colab.prepare(COLAB)
    assert commands == [["-m", "pip", "uninstall", "--yes", "--quiet", "torchao"]]
    monkeypatch.setattr(colab.importlib.util, "find_spec", lambda name: None)
    assert colab.prepare(COLAB) == ""


# --- with Colab's versions ---------------------------------------------------------------------

lane = pytest.mark.skipif(
    "LABKIT_COLAB" not in os.environ, reason="needs Colab's versions: make test-colab"
)


def setup_cell() -> str:
    path = ROOT / "notebooks" / "00_start_here.ipynb"
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["metadata"]["tags"] == ["setup"] and cell["cell_type"] == "code":
            return "".join(cell["source"])


INSTALL = """
import importlib.metadata, json, os
os.chdir({folder!r})
names = ("torch", "numpy", "pandas", "ipython", "ipykernel", "ipywidgets", "transformers")
versions = lambda: {{name: importlib.metadata.version(name) for name in names}}
before = versions()
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
done = shell.run_cell({cell!r})
done.raise_error()
print(json.dumps([before, versions(), shell.user_ns["lab"].__file__]))
"""


def without_labkit(packages: Path, folder: Path) -> Path:
    """A folder with links to these packages, without ours."""
    links = Path(tempfile.mkdtemp(dir=folder))
    for each in packages.iterdir():
        if each.name != "labkit" and not each.name.startswith("gpu_memory_lab"):
            (links / each.name).symlink_to(each)
    return links


@lane
def test_setup_cell_installs_labkit_and_leaves_the_others(tmp_path):
    """The cell itself, but for the address: this working copy stands for the repository."""
    python, packages = empty_environment(tmp_path / "venv")
    put_below(packages, [without_labkit(each, tmp_path) for each in packages_here()])
    requirement = next(part for part in setup_cell().split('"') if "@ git+https" in part)
    cell = setup_cell().replace(requirement, f"gpu-memory-lab @ {ROOT.as_uri()}")
    folder = tmp_path / "content"
    folder.mkdir()
    code = INSTALL.format(folder=str(folder), cell=cell)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    before, after, file = json.loads(done.stdout.splitlines()[-1])
    assert after == before
    assert Path(file).is_relative_to(tmp_path / "venv" / "lib")
    kept = (folder / "stays.txt").read_text(encoding="utf-8")
    assert f"ipywidgets=={pins()['ipywidgets']}\n" in kept
    assert "torch==" in kept
