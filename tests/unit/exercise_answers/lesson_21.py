"""Answers to lesson 21's exercises."""

import numpy as np
from exercise_answers.changed import changed

from labkit.exercises.lesson_21 import batches, most_positions


def shortest_first(lengths, budget_bytes, fixed, linear, square):
    """Fills a batch from the shortest text on: the newest sets what a row takes."""
    found, batch = [], []
    for number in np.argsort(lengths):
        row_bytes = linear * lengths[number] + square * lengths[number] ** 2
        if batch and fixed + (len(batch) + 1) * row_bytes > budget_bytes:
            found, batch = [*found, batch], []
        batch = [*batch, number]
    return [*found, np.array(batch)]


def in_tokens(lengths, budget_bytes, fixed, linear, square):
    """The lesson's limit in tokens, chosen so that the longest texts fit."""
    most_tokens = (budget_bytes - fixed) / (linear + square * max(lengths))
    return batches(lengths, most_tokens, 0, 1, 0)


def without_padding(lengths, budget_bytes, fixed, linear, square):
    found, taken = [[]], fixed
    for number in np.argsort(lengths):
        row_bytes = linear * lengths[number] + square * lengths[number] ** 2
        if taken + row_bytes > budget_bytes:
            found, taken = [*found, []], fixed
        found[-1].append(int(number))
        taken += row_bytes
    return found


def unsorted(lengths, budget_bytes, fixed, linear, square):
    found = [[]]
    for number in range(len(lengths)):
        rows = [*found[-1], number]
        longest = max(lengths[row] for row in rows)
        if fixed + len(rows) * (linear * longest + square * longest**2) > budget_bytes:
            found.append([])
        found[-1].append(number)
    return found


def one_each(lengths, *model):
    return [[number] for number in range(len(lengths))]


def last_one_lost(lengths, *model):
    return batches(lengths, *model)[:-1]


def lengths_themselves(lengths, *model):
    return [[lengths[number] for number in batch] for batch in batches(lengths, *model)]


def in_proportion(first, second, budget_bytes):
    return budget_bytes * first[0] // first[1]


RIGHT = [("21-2", shortest_first)]
MISTAKES = [
    ("21-1", in_proportion, "Not all of the peak grows"),
    ("21-1", changed(most_positions, ("budget_bytes - fixed", "budget_bytes")), "need a part"),
    ("21-1", changed(most_positions, ("budget_bytes - fixed", "budget_bytes - peak")), "*beside*"),
    ("21-1", changed(most_positions, ("math.floor", "math.ceil")), "the last one no longer fits"),
    ("21-1", lambda *job: most_positions(*job) - 1, "and so does one more"),
    ("21-1", changed(most_positions, ("math.floor", "float")), "The right answer is less"),
    ("21-2", in_tokens, "Fill them to the budget"),
    ("21-2", changed(batches, ("fixed + (len", "(len")), "Is every term there"),
    ("21-2", changed(batches, (" + square * longest**2", "")), "Is every term there"),
    ("21-2", without_padding, "Is every term there"),
    ("21-2", unsorted, "Put texts of similar length together"),
    ("21-2", one_each, "Fill them to the budget"),
    ("21-2", last_one_lost, "must be there once"),
    ("21-2", lengths_themselves, "must be there once"),
    (
        "21-2",
        lambda lengths, *model: [*batches(lengths, *model), []],
        "one of the batches is empty",
    ),
]
