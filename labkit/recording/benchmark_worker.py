"""Run one benchmark: ``python -P -m labkit.recording.benchmark_worker BENCHMARK OUT``.

Measures each recipe of BENCHMARK (a record as JSON) beside its prediction.

Exit codes: 0 the result is written; 2 this machine cannot run the benchmark, and the last line of
standard error says why; anything else is an error with its traceback.

Limits: the largest batch is one that fits where the next does not; each fragments memory in its own
way, so that a larger one may fit now and then. On a CPU the run is tracked.
"""

import bisect
import contextlib
import json
import sys
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from labkit.course.results import plain
from labkit.fake.process_group import one_of
from labkit.hardware import this_machine
from labkit.measurement import measure
from labkit.plan.estimate import estimate
from labkit.plan.recipe import MOST_TOKENS, Recipe
from labkit.plan.training import training
from labkit.recording.benchmarks import Benchmark, BenchmarkResult, Entry
from labkit.runs import Run
from labkit.simulation import simulate
from labkit.support.files import write_atomic
from labkit.values import InputError, read_record

#: On a GPU: the first two are tracked, the others timed.
STEPS = 6
#: On a phantom, which times nothing, and needs no tracker: it would lay some blocks elsewhere.
PHANTOM_STEPS = 3
SEED = 0
#: Largest batch of a search, far above any that fits.
MOST_SEARCHED = 4096
#: Exit code where this machine cannot run the benchmark.
CANNOT = 2


def run_benchmark(benchmark: Benchmark) -> BenchmarkResult:
    """Run every recipe of ``benchmark``; an `InputError` says why this machine cannot do it."""
    started = time.monotonic()
    entries = []
    for label, recipe in benchmark.recipes:
        if benchmark.largest_batch:
            entry = _largest_batch(benchmark, label, recipe)
        else:
            predicted = _predict(benchmark, recipe)
            entry = Entry(label, recipe, _run(benchmark, recipe), predicted)
        entries.append(entry)
    return BenchmarkResult(
        benchmark=benchmark,
        entries=tuple(entries),
        machine=plain(asdict(this_machine.machine())),
        seconds=round(time.monotonic() - started, 3),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _largest_batch(benchmark: Benchmark, label: str, recipe: Recipe) -> Entry:
    """Search by simulation first, then step by step from there with real runs."""
    runs: dict[int, Run] = {}

    def predict(batch_size: int) -> Run:
        return _predict(benchmark, recipe.but(batch_size=batch_size))

    def fits(batch_size: int) -> bool:
        if batch_size not in runs:
            runs[batch_size] = _run(benchmark, recipe.but(batch_size=batch_size))
        return runs[batch_size].oom is None

    most = min(MOST_SEARCHED, MOST_TOKENS // recipe.seq_len)
    batches = range(1, most + 1)
    fitting = bisect.bisect_left(batches, True, key=lambda batch: predict(batch).oom is not None)
    batch_size = max(fitting, 1)
    while batch_size < most and fits(batch_size):
        batch_size += 1
    while batch_size > 1 and not fits(batch_size):
        batch_size -= 1
    fits(batch_size)
    recipe = recipe.but(batch_size=batch_size)
    return Entry(label, recipe, runs[batch_size], _predict(benchmark, recipe))


def _run(benchmark: Benchmark, recipe: Recipe) -> Run:
    torch.manual_seed(SEED)
    phantom = this_machine.machine().phantom
    steps = PHANTOM_STEPS if phantom else STEPS
    with _within_budget(benchmark), one_of(recipe.ranks):
        run = measure(training(benchmark.model, recipe), steps=steps, track=not phantom)
    if recipe.ranks > 1:  # the others send nothing
        run = replace(run, losses=(), step_seconds=())
    return replace(run, trace=None)


def _predict(benchmark: Benchmark, recipe: Recipe) -> Run:
    """Simulate the recipe for this GPU or CPU, with the benchmark's budget."""
    if _on_gpu():
        gpu = this_machine.this_gpu()
        if benchmark.budget_bytes is not None:
            gpu = replace(gpu, usable_bytes=benchmark.budget_bytes + gpu.context_bytes)
        run = estimate(benchmark.model, gpu=gpu, recipe=recipe).run
    else:
        with _within_budget(benchmark):
            run = simulate(training(benchmark.model, recipe))
    return replace(run, trace=None)


def _on_gpu() -> bool:
    return this_machine.device().type == "cuda"


def _within_budget(benchmark: Benchmark) -> contextlib.AbstractContextManager[Any]:
    return this_machine.pretend(budget_bytes=benchmark.budget_bytes)


def main(record: str, out: str) -> int:
    """Run the benchmark ``record`` and write its result to ``out``; return the exit code."""
    benchmark = read_record(Benchmark, json.loads(record), "a benchmark")
    try:
        result = run_benchmark(benchmark)
    except InputError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return CANNOT
    write_atomic(Path(out), json.dumps(result.to_dict(), indent=1, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
