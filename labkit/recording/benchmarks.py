"""The benchmarks (``benchmarks.toml``), and what a GPU gave for one.

`benchmark_worker` runs a benchmark, `labkit record` stores what it gave as
``results/<gpu>/headline-<name>.json``.

Limits: a pretended budget caps PyTorch's allocator; the kernels are this GPU's own, and so are
their workspaces and speed. The weights are random, so losses show that training works and no more;
where batches accumulate, a step's loss is that of its last batch.
"""

import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from labkit.course.results import (
    Date,
    MachineFields,
    Recorded,
    Seconds,
    impossible,
    plain,
    read_folders,
    read_run,
)
from labkit.hardware.catalogue import GPUS
from labkit.plan.recipe import Recipe
from labkit.recording.accuracy import error_percent
from labkit.runs import Run
from labkit.support.files import read_file
from labkit.values import InputError, read_record

Text = Annotated[str, Meta(max_length=300)]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What to run, and what for.

    Attributes:
        name: of its file and on the command line.
        shows: what it shows, in a sentence.
        model: a model of the table, or a folder with a ``config.json``.
        recipes: (label, recipe) pairs, run one after the other.
        within: name of the GPU whose memory is pretended; "" for all of this one.
        budget_bytes: what PyTorch's allocator may take; None without a limit.
        largest_batch: look for the largest batch that fits, in place of the recipe's own.
    """

    name: Text
    shows: Text
    model: Text
    recipes: Annotated[tuple[tuple[Text, Recipe], ...], Meta(min_length=1, max_length=40)]
    within: Text = ""
    budget_bytes: Annotated[int, Meta(ge=1, le=1 << 50)] | None = None
    largest_batch: bool = False

    @property
    def file(self) -> str:
        """The name of its file in ``results/<gpu>/``."""
        return f"headline-{self.name}.json"


@dataclass(frozen=True)
class Entry:
    """What one recipe of a benchmark gave.

    ``recipe`` has the batch that ran; ``predicted`` is its simulation for the same GPU and budget.
    """

    label: Text
    recipe: Recipe
    run: Run
    predicted: Run

    def __post_init__(self) -> None:
        problems = impossible(self.run) + impossible(self.predicted)
        if self.run.mode == "simulated" or self.predicted.mode != "simulated":
            problems.append("it needs a run, and a simulation as its prediction")
        computes = self.run.mode != "phantom" and self.recipe.ranks == 1  # of several, one is there
        if self.fitted and computes and not self.run.losses:
            problems.append("it has no losses")
        if problems:
            raise InputError(f"{self.label!r}: {problems[0]}")

    @property
    def fitted(self) -> bool:
        """Whether it ran without running out of memory."""
        return self.run.oom is None

    @property
    def peak_error_percent(self) -> float | None:
        """By how much the predicted peak is too high; None for a run that did not fit."""
        return error_percent(self.predicted.peak_bytes, self.run.peak_bytes if self.fitted else 0)

    @property
    def reserved_error_percent(self) -> float | None:
        """The same of the reserved bytes; None where nothing is reserved."""
        reserved_bytes = self.run.reserved_bytes if self.fitted else None
        return error_percent(self.predicted.reserved_bytes, reserved_bytes)

    @property
    def tokens_per_second(self) -> float | None:
        """Of the median timed step: neither the first nor a tracked one; None if none was timed."""
        seconds = statistics.median(self.run.step_seconds) if self.run.step_seconds else 0
        return self.recipe.tokens / seconds if seconds else None


@dataclass(frozen=True)
class BenchmarkResult(Recorded):
    """What one GPU gave for one benchmark, an entry for each of its recipes."""

    benchmark: Benchmark
    entries: tuple[Entry, ...]
    machine: MachineFields
    seconds: Seconds
    date: Date
    schema: Literal[2] = 2

    def __post_init__(self) -> None:
        if [each.label for each in self.entries] != [label for label, _ in self.benchmark.recipes]:
            raise InputError("entries must be those of the benchmark's recipes, in their order")

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        record = asdict(self)
        for entry, stored in zip(self.entries, record["entries"], strict=True):
            stored["run"], stored["predicted"] = entry.run.to_dict(), entry.predicted.to_dict()
        return plain(record)

    @classmethod
    def from_dict(cls, record: Any) -> "BenchmarkResult":
        """Read back what ``to_dict`` wrote; an `InputError` names what is wrong or impossible."""
        if isinstance(record, Mapping) and isinstance(record.get("entries"), list):
            record = {**record, "entries": [_with_runs(entry) for entry in record["entries"]]}
        return read_record(cls, record, "a benchmark's result")


def _with_runs(entry: Any) -> Any:
    """Return the record of an entry with its two runs read."""
    if not isinstance(entry, Mapping):
        return entry
    names = {"run", "predicted"} & set(entry)
    return {**entry, **{name: read_run(entry[name]) for name in names}}


# --- the table --------------------------------------------------------------------------------


def _read(table: Mapping[str, Any]) -> Benchmark:
    gpu = GPUS.get(table.get("within", ""))
    pretended = {"within": gpu.name, "budget_bytes": gpu.budget_bytes} if gpu else {}
    return read_record(Benchmark, {**table, **pretended}, "a benchmark")


_FILE = Path(__file__).with_name("benchmarks.toml")
_TABLES = tomllib.loads(_FILE.read_text("utf-8"))["benchmark"]
#: Every benchmark by name.
BENCHMARKS: Mapping[str, Benchmark] = {table["name"]: _read(table) for table in _TABLES}


def load(path: Path | str) -> BenchmarkResult:
    """Read the result at ``path``; it must be of the benchmark that the file is named after."""
    path = Path(path)
    found = read_file(path, BenchmarkResult.from_dict, "a benchmark's result")
    benchmark = found.benchmark
    if benchmark.name not in BENCHMARKS or path.name != benchmark.file:
        raise InputError(f"{path} holds {benchmark.name!r}, not the benchmark of that name")
    return found


def recorded(folder: Path | str | None = None) -> dict[str, list[BenchmarkResult]]:
    """Return what each GPU gave, by its key, as `read_folders` reads it."""
    results: dict[str, list[BenchmarkResult]] = {}
    for (gpu, _), found in read_folders(folder, "headline-*.json", load).items():
        results.setdefault(gpu, []).append(found)
    return results
