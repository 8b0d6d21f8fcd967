"""What conda and Binder build from: made from pyproject.toml, and a start that fits a container."""

import copy
import os
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

from labkit.memory import GIB, MIB, InputError
from labkit.outcomes import Outcome

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
environments = runpy.run_path(str(ROOT / ".ci" / "environments.py"))
lesson_memory = runpy.run_path(str(ROOT / ".ci" / "lesson_memory.py"))
files, table, put = environments["files"], lesson_memory["table"], lesson_memory["put"]


def changed(**values):
    pyproject = copy.deepcopy(PYPROJECT)
    pyproject["project"] |= values
    return files(pyproject)


@pytest.mark.parametrize("name", files(PYPROJECT))
def test_files_are_what_the_generator_makes(name):
    path = ROOT / name
    assert path.read_text(encoding="utf-8") == files(PYPROJECT)[name], "run `make environments`"
    assert bool(path.stat().st_mode & 0o111) == (name in environments["EXECUTABLE"])


def test_another_range_of_torch_or_another_name_makes_other_files():
    requirements = [
        "torch>=2.99,<4" if each.startswith("torch>=") else each
        for each in PYPROJECT["project"]["dependencies"]
    ]
    assert "pytorch-cpu<4,>=2.99\n" in changed(dependencies=requirements)["binder/environment.yml"]
    assert "name: other\n" in changed(name="other")["environment.yml"]


def test_what_pyproject_no_longer_allows_is_refused():
    with pytest.raises(ValueError, match="not within requires-python"):
        changed(**{"requires-python": ">=3.99"})
    with pytest.raises(ValueError, match="no extra dev"):
        changed(**{"optional-dependencies": {"notebooks": []}})
    with pytest.raises(ValueError, match="does not require torch"):
        changed(dependencies=["numpy>=2"])


# --- binder/start --------------------------------------------------------------------------------


def started(**variables):
    """What `binder/start` hands to the server."""
    names = "OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"
    code = f"import os; print(*[os.environ[name] for name in {names}])"
    done = subprocess.run(
        [ROOT / "binder" / "start", "python3", "-c", code],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("limit", "threads"),
    [("1.0", "1"), ("2.0", "2"), ("0.5", "1"), ("16", "16"), ("", "1"), ("no number", "1")],
)
def test_a_container_has_as_many_threads_as_cores(limit, threads):
    assert started(CPU_LIMIT=limit) == [threads, threads]


def test_what_is_set_already_stays():
    assert started() == ["1", "1"]
    assert started(CPU_LIMIT="2", OMP_NUM_THREADS="3") == ["3", "2"]


def test_scripts_of_binder_stop_at_errors_or_become_the_server():
    for name in ("postBuild", "start"):
        path = ROOT / "binder" / name
        assert path.stat().st_mode & 0o111
        subprocess.run(["bash", "-n", path], check=True)
    assert "\nset -euo pipefail\n" in (ROOT / "binder" / "postBuild").read_text(encoding="utf-8")
    assert (ROOT / "binder" / "start").read_text(encoding="utf-8").endswith('\nexec "$@"\n')


# --- the table of lessons' memory ----------------------------------------------------------------


def outcome(name, peak, status="passed"):
    return Outcome(name[:2], name, "A title", status, date="2026-11-22T10:00:00+00:00",
                   host_peak_bytes=peak)  # fmt: skip


def test_the_table_has_the_largest_first_and_names_what_is_too_large():
    small, large = outcome("00_small", 700 * MIB), outcome("14_large", 2 * GIB)
    made = table([small, large], ["00_small", "14_large", "15_later"], 100 * MIB, "A machine")
    assert "A machine, 2026-11-22." in made
    assert "leave 1.90 GiB for a lesson. Over it: 14_large. Not measured yet: 15_later." in made
    rows = re.findall(r"^\| (\d\w+) \| ([^|]+) \| ([^|]+) \|$", made, re.MULTILINE)
    assert rows == [("14_large", "2.00 GiB", "-100 MiB"), ("00_small", "700 MiB", "1.22 GiB")]
    assert "None of these is over it.\n" in table([small], ["00_small"], 100 * MIB, "A machine")


@pytest.mark.parametrize("bad", [outcome("00_a", None), outcome("00_a", MIB, "failed")])
def test_no_peak_is_made_up(bad):
    with pytest.raises(InputError, match="00_a has no peak"):
        table([bad], ["00_a"], MIB, "A machine")


def test_the_table_replaces_the_one_before():
    begin, end = lesson_memory["MARKERS"]
    assert put(f"a\n{begin}\nold\n{end}\nb", "new") == f"a\n{begin}\nnew\n{end}\nb"
    with pytest.raises(InputError, match="must hold"):
        put(f"a {begin}", "new")


def test_the_readme_speaks_of_every_lesson():
    text = (ROOT / "binder" / "README.md").read_text(encoding="utf-8")
    names = {path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")}
    rows = set(re.findall(r"^\| (\d\d_\w+) \|", text, re.MULTILINE))
    without = re.search(r"Not measured yet: ([^.]*)\.", text)
    assert rows
    assert rows ^ set(without[1].split(", ") if without else []) == names
