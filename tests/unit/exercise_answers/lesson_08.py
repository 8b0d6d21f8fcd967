"""Answers to lesson 08's exercises."""

import torch
from exercise_answers.changed import changed

from labkit.exercises.lesson_08 import capped, thrifty

CHECKPOINT = (
    "checkpoint(some_rows, *parts, start, use_reentrant=False)",
    "some_rows(*parts, start)",
)


def one_block(q, k, v):
    return torch.utils.checkpoint.checkpoint(capped, q, k, v, use_reentrant=False)


RIGHT = [("08-2", changed(thrifty, ("128", "64")))]
MISTAKES = [
    ("08-1", {"eager": 100, "repeated": 8192}, "100 is no multiple of 512"),
    ("08-1", {"eager": 2560, "repeated": 8192}, "That does not fit"),
    ("08-1", {"eager": 1536.0, "repeated": 8192}, "But 2048 tokens with eager fit, too"),
    ("08-1", {"eager": 2048}, "A length is asked for"),
    ("08-2", capped, "How many rows of scores"),
    ("08-2", changed(thrifty, CHECKPOINT), "saved of each block"),
    ("08-2", one_block, "How many rows"),
    ("08-2", changed(thrifty, ("cap * torch.tanh(scores / cap)", "scores")), "Check the cap"),
    ("08-2", changed(thrifty, ("triu(start + 1)", "triu(start + 2)")), "which keys"),
]
