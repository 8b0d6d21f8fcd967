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
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from labkit.course.lessons import default_folder, find
from labkit.course.outcomes import Outcome, read_outcomes
from labkit.hardware.this_machine import machine
from labkit.support.processes import descendants, end_group, host_bytes
from labkit.values import GIB, InputError, format_bytes

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "binder" / "README.md"
MARKERS = ("<!-- memory: begin -->", "<!-- memory: end -->")
LIMIT_BYTES = 2 * GIB
"""What mybinder.org gives a user: `singleuser.memory.limit` in its published values.yaml."""
SECONDS_TO_SETTLE = 5


def server_bytes() -> int:
    """Host memory of an idle JupyterLab, started for this and ended again.

    Raises:
        InputError: it did not start.
    """
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.ip=127.0.0.1"]
    starter = f"import subprocess; subprocess.run({command!r} + ['--allow-root'])"
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-c", starter],
            cwd=folder,
            env={**os.environ, "JUPYTER_CONFIG_DIR": folder, "JUPYTER_DATA_DIR": folder},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        watchdog = threading.Timer(180, end_group, [process])
        watchdog.start()
        try:
            if not any("is running at" in line for line in process.stderr):
                raise InputError("jupyter lab did not start")
            threading.Event().wait(SECONDS_TO_SETTLE)
            return host_bytes(descendants(process))
        finally:
            watchdog.cancel()
            end_group(process)


def table(outcomes: Sequence[Outcome], lessons: Iterable[str], server: int, where: str) -> str:
    """The peaks as Markdown, the largest first; of ``lessons``, which have none is said.

    Raises:
        InputError: a lesson did not pass, or its memory was not sampled.
    """
    for outcome in outcomes:
        if not outcome.passed or outcome.host_peak_bytes is None:
            raise InputError(f"{outcome.name} has no peak of a run that passed: run it again")
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


def put(text: str, made: str) -> str:
    """``text`` with ``made`` between the markers.

    Raises:
        InputError: a marker is missing.
    """
    before, begin, rest = text.partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not begin or not end:
        raise InputError(f"{README.name} must hold {MARKERS[0]} and {MARKERS[1]}")
    return f"{before}{begin}\n{made}\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="what `labkit run --out` wrote into")
    try:
        outcomes = read_outcomes(parser.parse_args().folder)
        lessons = [lesson.name for lesson in find(folder=default_folder())]
        here = machine()
        versions = ", ".join(f"{name} {here.versions[name]}" for name in ("python", "torch"))
        threads = os.environ.get("OMP_NUM_THREADS", "all")
        where = f"{here.name}, {versions}, threads: {threads}"
        README.write_text(
            put(
                README.read_text(encoding="utf-8"), table(outcomes, lessons, server_bytes(), where)
            ),
            encoding="utf-8",
        )
    except InputError as error:
        print(error, file=sys.stderr)
        return 1
    print(README)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
