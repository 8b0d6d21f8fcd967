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


def detached(q, k, v):
    return thrifty(q, k.detach(), v)


def no_graph(q, k, v):
    with torch.no_grad():
        return capped(q, k, v)


RIGHT = [("08-2", changed(thrifty, ("128", "64")))]
MISTAKES = [
    ("08-1", 4096, "a dictionary is asked for"),
    ("08-1", {"eager": 100, "repeated": 8192}, "100 is no multiple of 512"),
    ("08-1", {"eager": 2560, "repeated": 8192}, "eager: 2560 tokens do not fit"),
    ("08-1", {"eager": 1536.0, "repeated": 8192}, "so do 2048"),
    ("08-2", capped, "the target at most"),
    ("08-2", changed(thrifty, CHECKPOINT), "saved of each block"),
    ("08-2", one_block, "How many rows"),
    ("08-2", changed(thrifty, ("cap * torch.tanh(scores / cap)", "scores")), "Check the cap"),
    ("08-2", changed(thrifty, ("triu(start + 1)", "triu(start + 2)")), "which keys"),
    ("08-2", detached, "no gradient of k"),
    ("08-2", no_graph, "has no gradient"),
    ("08-2", lambda q, k, v: thrifty(q, k, v)[:, :1], "has the shape (1, 1, 1024, 32)"),
]
