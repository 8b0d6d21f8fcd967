"""Write into binder/README.md how much host memory every lesson takes, and which take too much.

Usage, in the environment that is meant, with nothing else running:

    binder/start labkit run --out build/binder
    python .ci/lesson_memory.py build/binder

The peaks are those that the run sampled, lower bounds. The Jupyter server's own memory is measured
here. Limits: what a browser makes the server do, and a second kernel, come on top; a container
also counts the files that it has just read, which the system gives back where memory runs short.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from labkit.course.lessons import find
from labkit.course.outcomes import Outcome, read_outcomes
from labkit.hardware.this_machine import machine
from labkit.support.processes import descendants, end_group, host_bytes
from labkit.values import GIB, format_bytes

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "binder" / "README.md"
MARKERS = ("<!-- memory: begin -->", "<!-- memory: end -->")
LIMIT_BYTES = 2 * GIB
"""What mybinder.org gives a user: `singleuser.memory.limit` in its published values.yaml."""
SECONDS_TO_SETTLE = 60


def server_bytes() -> int:
    """Return the host memory of an idle JupyterLab, started for this and ended again."""
    command = ["jupyterlab", "--no-browser", "--ServerApp.ip=127.0.0.1", "--allow-root"]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env={**os.environ, "JUPYTER_CONFIG_DIR": folder, "JUPYTER_DATA_DIR": folder},
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            time.sleep(SECONDS_TO_SETTLE)
            if process.poll() is not None:
                raise SystemExit("jupyter lab did not start")
            return host_bytes([psutil.Process(process.pid), *descendants(process)])
        finally:
            end_group(process)


def table(outcomes: Sequence[Outcome], lessons: Iterable[str], server: int, where: str) -> str:
    """Return the peaks as Markdown, the largest first, and which of ``lessons`` have none.

    Args:
        outcomes: of lessons that passed, on a machine where their memory can be sampled.
        lessons: names of all lessons.
        server: bytes of the idle server.
        where: the machine and versions.
    """
    left = LIMIT_BYTES - server
    peaks = sorted(outcomes, key=lambda each: -each.host_peak_bytes)
    over = [each.name for each in peaks if each.host_peak_bytes > left]
    said = f"Over it: {', '.join(over)}." if over else "None of these is over it."
    if missing := sorted(set(lessons) - {each.name for each in outcomes}):
        said += f" Not measured yet: {', '.join(missing)}."
    return "\n".join(
        [
            f"{where}, {max(each.date for each in outcomes)[:10]}.",
            f"{format_bytes(LIMIT_BYTES)} less the idle server's {format_bytes(server)} leave "
            f"{format_bytes(left)} for a lesson. {said}",
            "",
            "| lesson | peak of host memory | to spare |",
            "| --- | ---: | ---: |",
            *(
                f"| {each.name} | {each.host_peak} | {format_bytes(left - each.host_peak_bytes)} |"
                for each in peaks
            ),
        ]
    )


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="what `labkit run --out` wrote into")
    outcomes = [each for each in read_outcomes(parser.parse_args().folder) if each.passed]
    lessons = [lesson.name for lesson in find()]
    here = machine()
    versions = ", ".join(f"{name} {here.versions[name]}" for name in ("python", "torch"))
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    where = f"{here.name}, {versions}, threads: {threads}"
    before, begin, rest = README.read_text(encoding="utf-8").partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    made = table(outcomes, lessons, server_bytes(), where)
    README.write_text(f"{before}{begin}\n{made}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
