"""Answers to lesson 00's exercises."""

import labkit as lab
from labkit.exercises import lesson_00


def whole_peak_scaled():
    return int(8 * lab.gpu("t4").budget_bytes // lesson_00.t4_run(8).peak_bytes)


def share_of_weights(run):
    return 100 * run.bytes_of("optimizer") / run.bytes_of("weights")


RIGHT = [("00-2", lambda run: 100 * run.by_category["optimizer"] / run.peak_bytes), ("00-3", 20.0)]
MISTAKES = [
    ("00-1", "peak_bytes", "knows it: "),
    ("00-2", lambda run: run.bytes_of("optimizer") / run.peak_bytes, "percent against shares"),
    ("00-2", share_of_weights, "the state over the weights"),
    ("00-3", whole_peak_scaled, "did you scale the whole peak?"),
    ("00-3", 22, "the 16 GB on the box"),
    ("00-3", 27.4, "which way do you round"),
]
