"""Exercises of lesson 21: workers within a host-memory budget, and rows that stay on the disk."""

import math
import pickle
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import torch

from labkit.exercises.checks import Correct, call, expect_results
from labkit.exercises.engine import check_of
from labkit.values import GIB, KIB, MIB, format_bytes


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


@check_of(
    "21-1",
    workers,
    "w workers deliver w batches per load_seconds. How many can the GPU use in that time?",
    "`math.ceil(load_seconds / step_seconds)` is enough. One worker takes "
    "`worker_bytes + 2 * batch_bytes`: how many of them does the budget hold?",
)
def check_workers(answer):
    return expect_results(answer, workers, JOBS, slips=_slips, rel_tolerance=0)


def _slips(load_seconds, step_seconds, batch_bytes, worker_bytes, budget_bytes):
    enough = math.ceil(load_seconds / step_seconds)
    return {
        round(load_seconds / step_seconds): "The GPU could use a part of one more worker.",
        budget_bytes // (worker_bytes + 2 * batch_bytes): "Fewer deliver as much: the GPU cannot "
        "use more than one batch per step.",
        min(enough, budget_bytes // worker_bytes): "Count the batches that wait, too: that is over "
        "the budget.",
    }


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


@check_of(
    "21-2",
    Thrifty,
    "A class with `__init__(self, path)`, `__len__` and `__getitem__(self, row)` is a "
    "dataset. What is the least that it has to remember?",
    "`np.fromfile(path, np.uint16, 4096, offset=2 * 4096 * row)` reads one row. "
    "`np.memmap(path, np.uint16, 'r')` works too, if `__getitem__` opens it.",
)
def check_thrifty(answer):
    rows = np.random.default_rng(0).integers(0, 1 << 16, (1024, ROW)).astype(np.uint16)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "ids.bin"
        rows.tofile(path)
        tracemalloc.start()
        try:
            data = call(answer, str(path))
            problem = _wrong_rows(data, rows)
            _, held_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        sent_bytes = 0 if problem else len(pickle.dumps(data))
    if problem:
        return problem
    if held_bytes > LARGEST_SHARE * rows.nbytes:
        return (
            f"The rows are right, but up to {format_bytes(held_bytes)} were held for a file of "
            f"{format_bytes(rows.nbytes)}. Who needs more than one row at a time?"
        )
    if sent_bytes > LARGEST_PICKLE:
        return (
            f"A worker that is started afresh would be sent {format_bytes(sent_bytes)}: an open "
            "`memmap` travels as its *contents*. Open the file where the row is read."
        )
    return Correct(
        f"That is right: {format_bytes(held_bytes)} held, {sent_bytes} bytes for each worker."
    )


def _wrong_rows(data, rows):
    """Return what is wrong with the length of ``data``, or with a row."""
    if len(data) != len(rows):
        return f"The file holds {len(rows)} rows of {ROW} numbers; yours has {len(data)}."
    # Shuffled, as a sampler asks: a dataset that only reads on is found out.
    for number in np.random.default_rng(1).permutation(len(rows)).tolist():
        row = torch.as_tensor(data[number])
        if row.dtype != torch.int64:
            return f"Row {number} is of {row.dtype}; `int64` is asked for, as ids are."
        if not np.array_equal(row.numpy(), rows[number].astype(np.int64)):
            return f"Row {number} is not the one in the file. Mind the offset: it counts bytes."
    return None
