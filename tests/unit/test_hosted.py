"""Hosted notebooks: how to get a GPU, torchao that peft refuses, what setup leaves as it is.

The tests below the line need Colab's versions, and run in `make test-colab` alone.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from labkit import hardware, hosted, session
from labkit.show import cards

ROOT = Path(__file__).resolve().parents[2]
HERE = replace(hardware.machine(), kind="cpu", in_colab=False)
COLAB = replace(HERE, in_colab=True)
OLD = "0.10.0"  # the torchao that Colab has

PEFT = """
import torch
from peft import LoraConfig, get_peft_model
get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
"""


def pins() -> dict[str, str]:
    """The versions in .ci/colab.txt."""
    lines = (ROOT / ".ci" / "colab.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    for name in ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)


# --- where we are ------------------------------------------------------------------------------


def test_own_machine_is_no_host():
    assert hosted.host(HERE) is None
    assert hosted.for_a_gpu(HERE) == ""


def test_colab_and_kaggle_say_where_their_gpus_are(monkeypatch):
    assert hosted.host(COLAB) is hosted.COLAB
    assert "Runtime → Change runtime type → T4 GPU" in hosted.for_a_gpu(COLAB)
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    assert hosted.host(HERE) is hosted.KAGGLE
    assert "Settings → Accelerator" in hosted.for_a_gpu(HERE)


def test_who_has_a_gpu_is_not_told_to_get_one():
    assert hosted.for_a_gpu(replace(COLAB, kind="cuda")) == ""


def test_start_says_it_on_the_card_and_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(hosted, "refused_torchao", lambda: "")
    monkeypatch.setattr(hardware, "machine", lambda: COLAB)
    assert session.start("00") is COLAB
    said = " ".join(capsys.readouterr().out.split())
    assert "For a GPU" in said
    assert "Runtime → Change runtime type → T4 GPU" in said
    monkeypatch.setattr(hardware, "machine", lambda: HERE)
    session.start("00")
    assert "For a GPU" not in capsys.readouterr().out


def test_card_says_it_in_html_too():
    card = cards.machine_card(HERE, for_a_gpu="Menu → <GPU>")
    assert "Menu → &lt;GPU&gt;" in card.html


# --- torchao -----------------------------------------------------------------------------------


def venv_over_this_one(folder: Path, *, with_labkit: bool = True) -> Path:
    """Python of a new environment in which what this one has can be imported as well."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, timeout=120)
    [packages] = folder.glob("lib/python*/site-packages")
    paths = [Path(path) for path in sys.path if path.endswith("site-packages")]
    paths = [ROOT, *paths] if with_labkit else [without_labkit(each, folder) for each in paths]
    (packages / "below.pth").write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
    return folder / "bin" / "python"


def without_labkit(packages: Path, folder: Path) -> Path:
    """A folder with links to these packages, without ours."""
    links = Path(tempfile.mkdtemp(dir=folder))
    for each in packages.iterdir():
        if each.name != "labkit" and not each.name.startswith("gpu_memory_lab"):
            (links / each.name).symlink_to(each)
    return links


def empty_wheel(folder: Path, name: str, version: str) -> Path:
    """A package of that name and version with nothing in it."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(
            f"{info}/RECORD", f"{name}/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n"
        )
    return path


def run(python: Path, code: str, *, seconds: int = 300, **variables: str):
    command = [str(python), "-c", textwrap.dedent(code)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env=environment, check=False
    )


REPAIR = f"""
import importlib.metadata
try:
    {textwrap.indent(PEFT, "    ").strip()}
except ImportError as error:
    print("before:", error)
import labkit as lab
lab.start("14")
{PEFT}
try:
    importlib.metadata.version("torchao")
except importlib.metadata.PackageNotFoundError:
    print("after: none")
"""


def test_torchao_that_peft_refuses_is_removed_on_a_lent_machine_alone(tmp_path):
    python = venv_over_this_one(tmp_path / "venv")
    wheel = empty_wheel(tmp_path, "torchao", OLD)
    install = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True, timeout=120)

    own = run(python, REPAIR)
    assert own.returncode != 0  # peft still refuses, as on any machine of one's own
    assert "incompatible version of torchao" in own.stderr
    assert "after" not in own.stdout

    lent = run(python, REPAIR, COLAB_RELEASE_TAG="release")
    assert lent.returncode == 0, lent.stderr
    assert "before: Found an incompatible version of torchao" in lent.stdout
    assert "removed from this borrowed machine" in " ".join(lent.stdout.split())
    assert "after: none" in lent.stdout


def test_nothing_is_removed_that_peft_accepts(monkeypatch):
    monkeypatch.setattr(hosted, "refused_torchao", lambda: "")
    monkeypatch.setattr(hosted.subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    assert hosted.prepare(COLAB) == ""


def test_own_machine_is_not_even_asked(monkeypatch):
    monkeypatch.setattr(hosted, "refused_torchao", lambda: pytest.fail("peft was asked"))
    assert hosted.prepare(HERE) == ""


@pytest.mark.parametrize("how", ["no program", "refuses", "hangs"])
def test_failure_to_remove_is_said(monkeypatch, how):
    def pip(command, **options):
        if how == "no program":
            raise FileNotFoundError("no pip here")
        if how == "hangs":
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, 1, "", "not permitted\n")

    monkeypatch.setattr(hosted, "refused_torchao", lambda: "Found version 0.10.0")
    monkeypatch.setattr(hosted.subprocess, "run", pip)
    said = hosted.prepare(COLAB)
    assert "Found version 0.10.0" in said
    assert "could not be removed" in said
    reasons = {"no program": "no pip here", "refuses": "not permitted", "hangs": "timed out"}
    assert reasons[how] in said


# --- what setup may not touch ------------------------------------------------------------------


def test_colabs_versions_meet_our_floors():
    """Else pip would have to replace what Colab's kernel has loaded, and stops instead."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floors = {
        Requirement(text).name: Requirement(text).specifier for text in project["dependencies"]
    }
    named = pins().keys() & floors.keys()
    assert {"ipython", "ipywidgets", "numpy", "pandas", "transformers"} <= named
    refused = [name for name in named if not floors[name].contains(pins()[name])]
    assert refused == []


# --- with Colab's versions ---------------------------------------------------------------------

lane = pytest.mark.skipif(
    "LABKIT_COLAB" not in os.environ, reason="needs Colab's versions: make test-colab"
)


@lane
def test_versions_are_colabs():
    assert {name: importlib.metadata.version(name) for name in pins()} == pins()


def setup_cell() -> str:
    path = ROOT / "notebooks" / "00_start_here.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    found = [
        each
        for each in cells
        if each["metadata"]["tags"] == ["setup"] and each["cell_type"] == "code"
    ]
    return "".join(found[0]["source"])


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


@lane
def test_setup_cell_installs_labkit_and_leaves_the_others(tmp_path):
    """The cell itself, but for the address: this working copy stands for the repository."""
    python = venv_over_this_one(tmp_path / "venv", with_labkit=False)
    requirement = next(part for part in setup_cell().split('"') if "@ git+https" in part)
    cell = setup_cell().replace(requirement, f"gpu-memory-lab @ {ROOT.as_uri()}")
    folder = tmp_path / "content"
    folder.mkdir()
    done = run(python, INSTALL.format(folder=str(folder), cell=cell), PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr
    before, after, file = json.loads(done.stdout.splitlines()[-1])
    assert after == before
    assert Path(file).is_relative_to(tmp_path / "venv" / "lib")
    kept = (folder / "stays.txt").read_text(encoding="utf-8")
    assert f"ipywidgets=={pins()['ipywidgets']}\n" in kept
    assert "torch==" in kept


@lane
@pytest.mark.timeout(1500)  # a minute on two idle cores; many on busy ones
def test_lessons_run_where_torchao_is_too_old(tmp_path):
    """As on Colab: peft refuses its torchao, the lesson's first cell removes it, LoRA trains."""
    python = venv_over_this_one(tmp_path / "venv")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", f"torchao=={OLD}"]
    subprocess.run(install, check=True, timeout=300)
    before = run(python, PEFT)
    assert "incompatible version of torchao" in before.stderr
    out = tmp_path / "out"
    small = ["-p", "size", "tiny", "-p", "steps", "2", "-p", "batch_size", "2"]
    command = [python, "-m", "labkit.cli", "run", *small, "--out", out, "14", "00"]
    environment = os.environ | {"COLAB_RELEASE_TAG": "release"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1400, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert run(python, PEFT).returncode == 0
