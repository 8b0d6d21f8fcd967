"""The table of benchmarks (``benchmarks.toml``), and what GPUs recorded of them.

`benchmark_worker` runs a benchmark, `labkit record` stores what it gave as
``results/<gpu>/headline-<name>.json``, `recorded` reads the files back.

Limits: a pretended budget caps PyTorch's allocator; the kernels are this GPU's own, and so are
their workspaces and speed.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.course.results import read_folders
from labkit.hardware.catalogue import GPUS
from labkit.recording.benchmark_result import Benchmark, BenchmarkResult
from labkit.support.files import read_file
from labkit.values import InputError, read_record


def _read(table: Mapping[str, Any]) -> Benchmark:
    gpu = GPUS.get(table.get("within", ""))
    pretended = {"within": gpu.name, "budget_bytes": gpu.budget_bytes} if gpu else {}
    return read_record(Benchmark, {**table, **pretended}, "a benchmark")


_FILE = Path(__file__).with_name("benchmarks.toml")
_TABLES = tomllib.loads(_FILE.read_text("utf-8"))["benchmark"]
#: Every benchmark by name.
BENCHMARKS: Mapping[str, Benchmark] = {table["name"]: _read(table) for table in _TABLES}


def load(path: Path | str) -> BenchmarkResult:
    """Read the result stored at ``path``.

    Raises:
        InputError: there is no such file, it is too large, not JSON, not of a benchmark of the
            table, or of another one than its name says.
    """
    path = Path(path)
    found = read_file(path, BenchmarkResult.from_dict, "a benchmark's result")
    benchmark = found.benchmark
    if benchmark.name not in BENCHMARKS or path.name != benchmark.file:
        raise InputError(f"{path} holds {benchmark.name!r}, not the benchmark of that name")
    return found


def recorded(folder: Path | str | None = None) -> dict[str, list[BenchmarkResult]]:
    """Return what each GPU gave, by its key. A broken file is named in a warning and left out.

    Args:
        folder: holds ``<gpu>/headline-<name>.json``; the course's own recordings if None.
    """
    results: dict[str, list[BenchmarkResult]] = {}
    for (gpu, _), found in read_folders(folder, "headline-*.json", load).items():
        results.setdefault(gpu, []).append(found)
    return results
