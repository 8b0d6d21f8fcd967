"""Answers to lesson 02's exercises."""

from exercise_answers.changed import changed

from gpumem.units import MIB
from labkit.exercises.lesson_02 import messy, returned


def every_free_block(segments):
    blocks = [block for segment in segments for block in segment["blocks"]]
    return sum(block["size"] for block in blocks if block["state"] == "inactive")


def what_stays(segments):
    return sum(s["total_size"] for s in segments) - returned(segments)


def by_first_block(segments):
    return sum(s["total_size"] for s in segments if s["blocks"][0]["state"] == "inactive")


def by_last_block(segments):
    return sum(s["total_size"] for s in segments if s["blocks"][-1]["state"] == "inactive")


def by_number_of_blocks(segments):
    return sum(s["total_size"] for s in segments if len(s["blocks"]) == 1)


def whole_free_blocks(segments):
    whole = 0
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] == "inactive" and block["size"] == segment["total_size"]:
                whole += block["size"]
    return whole


def results_last(memory):
    scratch = [memory.allocate(4 * MIB, f"scratch {i}.{j}") for i in range(8) for j in range(4)]
    for i in range(8):
        memory.allocate(4 * MIB, f"result {i}")
    for block in scratch:
        memory.free(block)
    memory.allocate(24 * MIB, "output")


def results_in_between(memory):
    """Together, after four scratch tensors and before the others."""
    scratch = [memory.allocate(4 * MIB, f"scratch 0.{j}") for j in range(4)]
    for i in range(8):
        memory.allocate(4 * MIB, f"result {i}")
    for i in range(1, 8):
        scratch += [memory.allocate(4 * MIB, f"scratch {i}.{j}") for j in range(4)]
    for block in reversed(scratch):
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
RIGHT = [("02-1", whole_free_blocks), ("02-2", results_last), ("02-2", results_in_between)]
MISTAKES = [
    ("02-1", every_free_block, "stranded: a segment goes back as a whole"),
    ("02-1", what_stays, "segments that must stay"),
    ("02-1", by_first_block, "as soon as its first block is free"),
    ("02-1", by_last_block, "of them free"),
    ("02-1", by_number_of_blocks, "of them free"),
    ("02-2", messy, "128 MiB are free in 8 pieces, the largest of 16.0 MiB"),
    ("02-2", changed(messy, EARLY), "free none before all of them are there"),
    ("02-2", changed(messy, *FREED), "result 3 is gone"),
    ("02-2", changed(messy, ("24 * MIB", "24")), "output of 24 B, output of 24.0 MiB"),
]
