"""The public names resolve, say what they are, and importing them is cheap."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import labkit

ROOT = Path(labkit.__file__).resolve().parent.parent
HEAVY = ("matplotlib", "ipywidgets", "IPython", "transformers", "papermill", "nbconvert")


def fresh_python(code):
    """Return what ``code`` prints as JSON, in a Python that has imported nothing yet."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", labkit.__all__)
def test_every_public_name_resolves_and_is_documented(name):
    value = getattr(labkit, name)
    assert not inspect.ismodule(value)
    text = inspect.getdoc(value) or ""
    assert len(text.split()) >= 3
    if inspect.isfunction(value):
        assert [p for p in inspect.signature(value).parameters if p not in text] == []


def test_there_are_about_forty_names():
    assert len(labkit.__all__) == len(set(labkit.__all__)) <= 42
    assert set(labkit.__all__) <= set(dir(labkit))


def test_the_page_of_public_names_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / ".ci")
    import api

    assert api.page() == (ROOT / "docs" / "API.md").read_text(encoding="utf-8"), "run `make api`"


def test_importing_labkit_loads_no_library_and_running_loads_few():
    before, after = fresh_python(
        "import labkit\n"
        "before = list(sys.modules)\n"
        "labkit.run, labkit.track, labkit.pretend, labkit.Run\n"
        "print(json.dumps([before, list(sys.modules)]))"
    )
    assert [name for name in ("torch", *HEAVY) if name in before] == []
    assert "torch" in after
    assert [name for name in HEAVY if name in after] == []


def test_a_first_run_reads_few_modules_and_an_estimate_only_what_it_uses():
    """Modules that define what the package consists of; ``__init__`` files are not counted."""
    experiment = "import torch\ndef f(device):\n  yield torch.ones(2, device=device).sum()\n"
    run = fresh_python(f"{experiment}import labkit as lab\nlab.run(f)\n{PRINT_MODULES}")
    assert not {name for name in run if name.startswith(("labkit.show", "labkit.plan"))}
    estimate = fresh_python(
        "import contextlib, io\nfrom labkit.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "  main(['estimate', 'SmolLM2-tiny', '--gpu', 't4'])\n"
        f"{PRINT_MODULES}"
    )
    unused = {"show", "course", "recording", "cheat_sheet", "doctor", "exercises", "distributed"}
    unused |= {"measurement", "dispatch", "toolbox"}
    assert [name for name in estimate if name.split(".")[1] in unused] == []


PRINT_MODULES = "print(json.dumps([m for m in sys.modules if m.startswith('labkit.')]))"
