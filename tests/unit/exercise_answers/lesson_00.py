"""Answers to lesson 00's exercises."""

import labkit as lab
from labkit.exercises import lesson_00


def all_of_it_scaled():
    return int(8 * lab.gpu("t4").budget_bytes // lesson_00.t4_run(8).reserved_bytes)


def line_through_the_peaks():
    """What fits by its tensors, and not by what is reserved for them."""
    few, many = lesson_00.t4_run(8).peak_bytes, lesson_00.t4_run(16).peak_bytes
    return int(8 + (lab.gpu("t4").budget_bytes - few) / ((many - few) / 8))


def whole_percents(run):
    return round(100 * run.by_category["optimizer"] / run.peak_bytes)


def share_of_weights(run):
    return 100 * run.bytes_of("optimizer") / run.bytes_of("weights")


def twice_the_weights(run):
    """Right for AdamW, whose state is two numbers for each weight."""
    return 200 * run.bytes_of("weights") / run.peak_bytes


RIGHT = [
    ("00-1", whole_percents),
    ("00-1", lambda run: 100 * run.by_category["optimizer"] / run.peak_bytes),
    ("00-2", 21.0),
]
MISTAKES = [
    ("00-1", twice_the_weights, "this run does not"),
    ("00-1", lambda run: run.bytes_of("optimizer") / run.peak_bytes, "percent against shares"),
    ("00-1", share_of_weights, "the state over the weights"),
    ("00-2", all_of_it_scaled, "did you scale all of reserved memory?"),
    ("00-2", line_through_the_peaks, "Reserved memory decides"),
    ("00-2", 27.4, "which way do you round"),
]
