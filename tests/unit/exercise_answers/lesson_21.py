"""Answers to lesson 21's exercises."""

import numpy as np

from labkit.exercises.lesson_21 import Thrifty, batches, hungry


def longest_first(lengths, most_tokens):
    """Fills a batch from the longest text on, which sets its rectangle at once."""
    found = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if found and (len(found[-1]) + 1) * lengths[found[-1][0]] <= most_tokens:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def as_arrays(lengths, most_tokens):
    return [np.array(batch) for batch in batches(lengths, most_tokens)]


def without_padding(lengths, most_tokens):
    found, tokens = [[]], 0
    for number in np.argsort(lengths):
        if tokens + lengths[number] > most_tokens:
            found, tokens = [*found, []], 0
        found[-1].append(int(number))
        tokens += lengths[number]
    return found


def unsorted(lengths, most_tokens):
    found = [[]]
    for number in range(len(lengths)):
        rows = [*found[-1], number]
        if len(rows) * max(lengths[row] for row in rows) > most_tokens:
            found.append([])
        found[-1].append(number)
    return found


def one_each(lengths, most_tokens):
    return [[number] for number in range(len(lengths))]


def last_one_lost(lengths, most_tokens):
    return batches(lengths, most_tokens)[:-1]


def lengths_themselves(lengths, most_tokens):
    return [[lengths[number] for number in batch] for batch in batches(lengths, most_tokens)]


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


RIGHT = [("21-1", longest_first), ("21-1", as_arrays), ("21-2", Mapped)]
MISTAKES = [
    ("21-1", without_padding, "Every row is as long as the longest"),
    ("21-1", unsorted, "Put texts of similar length together"),
    ("21-1", one_each, "Fill them to the limit"),
    ("21-1", last_one_lost, "must be there once"),
    ("21-1", lengths_themselves, "must be there once"),
    ("21-1", lambda lengths, most: [*batches(lengths, most), []], "one of the batches is empty"),
    ("21-2", hungry, "held for a file of 8.00 MiB"),
    ("21-2", KeepsTheMap, "travels as its *contents*"),
    ("21-2", WrongOffset, "is not the one in the file"),
]
