"""Exercises of lesson 21: batches of limited size, and rows that stay on the disk."""

import math
import pickle
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import torch

from labkit.exercises.checks import Correct, call
from labkit.exercises.engine import check_of
from labkit.values import KIB, format_bytes


def batches(lengths, most_tokens):
    found, batch = [], []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        if batch and (len(batch) + 1) * lengths[number] > most_tokens:
            found.append(batch)
            batch = []
        batch.append(number)
    return [*found, batch]


MOST_PADDING, MOST_BATCHES = 0.1, 1.25


def data_sets() -> list[tuple[list[int], int]]:
    """Return lengths and a limit for several data sets, none of them sorted."""
    random = np.random.default_rng(0)
    chats = random.lognormal(4.6, 0.8, 600).clip(16, 512).astype(int).tolist()
    longest = [*random.integers(20, 250, 300).tolist(), 1024]  # one is as long as the limit
    return [(chats, 2048), (longest[::-1], 1024), ([30, 7] * 300, 300)]


@check_of(
    "21-1",
    batches,
    "Sort the numbers of the texts by length. What is the rectangle if you add the next one?",
    "In sorted order the next text is the longest: with it a batch has "
    "`(len(batch) + 1) * lengths[number]` positions.",
)
def check_batches(answer):
    for lengths, most_tokens in data_sets():
        given = [list(batch) for batch in call(answer, list(lengths), most_tokens)]
        if problem := _wrong_batches(given, lengths, most_tokens):
            return f"For {len(lengths)} texts and at most {most_tokens} tokens: {problem}"
    return None


def _wrong_batches(given: list[list[int]], lengths: list[int], most_tokens: int) -> str | None:
    """Return what is wrong with the batches of one data set."""
    if not all(given):
        return "one of the batches is empty."
    numbers = [number for batch in given for number in batch]
    if sorted(numbers) != list(range(len(lengths))):
        return (
            f"the batches have {len(numbers)} numbers, {len(set(numbers))} of them different. Each "
            f"text's number, from 0 to {len(lengths) - 1}, must be there once."
        )
    sizes = [len(batch) * max(lengths[number] for number in batch) for batch in given]
    if max(sizes) > most_tokens:
        return f"a batch has {max(sizes)} positions. Every row is as long as the longest."
    padding = 1 - sum(lengths) / sum(sizes)
    if padding > MOST_PADDING:
        return f"{padding:.0%} of all positions are padding. Put texts of similar length together."
    most_batches = math.ceil(MOST_BATCHES * sum(lengths) / most_tokens) + 1
    if len(given) > most_batches:
        return f"these are {len(given)} batches; at most {most_batches}. Fill them to the limit."
    return None


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
