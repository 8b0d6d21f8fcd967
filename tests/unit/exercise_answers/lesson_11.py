"""Answers to lesson 11's exercises."""

from functools import partial

import torch
from exercise_answers.changed import changed
from torch._functorch import config as partitioner
from torch.utils.checkpoint import checkpoint

from labkit.exercises.lesson_11 import frugal

KEEP_NOTHING = ("budget = 0.5", "budget = 0")
NO_PRODUCT_TWICE = ("budget = 0.5", "budget = 0.75")
NOT_COMPILED = ('        block.compile(backend="aot_eager_decomp_partition")\n', "        pass\n")


def checkpointed(blocks):
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return blocks


def compiled(blocks):
    partitioner.activation_memory_budget = 0.5
    return [torch.compile(block, backend="aot_eager_decomp_partition") for block in blocks]


RIGHT = [
    ("11-2", compiled),
    ("11-2", changed(frugal, ("budget = 0.5", "budget = 0.3"))),
    ("11-2", changed(frugal, ('backend="aot_eager_decomp_partition"', "dynamic=False"))),
]
MISTAKES = [
    ("11-1", 18, "two bytes, not four"),
    ("11-1", 4.5, "one row"),
    ("11-1", 9 / 32, "one layer"),
    ("11-1", 7, "The norm drops a tensor, too"),
    ("11-1", 16, "stays at the default"),
    ("11-1", 9.664, "in GB"),
    ("11-2", changed(frugal, NOT_COMPILED), "what does backward still find"),
    ("11-2", changed(frugal, NO_PRODUCT_TWICE), "what does backward still find"),
    ("11-2", changed(frugal, KEEP_NOTHING), "what is computed twice"),
    ("11-2", checkpointed, "what is computed twice"),
    ("11-2", lambda blocks: blocks[:4], "it should still be"),
]
