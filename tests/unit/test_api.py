"""The public names: they resolve, they say what they are, and importing them is cheap."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import labkit

ROOT = Path(labkit.__file__).resolve().parent.parent
HEAVY = (
    "matplotlib", "ipywidgets", "IPython", "transformers", "papermill", "pandas", "nbconvert",
)  # fmt: skip


def fresh_python(code):
    """What ``code`` prints as JSON, in a Python that has imported nothing yet."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", labkit.__all__)
def test_every_public_name_resolves_and_is_documented(name):
    value = getattr(labkit, name)
    assert not inspect.ismodule(value)
    if callable(value):
        text = inspect.getdoc(value) or ""
        assert len(text.split()) >= 3
        assert "." in text
    if inspect.isfunction(value):
        assert [p for p in inspect.signature(value).parameters if p not in text] == []


def test_the_list_is_sorted_out():
    assert len(set(labkit.__all__)) == len(labkit.__all__)
    assert set(labkit.__all__) <= set(dir(labkit))
    for name in ("measure", "simulate", "run", "sweep", "track", "model", "bars", "explore"):
        assert name in labkit.__all__


def test_public_names_stay_what_they_are_when_every_module_is_imported():
    """A module of the same name (labkit.measure) must not put itself in a function's place."""
    modules = fresh_python(
        "import importlib, inspect, json, pkgutil\n"
        "import labkit\n"
        "found = [m.name for m in pkgutil.walk_packages(labkit.__path__, 'labkit.')]\n"
        "for name in found:\n"
        "    importlib.import_module(name)\n"
        "modules = [n for n in labkit.__all__ if inspect.ismodule(getattr(labkit, n))]\n"
        "assert callable(labkit.measure) and callable(labkit.simulate)\n"
        "print(json.dumps([len(found), modules]))"
    )
    assert modules[0] >= 20
    assert modules[1] == []


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'labkit' has no attribute 'mesure'"):
        labkit.mesure  # noqa: B018
    assert not hasattr(labkit, "os")
    with pytest.raises(ImportError):
        from labkit import mesure  # noqa: F401


def test_importing_labkit_loads_no_heavy_library():
    """``labkit.run`` and ``labkit.track`` come without them too."""
    loaded = fresh_python(
        "import json, sys\n"
        "import labkit\n"
        "labkit.run, labkit.sweep, labkit.track, labkit.pretend, labkit.machine, labkit.Run\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    assert "torch" in loaded
    assert [name for name in HEAVY if name in loaded] == []


def test_importing_labkit_costs_little_beyond_torch():
    """At most 0.3 s of processor time more than ``import torch``: the best of a few tries, so that
    a busy machine does not count."""
    code = (
        "import json, time, torch\n"
        "before = time.process_time()\n"
        "import labkit\n"
        "print(json.dumps(time.process_time() - before))"
    )
    for _ in range(5):
        seconds = fresh_python(code)
        if seconds <= 0.3:
            return
    raise AssertionError(f"import labkit took {seconds:.2f} s beyond import torch, five times")
