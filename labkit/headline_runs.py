"""Makes one headline run, in a process of its own: ``python -P -m labkit.headline_runs OUT``.

Reads a job (JSON, one line) from standard input, measures each of its recipes beside its
prediction, and writes the record to OUT, whole or not at all. It ends when standard input does:
whoever started it keeps that open, so that no run outlives its recorder.

Exit codes: 0 the record is there; 2 this machine cannot run the job, and the last line of standard
error says why; anything else is an error with its traceback.

Limits: the largest batch is one that fits where the next that was tried does not; each fragments
memory in its own way, so that a larger one may fit now and then. Under a pretended budget the
prediction is for this GPU's kernels with that budget, as the run is. Predicting takes no GPU, and
its time counts as the headline's. On a CPU the run is tracked and the prediction is for this CPU.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from labkit import hardware
from labkit.estimates import estimate
from labkit.headline_records import Entry, Headline, Job
from labkit.measure import measure
from labkit.memory import InputError, Run, format_bytes
from labkit.recipes import MOST_TOKENS, Recipe
from labkit.results import plain, write_atomic
from labkit.simulate import simulate
from labkit.this_gpu import this_card

#: The first two are tracked, the others timed.
STEPS = 6
SEED = 0
#: Sequences: what is looked for is far below.
MOST_SEARCHED = 4096
#: A line through two small batches may point far too high.
GROWTH = 4
CANNOT = 2


def make(job: Job, *, model: Any = None, steps: int = STEPS, tell: Callable = print) -> Headline:
    """Run every recipe of ``job`` on this machine.

    Args:
        job: what to run, and within which budget.
        model: trained in place of the job's: a transformers config, say.
        steps: training steps of each run.
        tell: is given a line for each run.

    Raises:
        InputError: the machine cannot do it: less memory than is pretended, a technique that it
            lacks, a model that is unknown or cannot be trained so.
    """
    started = time.monotonic()
    bench = _Bench(job, job.model if model is None else model, steps, tell)
    bench.check()
    entries = tuple(bench.entry(label, recipe) for label, recipe in job.recipes)
    return Headline(
        job=job,
        entries=entries,
        machine=plain(asdict(hardware.machine())),
        seconds=round(time.monotonic() - started, 3),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


class _Bench:
    def __init__(self, job: Job, model: Any, steps: int, tell: Callable) -> None:
        self.job, self.model, self.steps, self.tell = job, model, steps, tell

    def check(self) -> None:
        """Refuse before anything is measured what could not be measured to its end."""
        with self._within():
            for _, recipe in self.job.recipes:
                recipe.experiment(self.model)
                if hardware.device().type == "cuda":
                    recipe.check(this_card())

    def entry(self, label: str, recipe: Recipe) -> Entry:
        if not self.job.largest_batch:
            predicted, run = self.predict(recipe), self.run(recipe)
            self._say(label, recipe, run, predicted)
            return Entry(label, recipe, run, predicted)
        predictions: dict[int, Run] = {}
        runs: dict[int, Run] = {}

        def predicted_to_fit(batch_size: int) -> bool:
            if batch_size not in predictions:
                predictions[batch_size] = self.predict(recipe.but(batch_size=batch_size))
            return predictions[batch_size].oom is None

        def really_fits(batch_size: int) -> bool:
            runs[batch_size] = self.run(recipe.but(batch_size=batch_size))
            return runs[batch_size].oom is None

        most = min(MOST_SEARCHED, MOST_TOKENS // recipe.seq_len)
        known, guess = 0, 1
        while guess > known and predicted_to_fit(guess):
            line = max(2, self._on_the_line(predictions))
            known, guess = guess, min(line, GROWTH * guess, most)
        line = self._on_the_line(predictions)
        guess = largest(predicted_to_fit, line, most, known=known)
        found = largest(really_fits, guess, most)
        recipe = recipe.but(batch_size=max(found, 1))
        predicted_to_fit(recipe.batch_size)
        run, predicted = runs[recipe.batch_size], predictions[recipe.batch_size]
        self._say(label, recipe, run, predicted)
        tried = tuple((batch, runs[batch].oom is None) for batch in sorted(runs))
        return Entry(label, recipe, run, predicted, tried)

    def _on_the_line(self, predictions: dict[int, Run]) -> int:
        """Memory is close to a straight line in the batch: where that of the two largest predicted
        passes the budget."""
        needed = {batch: max(run.peak_bytes, run.reserved_bytes or 0)
                  for batch, run in predictions.items()}  # fmt: skip
        (x1, y1), (x2, y2) = [(0, 0), *sorted(needed.items())][-2:]
        left_bytes = self.job.budget_bytes - y2
        return x2 + left_bytes * (x2 - x1) // max(y2 - y1, 1)

    def run(self, recipe: Recipe) -> Run:
        torch.manual_seed(SEED)
        with self._within():
            run = measure(recipe.experiment(self.model), steps=self.steps)
        return replace(run, trace=None)

    def predict(self, recipe: Recipe) -> Run:
        """The same recipe simulated, for this GPU or CPU with the job's budget."""
        if hardware.device().type == "cuda":
            card = this_card()
            if self.job.budget_bytes is not None:
                usable_bytes = self.job.budget_bytes + card.context_bytes
                card = replace(card, usable_bytes=usable_bytes)
            run = estimate(self.model, gpu=card, recipe=recipe).run
        else:
            with self._within():
                run = simulate(recipe.experiment(self.model))
        return replace(run, trace=None)

    def _within(self) -> contextlib.AbstractContextManager[Any]:
        return hardware.pretend(budget_bytes=self.job.budget_bytes)

    def _say(self, label: str, recipe: Recipe, run: Run, predicted: Run) -> None:
        outcome = str(run.oom) if run.oom else f"peak {format_bytes(run.peak_bytes)}"
        self.tell(f"{label} ({recipe}): {outcome}, predicted {format_bytes(predicted.peak_bytes)}")


def largest(fits: Callable[[int], bool], start: int, most: int, *, known: int = 0) -> int:
    """The largest batch up to ``most`` that fits; ``known`` if none larger does.

    Where ``start`` is near it, few are tried: two if it is right. ``fits`` is asked of none twice.

    Args:
        fits: whether a batch fits; larger ones need more.
        start: the first to try.
        most: the largest worth trying.
        known: one that fits; 0 if none is known.
    """
    low, high, stride = known, most + 1, 1
    batch = min(max(start, known + 1), most)
    while low + 1 < high:
        if fits(batch):
            low = batch
        else:
            high = batch
        middle = (low + high) // 2
        if high > most:
            batch = min(low + stride, most)
        elif low == known:
            batch = max(high - stride, middle)
        else:
            batch = middle
        stride *= 2
    return low


# --- the process ----------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Make the headline on standard input; returns the exit code."""
    (out,) = sys.argv[1:] if arguments is None else arguments
    job = Job.from_dict(json.loads(sys.stdin.readline()))
    threading.Thread(target=_end_with_the_recorder, daemon=True).start()
    try:
        made = make(job, tell=lambda line: print(line, flush=True))
    except InputError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return CANNOT
    write_atomic(Path(out), json.dumps(made.to_dict(), indent=1, allow_nan=False) + "\n")
    return 0


def _end_with_the_recorder() -> None:
    while os.read(0, 1024):  # not sys.stdin: Python could not end while this thread reads from it
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
