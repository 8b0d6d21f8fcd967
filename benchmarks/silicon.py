"""Held to silicon: what others measured on real GPUs, and published, against the phantom.

    make silicon                                                       # all that runs here
    .venv-phantom/bin/python benchmarks/silicon.py --source liger      # one source
    .venv-phantom/bin/python benchmarks/silicon.py --held              # what runs at night
    .venv-phantom/bin/python benchmarks/silicon.py --update            # write docs/SILICON.md, too

`silicon.csv` holds the published figures with their sources, and what the phantom said. Of two
sources this command runs the code as its authors published it: Liger-Kernel's benchmark scripts at
the commit of each row, and ``scripts/measure.py`` of fitcheck-llm's source package. Repositories
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
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpumem.files import cache_folder
from gpumem.processes import end_group
from gpumem.units import MIB

HERE = Path(__file__).resolve().parent
RECORD = HERE / "silicon.csv"
PAGE = HERE.parent / "docs" / "SILICON.md"
MARKERS = ("<!-- silicon: begin -->", "<!-- silicon: end -->")
PROGRESS = HERE.parent / "build" / "silicon"
SECONDS = 240.0  # that one script may take

#: Remarks that a figure of today ends.
PASSED = ("not run", "CRASH", "product fault", "fault of the phantom of then")

Row = dict[str, str]

GPUS = {
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA B200": "b200",
    "Tesla T4": "t4",
}
#: What a row needs in front of the phantom's own environment, by pip without what it asks for.
RELEASES = {
    "transformers 4.44": ("transformers==4.44.2", "tokenizers==0.19.1", "huggingface_hub==0.24.7"),
    "transformers 4.48": ("transformers==4.48.3", "tokenizers==0.21.4", "huggingface_hub==0.36.2"),
    "transformers 4.57": ("transformers==4.57.6", "tokenizers==0.22.2", "huggingface_hub==0.36.2"),
    "transformers 5.0": (
        *("transformers==5.0.0", "tokenizers==0.22.2", "huggingface_hub==1.5.0"),
        "peft==0.19.1",
    ),
    "transformers 5.17": ("transformers==5.17.0", "huggingface_hub==1.5.0", "peft==0.20.0"),
    "megatron-core 0.16": ("megatron-core==0.16.1",),
    "torch 2.10": ("torch==2.10.0", "nvidia-cuda-runtime-cu12==12.8.90"),
}
LIGER, FITCHECK = "Liger-Kernel", "fitcheck-llm"
LIGER_PATHS = ("benchmark/scripts", "src", "test/*.py")
#: Scripts whose kernels have other names than they.
LIGER_SCRIPTS = {
    "fused_linear_orpo_loss": "orpo_loss",
    "fused_linear_cpo_loss": "cpo_loss",
    "fused_linear_simpo_loss": "simpo_loss",
    "fused_linear_grpo_loss_token": "grpo_loss",
    "fused_linear_grpo_loss_sequence": "grpo_loss",
    "tiled_geglu": "tiled_mlp",
    "tiled_swiglu": "tiled_mlp",
}
#: Liger-Kernel imports models of the transformers of its time; newer ones lack what it asks for.
OLD_TRANSFORMERS = {
    "b5672a153b": "transformers 4.44",
    "90fb5e4a3c": "transformers 4.48",
    "a307eac8b0": "transformers 4.48",
    "6817c2d34d": "transformers 4.48",
    "ff6650bbce": "transformers 4.48",
    "6b2fd02d57": "transformers 4.48",
    "16d06edf4f": "transformers 4.48",
    "ebd5303530": "transformers 4.48",
    "aa2d23dc7f": "transformers 4.48",
    "ee5aaf26b9": "transformers 4.48",
}
#: By how much a compared row may differ, per source and kind: a share of it, or so many bytes. Of a
#: 4-bit model the threads that load race, on the T4, too.
BOUNDS = {
    (LIGER, "allocated"): (0.0002, 2 * MIB),
    (FITCHECK, "allocated", "none"): (0.0, 0),
    (FITCHECK, "reserved", "none"): (0.0, 8 * MIB),
    (FITCHECK, "allocated", "nf4"): (0.005, 0),
    (FITCHECK, "reserved", "nf4"): (0.08, 0),
}
#: What is run at night: kernels and models that take seconds.
HELD = re.compile(r"^(cross_entropy|geglu|swiglu|\w*norm|relu_squared|tvd|kl_div) |SmolLM2-135M")


class Job(NamedTuple):
    """Rows that one process of theirs answers.

    Attributes:
        rows: the rows.
        gpu: the phantom.
        releases: of `RELEASES`, what lies in front of the environment.
        folder: their code.
        words: what Python runs, before what a source adds.
        cases: what it reads from standard input.
    """

    rows: list[Row]
    gpu: str
    releases: tuple[str, ...]
    folder: Path
    words: list[str]
    cases: str = ""


def liger_jobs(rows: list[Row], sources: Path | None) -> Iterator[Job]:
    """Yield one job for each benchmark script, commit and GPU."""

    def place(row: Row) -> tuple[str, str, str]:
        kernel = row["case"].split()[0]
        return row["commit"], row["gpu"], LIGER_SCRIPTS.get(kernel, kernel)

    for (commit, gpu, script), group in groupby(sorted(rows, key=place), place):
        here = list(group)
        folder = checkout("linkedin/Liger-Kernel", commit, LIGER_PATHS, sources)
        release = (OLD_TRANSFORMERS.get(commit, "transformers 4.57"),)
        if script.startswith("megatron"):
            release += ("megatron-core 0.16",)
        cases = [_liger_case(row) for row in here]
        words = [str(HERE / "liger.py"), str(folder), f"benchmark_{script}.py"]
        yield Job(here, GPUS[gpu], release, folder, words, json.dumps(cases))


def _liger_case(row: Row) -> dict[str, Any]:
    kernel, provider, mode, x = row["case"].split()
    config, _ = json.JSONDecoder().raw_decode(row["settings"])
    value = float(x.partition("=")[2])
    x_value = int(value) if value.is_integer() else value
    return {"kernel": kernel, "provider": provider, "mode": mode, "x": x_value, "config": config}


def fitcheck_jobs(rows: list[Row], sources: Path | None) -> Iterator[Job]:
    """Yield one job for each way of training that the T4 measured; rows that repeat it share it."""

    def way(row: Row) -> str:
        return row["case"].partition(" run ")[0] + row["settings"]

    for _, group in groupby(sorted(rows, key=way), way):
        here = list(group)
        asked = json.loads(here[0]["settings"])
        folder = package("fitcheck-llm", "0.3.1", sources)
        words = f"-m labkit phantom --gpu t4 --json {folder}/scripts/measure.py {asked['model']} "
        words += "--gpu t4 --precision fp16 --lora-r 32 --grad-checkpoint --json --no-predict "
        words += f"--quant {asked['storage']} --batch-size {asked['batch_size']} "
        words += f"--seq-len {asked['seq_len']}"
        words += " --flash-attn --attn-impl sdpa" if asked["attention"] == "sdpa" else ""
        release = "transformers " + asked["transformers"].rpartition(".")[0]
        yield Job(here, "t4", ("torch 2.10", release), folder, words.split())


JOBS = {LIGER: liger_jobs, FITCHECK: fitcheck_jobs}
NAMES = {"liger": LIGER, "t4": FITCHECK}


def checkout(repository: str, commit: str, paths: tuple[str, ...], sources: Path | None) -> Path:
    """Return a folder with the named paths of a repository at a commit."""
    name = repository.replace("/", "--")
    clone = (sources or cache_folder() / "clones") / name
    if not clone.exists():
        url = f"https://github.com/{repository}"
        subprocess.run(["git", "clone", "--quiet", "--bare", url, str(clone)], check=True)
    folder = cache_folder() / "sources" / f"{name}-{commit[:8]}-held"
    if not (folder / ".complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        index = dict(os.environ, GIT_INDEX_FILE=str(folder / ".index"))
        at = ["--git-dir", str(clone / ".git" if (clone / ".git").is_dir() else clone)]
        take = ["git", *at, "--work-tree", str(folder), "checkout", "--quiet", commit, "--", *paths]
        subprocess.run(take, env=index, cwd=folder, check=True)
        (folder / ".complete").touch()
    return folder


def package(name: str, version: str, sources: Path | None) -> Path:
    """Return the unpacked source package of a release."""
    folder = (sources or cache_folder() / "packages") / f"{name.replace('-', '_')}-{version}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _pip("download", "--no-binary", ":all:", "--dest", str(folder.parent), f"{name}=={version}")
        with tarfile.open(f"{folder}.tar.gz") as archive:
            archive.extractall(folder.parent, filter="data")
    return folder


def release(name: str) -> Path:
    """Return the folder with a release, installed if it has to be."""
    folder = cache_folder() / "releases" / name.replace(" ", "-")
    if not (folder / ".complete").exists():
        _pip("install", "--target", str(folder), *RELEASES[name])
        (folder / ".complete").touch()
    return folder


def _pip(*words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", words[0], "-qq", "--no-deps", *words[1:]], check=True
    )


def answers(job: Job) -> Iterator[tuple[Row, int | str]]:
    """Run a job; yield each row with its bytes, or with why it has none."""
    before = [release(name) for name in reversed(job.releases)]
    paths = map(str, [*before, HERE.parent, job.folder])
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    phantom = [] if job.words[:2] == ["-m", "labkit"] else ["-m", "phantom_gpu", job.gpu]
    command = [sys.executable, *phantom, *job.words]
    with TemporaryFile("w+") as cases, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        cases.write(job.cases)
        cases.seek(0)
        process = subprocess.Popen(
            command, env=variables, stdin=cases, stdout=out, stderr=err, start_new_session=True
        )
        try:
            process.wait(SECONDS)
            late = ""
        except subprocess.TimeoutExpired:
            late = f"\nended after {SECONDS:.0f} s"
        finally:
            end_group(process)
        out.seek(0), err.seek(0)
        said, errors = out.read(), err.read() + late
    found: dict[int, int | str] = {}
    if job.cases:
        found = dict(json.loads(line) for line in said.splitlines() if line.startswith("["))
    else:  # the report is on standard output, what the script prints beside it
        for number, row in enumerate(job.rows):
            if peak := re.search(rf'"peak_{row["kind"]}_mib": ([\d.]+)', errors):
                found[number] = round(float(peak[1]) * MIB)
    last = (errors.strip().splitlines() or ["it said nothing"])[-1][:120]
    for number, row in enumerate(job.rows):
        answer = found.get(number, last)
        yield row, answer if isinstance(answer, int) else f"not run: {answer}"


def run(rows: list[Row], asked: argparse.Namespace) -> None:
    """Run the rows and write what was found into them; go on where an earlier run was killed."""
    PROGRESS.mkdir(parents=True, exist_ok=True)
    progress = PROGRESS / f"{asked.source or 'all'}.jsonl"
    lines = progress.read_text().splitlines() if progress.exists() else []
    done = {_key(row): row for row in map(json.loads, lines)}
    for row in rows:
        row.update(done.get(_key(row), {}))
    left = [row for row in rows if _key(row) not in done]
    for source, jobs in JOBS.items():
        for job in jobs([row for row in left if row["source"] == source], asked.sources):
            for row, found in answers(job):
                if isinstance(found, int):
                    version = release(job.releases[0]) / "torch" / "version.py"
                    row |= {"bytes": str(found), "torch": _torch(version), "phantom": job.gpu}
                    row["remark"] = "" if row["remark"].startswith(PASSED) else row["remark"]
                else:  # a figure of an earlier comparison stays, and is shown as such
                    row |= {"bytes": "" if row["torch"] else row["bytes"], "remark": found}
                with progress.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{row['source']} {row['case']} {row['kind']}: {shown(row)}", flush=True)
    progress.unlink(missing_ok=True)


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("source", "commit", "case", "settings", "gpu", "kind"))


def _torch(version: Path) -> str:
    """Return the version in a file of PyTorch's, or that of this environment."""
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


def beyond(row: Row) -> bool:
    """Say whether a row that was run and is compared differs by more than its bound."""
    share = error(row)
    if share is None or row["reason"] or not row["torch"]:
        return False
    key = (row["source"], row["kind"])
    if row["source"] == FITCHECK:
        key += (json.loads(row["settings"])["storage"],)
    most, most_bytes = BOUNDS[key]
    return abs(share) * int(row["published_bytes"]) > max(
        most * int(row["published_bytes"]), most_bytes
    )


def table(rows: list[Row]) -> str:
    """Return the statistics by source and kind as Markdown: all rows first, then those compared."""
    spread = ["median", "95th percentile", "worst"]
    heads = ["source", "what", "run", "rows", "no figure", *spread, "not comparable", *spread]
    lines = [_cells(heads), _cells(["---"] * 3 + ["---:"] * 9)]

    def kind(row: Row) -> tuple[str, str, str]:
        storage = re.search(r'"storage": "(\w+)"', row["settings"])
        what = row["kind"] + (f", {storage[1]}" if storage else "")
        by = "earlier" if row["bytes"] else "not run"
        return row["source"], what, f"PyTorch {row['torch']}" if row["torch"] else by

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
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    PAGE.write_text(f"{before}{begin}\n{page(rows)}\n{end}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", choices=NAMES, help="run one source")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="where sources lie")
    parser.add_argument("--only", default="", metavar="REGEX", help="what matches in its case")
    parser.add_argument("--held", action="store_true", help="run what is held at night")
    parser.add_argument("--update", action="store_true", help="record the results")
    asked = parser.parse_args()
    rows = read()
    recorded = {_key(row): row["bytes"] for row in rows}
    wanted = [
        row
        for row in rows
        if row["source"] in ([NAMES[asked.source]] if asked.source else JOBS)
        and re.search(asked.only, row["case"])
        and (not asked.held or (HELD.search(row["case"]) and row["torch"] and not row["reason"]))
    ]
    run(wanted, asked)
    wrong = [row for row in wanted if beyond(row) or not row["bytes"]]
    wrong = [row for row in wrong if row["bytes"] != recorded[_key(row)]]
    changed = [row for row in wanted if row["torch"] and row["bytes"] != recorded[_key(row)]]
    for row in wrong:
        print(f"beyond its bound: {row['source']} {row['case']} {row['kind']}: {shown(row)}")
    print(f"{len(wanted)} rows, {len(wrong)} beyond their bound, {len(changed)} not as recorded")
    if asked.update:
        found = {_key(row): row for row in wanted}
        write([found.get(_key(row), row) for row in read()])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
