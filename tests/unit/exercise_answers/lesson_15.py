"""Answers to lesson 15's exercises. The real model takes seconds, so few of its mistakes run."""

import torch

from labkit.exercises.lesson_15 import roomy


def one_of_the_rows(device, batch_size=8, seq_len=512, dtype=torch.bfloat16, steps=2):
    yield from roomy(device, batch_size // 8, seq_len, dtype, steps)


MISTAKES = [
    ("15-1", 13_631_488, "How many bytes does each"),
    ("15-1", 54_525_952, "Those are the adapters themselves"),
    ("15-1", 109_051_904, "state alone"),
    ("15-1", 268_435_456, "not 4096"),
    ("15-2", roomy, "Does every layer have to keep"),
    ("15-2", one_of_the_rows, "loss at step 1"),
]
