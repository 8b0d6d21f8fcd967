"""Answers to lesson 02's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_02 import messy, returned
from labkit.values import MIB


def every_free_block(segments):
    blocks = [block for segment in segments for block in segment["blocks"]]
    return sum(block["size"] for block in blocks if block["state"] == "inactive")


def what_stays(segments):
    return sum(s["total_size"] for s in segments) - returned(segments)


def results_last(memory):
    scratch = [memory.allocate(4 * MIB, f"scratch {i}.{j}") for i in range(8) for j in range(4)]
    for i in range(8):
        memory.allocate(4 * MIB, f"result {i}")
    for block in scratch:
        memory.free(block)
    memory.allocate(24 * MIB, "output")


RESULT = 'memory.allocate(4 * MIB, f"result {i}")'
OUTPUT = 'memory.allocate(24 * MIB, "output")'
EARLY = (
    "    for block in scratch:\n        memory.free(block)\n",
    "        while scratch:\n            memory.free(scratch.pop())\n",
)
FREED = [
    ("scratch = []", "scratch, results = [], []"),
    (RESULT, f"results.append({RESULT})"),
    (OUTPUT, f"memory.free(results[3]); {OUTPUT}"),
]
RIGHT = [("02-2", results_last)]
MISTAKES = [
    ("02-1", every_free_block, "stranded: a segment goes back as a whole"),
    ("02-1", what_stays, "segments that must stay"),
    ("02-2", messy, "128 MiB are free in 8 pieces, the largest of 16.0 MiB"),
    ("02-2", changed(messy, EARLY), "free none before all of them are there"),
    ("02-2", changed(messy, *FREED), "result 3 is gone"),
    ("02-2", changed(messy, ("24 * MIB", "24")), "output of 24 B, output of 24.0 MiB"),
]
