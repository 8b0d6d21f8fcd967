"""Exercises of lesson 20: workers within a host-memory budget, and rows that stay on the disk."""

import math
import pickle
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import torch

from labkit.claims import plain_value
from labkit.exercises import Exercise
from labkit.exercises.checks import Feedback, NotAttempted, call, quote
from labkit.memory import GIB, KIB, MIB, format_bytes

# --- 1: as fast as possible within a host-memory budget ------------------------------------------


def workers(load_seconds, step_seconds, batch_bytes, worker_bytes, budget_bytes):
    enough = math.ceil(load_seconds / step_seconds)  # more would wait for the GPU
    affordable = budget_bytes // (worker_bytes + 2 * batch_bytes)
    return min(enough, affordable)


# (load_seconds, step_seconds, batch_bytes, worker_bytes, budget_bytes)
JOBS = (
    (0.5, 0.125, 32 * MIB, 300 * MIB, 16 * GIB),  # as many as the GPU can use
    (0.4375, 0.125, 32 * MIB, 300 * MIB, 16 * GIB),  # three and a half are four
    (0.40625, 0.125, 32 * MIB, 300 * MIB, 16 * GIB),  # and so are three and a quarter
    (0.5, 0.125, 600 * MIB, 300 * MIB, 4 * GIB),  # the waiting batches are what costs
    (0.5, 0.125, 1 * MIB, 3 * GIB, 8 * GIB),  # each worker has its copy of the data
    (0.0625, 0.125, 1 * MIB, 300 * MIB, 16 * GIB),  # one is enough
    (0.5, 0.125, 1 * MIB, 3 * GIB, 2 * GIB),  # not even one
)


def check_workers(answer):
    for job in JOBS:
        given, right = call(answer, *job), workers(*job)
        value, problem = plain_value(given)
        if problem or isinstance(value, bool):
            return f"A whole number of workers is asked for; you return {quote(given)}."
        if value != right:
            return f"{_job_text(*job)}: you return {value:g}. {_worker_advice(value, *job)}"
    return None


def _job_text(load_seconds, step_seconds, batch_bytes, worker_bytes, budget_bytes):
    return (
        f"A batch of {format_bytes(batch_bytes)} takes {load_seconds:g} s to load, a step "
        f"{step_seconds:g} s, a worker owns {format_bytes(worker_bytes)}, the budget is "
        f"{format_bytes(budget_bytes)}"
    )


def _worker_advice(value, load_seconds, step_seconds, batch_bytes, worker_bytes, budget_bytes):
    """Why ``value`` is not the number of workers for this job."""
    taken_bytes = value * (worker_bytes + 2 * batch_bytes)
    if value < 0 or value != int(value):
        return "Workers are processes: a whole number, and 0 if none can be afforded."
    if taken_bytes > budget_bytes:
        waiting = value * worker_bytes <= budget_bytes
        which = "Count the batches that wait, too" if waiting else "That is over the budget"
        return f"{which}: they take {format_bytes(taken_bytes)} together."
    if value * step_seconds >= load_seconds:
        return "Fewer deliver as much: the GPU cannot use more than one batch per step."
    return "More workers would deliver more, the GPU could use it, and the budget allows it."


# --- 2: rows that stay on the disk ---------------------------------------------------------------

ROW = 4096  # ids
LARGEST_SHARE, LARGEST_PICKLE = 0.1, 64 * KIB


def hungry(path):
    """The dataset that the notebook shows: every row in memory, as a list of Python's numbers."""
    ids = np.fromfile(path, np.uint16).reshape(-1, 4096)
    return [row.tolist() for row in ids]


class Thrifty:
    def __init__(self, path):
        self.path = path  # all that it holds, and all that a worker is sent

    def __len__(self):
        return Path(self.path).stat().st_size // (2 * 4096)

    def __getitem__(self, row):
        ids = np.fromfile(self.path, np.uint16, 4096, offset=2 * 4096 * row)
        return torch.from_numpy(ids.astype(np.int64))


def check_thrifty(answer):
    rows = np.random.default_rng(0).integers(0, 1 << 16, (1024, ROW)).astype(np.uint16)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "ids.bin"
        rows.tofile(path)
        return _watch(answer, path, rows)


def _watch(answer, path, rows):
    """What is wrong with the dataset that ``answer`` opens; None or praise if nothing is."""
    traced = tracemalloc.is_tracing()  # by somebody else, who goes on
    if not traced:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before_bytes, _ = tracemalloc.get_traced_memory()
    try:
        data = call(answer, str(path))
        problem = _wrong_rows(data, rows)
        held_bytes = tracemalloc.get_traced_memory()[1] - before_bytes
    finally:
        if not traced:
            tracemalloc.stop()
    most_bytes = int(LARGEST_SHARE * rows.nbytes)
    if problem:
        return problem
    if held_bytes > most_bytes:
        return (
            f"The rows are right, but up to {format_bytes(held_bytes)} were held for a file of "
            f"{format_bytes(rows.nbytes)}; at most {format_bytes(most_bytes)} may be. Who needs "
            "more than one row at a time?"
        )
    return _too_heavy(data) or Feedback(
        True,
        f"That is right: {format_bytes(held_bytes)} held for {format_bytes(rows.nbytes)} of rows, "
        f"{len(pickle.dumps(data))} bytes for each worker.",
    )


def _wrong_rows(data, rows):
    """Whether ``data`` has another length than ``rows``, or another row somewhere."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        return f"A dataset has a length and rows by number; yours is {quote(data)}."
    if len(data) != len(rows):
        return f"The file holds {len(rows)} rows of {ROW} numbers; yours has {len(data)}."
    # Shuffled, as a sampler asks: a dataset that only reads on is found out.
    for number in np.random.default_rng(1).permutation(len(rows)).tolist():
        row = data[number]
        if row is None or row is ...:
            raise NotAttempted("`__getitem__` returns nothing yet. Let it return the row.")
        row = torch.as_tensor(row)
        if row.dtype != torch.int64:
            return f"Row {number} is of {row.dtype}; `int64` is asked for, as ids are."
        if not np.array_equal(row.numpy(), rows[number].astype(np.int64)):
            return f"Row {number} is not the one in the file. Mind the offset: it counts bytes."
    return None


def _too_heavy(data):
    """Whether a worker that is started afresh would be sent too much."""
    try:
        nbytes = len(pickle.dumps(data))
    except Exception as error:  # pickling runs the learner's code; what it says is the answer
        what = f"{type(error).__name__}: {error}"
        return f"It cannot be sent to a worker that is started afresh ({what})."
    if nbytes <= LARGEST_PICKLE:
        return None
    return (
        f"In this process it is light enough. But a worker that is started afresh would be sent "
        f"{format_bytes(nbytes)} of it: an open `memmap` travels as its *contents*. Keep the path, "
        "and open the file where the row is read."
    )


EXERCISES = (
    Exercise(
        "20-1",
        question="How many workers, for the most batches per second within the budget?",
        hints=(
            "w workers deliver w batches per load_seconds. How many can the GPU use in that time?",
            "`math.ceil(load_seconds / step_seconds)` is enough. One worker takes "
            "`worker_bytes + 2 * batch_bytes`: how many of them does the budget hold?",
        ),
        solution=workers,
        check=check_workers,
        kind="function",
    ),
    Exercise(
        "20-2",
        question="The same rows, a tenth of the file in memory, next to nothing for a worker.",
        hints=(
            "A class with `__init__(self, path)`, `__len__` and `__getitem__(self, row)` is a "
            "dataset. What is the least that it has to remember?",
            "`np.fromfile(path, np.uint16, 4096, offset=2 * 4096 * row)` reads one row. "
            "`np.memmap(path, np.uint16, 'r')` works too, if `__getitem__` opens it.",
        ),
        solution=Thrifty,
        check=check_thrifty,
        kind="function",
    ),
)
