"""The public names resolve, say what they are, and importing them is cheap."""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import api_page
import pytest

import gpumem
import labkit

ROOT = Path(labkit.__file__).resolve().parent.parent
HEAVY = ("matplotlib", "ipywidgets", "IPython", "transformers", "papermill", "nbconvert")
#: Only lessons or certain recipes need them.
UNUSED_BY_ESTIMATES = (
    *("IPython", "ipywidgets", "jupyter_client", "jupyter_core", "matplotlib", "nbformat"),
    *("papermill", "pandas", "datasets", "peft", "gguf", "bitsandbytes"),
)


def fresh_python(code):
    """Return what ``code`` prints as JSON, in a Python that has imported nothing yet."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{code}"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", labkit.__all__)
def test_every_public_name_resolves_and_is_documented(name):
    value = getattr(labkit, name)
    assert not inspect.ismodule(value)
    text = inspect.getdoc(value) or ""
    assert len(text.split()) >= 3
    if inspect.isfunction(value):
        assert [p for p in inspect.signature(value).parameters if p not in text] == []


def test_no_module_takes_the_place_of_a_public_name():
    """Importing ``labkit.x`` makes ``x`` an attribute of ``labkit``."""
    for package in (gpumem, labkit):
        modules = {path.stem for path in (ROOT / package.__name__).iterdir()}
        assert modules.isdisjoint(package.__all__)


def test_the_page_of_public_names_has_each_with_its_docstring():
    page = api_page.page()
    names = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    assert sorted(names) == sorted(labkit.__all__)
    for name in names:
        first = inspect.getdoc(getattr(labkit, name)).splitlines()[0]
        assert first.replace("``", "`") in page


WITHOUT_EXTRAS = """
from importlib.machinery import PathFinder
hidden = {"transformers", "peft", "bitsandbytes", "accelerate", "huggingface_hub", "matplotlib",
          "safetensors", "tokenizers", "pandas", "datasets", "IPython", "ipywidgets"}
class Hides(PathFinder):
    @classmethod
    def find_spec(cls, name, *where):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, *where)
sys.meta_path[:] = [Hides if finder is PathFinder else finder for finder in sys.meta_path]
import gpumem, torch
def experiment(device):
    net = torch.nn.Linear(64, 64, device=device)
    while True:
        yield net(torch.ones(8, 64, device=device)).sum()
run = gpumem.simulate(experiment, gpu="t4")
from labkit.cli.main import main
code = main(["estimate", "SmolLM2-135M", "--gpu", "t4"])
print(json.dumps([run.by_category["weights"], gpumem.measure(experiment).peak_bytes > 0, code]))
"""


def test_gpumem_works_without_its_extras_and_the_command_names_the_one_it_needs(capfd):
    assert fresh_python(WITHOUT_EXTRAS) == [4 * 65 * 64, True, 2]
    assert (
        "transformers is missing: pip install 'gpu-memory-lab[estimate]'" in capfd.readouterr().err
    )


def test_importing_labkit_loads_no_library_a_run_and_an_estimate_only_what_they_use():
    before, after, estimated = fresh_python("""
import labkit as lab
before = list(sys.modules)
import torch
def experiment(device):
    yield torch.ones(2, device=device).sum()
lab.run(experiment)
after = list(sys.modules)
from labkit.cli.main import main
main(["estimate", "SmolLM2-135M", "--gpu", "t4"])
print(json.dumps([before, after, list(sys.modules)]))
""")
    assert [name for name in ("torch", *HEAVY) if name in before] == []
    assert [name for name in HEAVY if name in after] == ["transformers"]
    assert not {name for name in after if name.startswith(("gpumem.figures", "gpumem.estimation"))}
    assert {*UNUSED_BY_ESTIMATES}.isdisjoint(estimated)
