"""Answers to lesson 21's exercises."""

import math

import numpy as np

from labkit.exercises.lesson_21 import Thrifty, hungry


def rounded(load, step, batch, worker, budget):
    return min(int(load / step + 0.5) or 1, budget // (worker + 2 * batch))


def batches_forgotten(load, step, batch, worker, budget):
    return min(math.ceil(load / step), budget // worker)


def all_that_fit(load, step, batch, worker, budget):
    return budget // (worker + 2 * batch)


class Mapped(Thrifty):
    """Opens the file for every row."""

    def __getitem__(self, row):
        ids = np.memmap(self.path, np.uint16, "r").reshape(-1, 4096)
        return ids[row].astype(np.int64)


class KeepsTheMap(Thrifty):
    """Opens the file once and keeps it: light here, heavy on the way to a worker."""

    ids = None

    def __getitem__(self, row):
        if self.ids is None:
            self.ids = np.memmap(self.path, np.uint16, "r").reshape(-1, 4096)
        return self.ids[row].astype(np.int64)


class WrongOffset(Thrifty):
    def __getitem__(self, row):
        return np.fromfile(self.path, np.uint16, 4096, offset=4096 * row).astype(np.int64)


RIGHT = [("21-2", Mapped)]
MISTAKES = [
    ("21-1", rounded, "load_seconds=0.40625, step_seconds=0.125"),
    ("21-1", batches_forgotten, "Count the batches that wait, too"),
    ("21-1", all_that_fit, "Fewer deliver as much"),
    ("21-2", hungry, "held for a file of 8.00 MiB"),
    ("21-2", KeepsTheMap, "travels as its *contents*"),
    ("21-2", WrongOffset, "is not the one in the file"),
]
