"""Held to silicon: what others measured on real GPUs, and published, against the phantom.

    make silicon                                                       # all that runs here
    .venv-phantom/bin/python benchmarks/silicon.py --source liger      # one source
    .venv-phantom/bin/python benchmarks/silicon.py --held              # what runs at night
    .venv-phantom/bin/python benchmarks/silicon.py --update            # write docs/SILICON.md, too

`silicon.csv` holds the published figures with their sources, and what the phantom said. Of the
sources in `sources.SOURCES` this command runs the code as its authors published it. Repositories
are cloned, packages installed aside in the releases that a row needs; ``--sources DIR`` names a
folder with clones as ``owner--name`` and with unpacked packages. A run that is killed goes on where
it was.

A row is compared unless the record says why it cannot be; then it is listed all the same. Nothing
is fitted to rows. What differs from the phantom's own environment stands in `RELEASES`: libraries
of the time, since models are their code, and for the T4 PyTorch 2.10, which takes the free block
with the lower address. Its first session follows that rule, too, though it is labelled 2.14.

Limits: figures of the other sources are those of an earlier comparison, and marked so.
Liger-Kernel's rows were published from 2024 to 2026 with the PyTorch of the day, and run with ours.
"""

import argparse
import csv
import importlib.metadata
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from threading import Lock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.pages import write_between
from benchmarks.sources import OF, SOURCES, Job, Row, release, what
from gpumem.processes import end_group

HERE = Path(__file__).resolve().parent
RECORD = HERE / "silicon.csv"
PAGE = HERE.parent / "docs" / "SILICON.md"
PROGRESS = HERE.parent / "build" / "silicon"
CORE_SECONDS = 1800  # that one script may compute
SECONDS = 3600.0  # that it may take, on a machine that others use, too

INSTALLING = Lock()

#: Remarks that a figure of today ends.
PASSED = ("not run", "CRASH", "product fault", "fault of the phantom of then")

#: What is run at night: kernels, models and workers that take seconds.
HELD = re.compile(
    r"^Liger-Kernel (cross_entropy|geglu|swiglu|\w*norm|relu_squared|tvd|kl_div) "
    r"|SmolLM2-135M|^nanoVLM batch (?!4$)|^FakeGPU (3090Ti |0.8B lora s16|Qwen3)|^litgpt lora phi"
    r"|^optimum-benchmark .* 1 x"
)


def answers(job: Job) -> list[tuple[Row, int | str]]:
    """Run a job; return each row with its bytes, or with why it has none."""
    with INSTALLING:
        before = [release(name) for name in reversed(job.releases)]
    paths = map(str, [*before, HERE.parent, job.folder])
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    command = ["prlimit", f"--cpu={CORE_SECONDS}:", sys.executable, "-m", "phantom_gpu", job.gpu]
    with TemporaryFile("w+") as cases, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        cases.write(json.dumps(job.cases))
        cases.seek(0)
        process = subprocess.Popen(
            [*command, *job.words],
            env=variables,
            stdin=cases,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            computed = process.wait(SECONDS) == -signal.SIGXCPU
            late = f"\nended after {CORE_SECONDS} s of a core" if computed else ""
        except subprocess.TimeoutExpired:
            late = f"\nended after {SECONDS:.0f} s"
        finally:
            end_group(process)
        out.seek(0), err.seek(0)
        said, errors = out.read(), err.read() + late
    if job.printed is None:
        found = dict(json.loads(line) for line in said.splitlines() if line.startswith("["))
    else:
        matches = (re.search(job.printed(row), said + errors, re.M) for row in job.rows)
        found = {n: round(float(m[1]) * job.unit_bytes) for n, m in enumerate(matches) if m}
    last = (errors.strip() or said.strip() or "it said nothing").splitlines()[-1][:120]
    figures = [found.get(number, last) for number in range(len(job.rows))]
    figures = [n if isinstance(n, int) or n == "OOM" else f"not run: {n}" for n in figures]
    return list(zip(job.rows, figures, strict=True))


def run(rows: list[Row], asked: argparse.Namespace) -> None:
    """Run the rows and write what was found into them; go on where an earlier run was killed."""
    PROGRESS.mkdir(parents=True, exist_ok=True)
    progress = PROGRESS / f"{asked.source or 'all'}.jsonl"
    lines = progress.read_text().splitlines() if progress.exists() else []
    done = {_key(row): row for row in map(json.loads, lines)}
    for row in rows:
        row.update(done.get(_key(row), {}))
    left = [row for row in rows if _key(row) not in done]
    jobs = [job for source in SOURCES.values() for job in source.jobs(left, asked.sources)]
    with ThreadPoolExecutor(asked.jobs) as pool:
        for job, found in zip(jobs, pool.map(answers, jobs), strict=True):
            for row, figure in found:
                if isinstance(figure, int) or figure == row["published_bytes"]:
                    row |= {"bytes": str(figure), "torch": _torch(job), "phantom": job.gpu}
                    row["remark"] = "" if row["remark"].startswith(PASSED) else row["remark"]
                else:  # a figure of an earlier comparison stays, and is shown as such
                    row |= {"bytes": "" if row["torch"] else row["bytes"], "remark": figure}
                with progress.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{row['source']} {row['case']} {row['kind']}: {shown(row)}", flush=True)
    progress.unlink(missing_ok=True)


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("source", "commit", "case", "settings", "gpu", "kind"))


def _torch(job: Job) -> str:
    """Return the version of PyTorch in front of the environment, or that of the environment."""
    for version in (release(name) / "torch" / "version.py" for name in job.releases):
        if version.exists():
            return re.search(r"__version__ = '([^+']+)", version.read_text())[1]
    return importlib.metadata.version("torch").partition("+")[0]


def error(row: Row) -> float | None:
    """Return the phantom's error as a share of what was published; None without two figures."""
    if not (row["bytes"].isdigit() and row["published_bytes"].isdigit()):
        return None
    return int(row["bytes"]) / int(row["published_bytes"]) - 1


def shown(row: Row) -> str:
    """Return a row's error as people read it."""
    share = error(row)
    return row["remark"] if share is None else f"{share:+.4%}"


def held(row: Row) -> bool:
    """Say whether a row is run at night."""
    named = HELD.search(f"{row['source']} {row['case']}")
    return bool(named and row["torch"] and not row["reason"])


def beyond(row: Row) -> bool:
    """Say whether a row that was run and is compared differs by more than its bound."""
    share = error(row)
    if share is None or row["reason"] or not row["torch"]:
        return False
    most, most_bytes = OF[row["source"]].bounds[what(row)]
    return abs(share) * int(row["published_bytes"]) > max(
        most * int(row["published_bytes"]), most_bytes
    )


def table(rows: list[Row]) -> str:
    """Return the statistics by source and kind as Markdown: all rows first, then those compared."""
    spread = ["median", "95th percentile", "worst"]
    heads = ["source", "what", "run", "rows", "no figure", *spread, "not comparable", *spread]
    lines = [_cells(heads), _cells(["---"] * 3 + ["---:"] * 9)]

    def kind(row: Row) -> tuple[str, str, str]:
        by = "earlier" if row["bytes"] else "not run"
        return row["source"], what(row), f"PyTorch {row['torch']}" if row["torch"] else by

    for key, group in groupby(sorted(rows, key=kind), kind):
        here = list(group)
        with_figures = [row for row in here if error(row) is not None]
        compared = [row for row in with_figures if not row["reason"]]
        missing = len(here) - len(with_figures)
        apart = sum(1 for row in here if row["reason"])
        cells = [*key, str(len(here)), str(missing), *_statistics(with_figures)]
        lines.append(_cells([*cells, str(apart), *_statistics(compared)]))
    return "\n".join(lines)


def reasons(rows: list[Row]) -> str:
    """Return what is not comparable or was not run, by reason, as Markdown."""
    found = defaultdict(list)
    for row in rows:
        if row["reason"] or error(row) is None:
            found[row["source"], row["reason"] or row["remark"]].append(row)
    lines = [_cells(["source", "rows", "why", "errors"]), _cells(["---", "---:", "---", "---:"])]
    for (source, why), group in sorted(found.items()):
        shares = [share for share in map(error, group) if share is not None]
        span = f"{min(shares):+.1%} to {max(shares):+.1%}" if shares else "–"
        lines.append(_cells([source, str(len(group)), why, span]))
    return "\n".join(lines)


def _statistics(rows: list[Row]) -> list[str]:
    shares = sorted(abs(error(row)) for row in rows)
    if not shares:
        return ["–"] * 3
    at_95 = shares[min(len(shares) - 1, round(0.95 * len(shares)))]
    return [f"{share:.3%}".replace("%", " %") for share in (median(shares), at_95, shares[-1])]


def _cells(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def page(rows: list[Row]) -> str:
    """Return what stands between the page's markers."""
    lines = [_cells(["beyond its bound", "GPU", "error", "remark"]), _cells(["---"] * 4)]
    for row in filter(beyond, rows):
        case = f"{row['source']}, {row['case']}, {row['kind']}"
        lines.append(_cells([case, row["gpu"], shown(row), row["remark"]]))
    return "\n\n".join([table(rows), reasons(rows), "\n".join(lines)])


def read() -> list[Row]:
    with RECORD.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(rows: list[Row]) -> None:
    """Write the record and the page."""
    with RECORD.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    write_between(PAGE, "silicon", page(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", choices=SOURCES, help="run one source")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="where sources lie")
    parser.add_argument("--only", default="", metavar="REGEX", help="what matches in its case")
    parser.add_argument("--held", action="store_true", help="run what is held at night")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes at a time")
    parser.add_argument("--update", action="store_true", help="record the results")
    asked = parser.parse_args()
    rows = read()
    recorded = {_key(row): row["bytes"] for row in rows}
    wanted = [
        row
        for row in rows
        if row["source"] in ([SOURCES[asked.source].name] if asked.source else OF)
        and re.search(asked.only, row["case"])
        and (not asked.held or held(row))
    ]
    run(wanted, asked)
    wrong = [row for row in wanted if beyond(row) or not row["bytes"]]
    wrong = [row for row in wrong if row["bytes"] != recorded[_key(row)]]
    changed = [row for row in wanted if row["torch"] and row["bytes"] != recorded[_key(row)]]
    for row in wrong:
        print(f"beyond its bound: {row['source']} {row['case']} {row['kind']}: {shown(row)}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{len(wanted)} rows, {len(wrong)} beyond their bound, {len(changed)} not as recorded")
    print(f"{used.ru_utime + used.ru_stime:.0f} seconds of a core")
    if asked.update:
        found = {_key(row): row for row in wanted}
        write([found.get(_key(row), row) for row in read()])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
