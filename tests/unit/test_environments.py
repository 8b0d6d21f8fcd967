"""What conda and Binder build from: made from pyproject.toml, and a start that fits a container."""

import os
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

from labkit.course.outcomes import Outcome
from labkit.values import GIB, MIB

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
environments = runpy.run_path(str(ROOT / ".ci" / "environments.py"))
files = environments["files"]
table = runpy.run_path(str(ROOT / ".ci" / "lesson_memory.py"))["table"]


@pytest.mark.parametrize("name", files(PYPROJECT))
def test_files_are_what_the_generator_makes(name):
    path = ROOT / name
    assert path.read_text(encoding="utf-8") == files(PYPROJECT)[name], "run `make environments`"
    assert bool(path.stat().st_mode & 0o111) == (name in environments["EXECUTABLE"])


# --- binder/start --------------------------------------------------------------------------------


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
    done = subprocess.run(
        [ROOT / "binder" / "start", "python3", "-c", code],
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert done.stdout.split() == threads


# --- the table of lessons' memory ----------------------------------------------------------------


def test_the_table_has_the_largest_first_and_names_what_is_too_large():
    date = "2026-11-22T10:00:00+00:00"
    outcomes = [
        Outcome(name[:2], name, "A title", "passed", date=date, host_peak_bytes=peak_bytes)
        for name, peak_bytes in (("00_small", 700 * MIB), ("14_large", 2 * GIB))
    ]
    made = table(outcomes, ["00_small", "14_large", "15_later"], 100 * MIB, "A machine")
    assert "A machine, 2026-11-22." in made
    assert "leave 1.90 GiB for a lesson. Over it: 14_large. Not measured yet: 15_later." in made
    rows = re.findall(r"^\| (\d\w+) \| ([^|]+) \| ([^|]+) \|$", made, re.MULTILINE)
    assert rows == [("14_large", "2.00 GiB", "-100 MiB"), ("00_small", "700 MiB", "1.22 GiB")]


def test_the_readme_speaks_of_every_lesson():
    text = (ROOT / "binder" / "README.md").read_text(encoding="utf-8")
    names = {path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")}
    rows = set(re.findall(r"^\| (\d\d_\w+) \|", text, re.MULTILINE))
    without = re.search(r"Not measured yet: ([^.]*)\.", text)
    assert rows
    assert rows ^ set(without[1].split(", ") if without else []) == names
