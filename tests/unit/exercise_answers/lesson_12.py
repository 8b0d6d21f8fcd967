"""Answers to lesson 12's exercises."""

import torch
from exercise_answers.changed import changed
from torch.nn import functional

from labkit.exercises.lesson_12 import loss_of

KEPT = ("checkpoint(part, *piece, use_reentrant=False)", "part(*piece)")
MEANS = [('"sum"', '"mean"'), ("total / len(labels)", "total / len(hidden.split(128))")]


def from_torch(hidden, weight, labels):
    options = torch.nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(hidden, weight, labels, options=options)


RIGHT = [("12-2", changed(loss_of, (".float()", "")))]  # the text asks for no format of the logits
if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # since 2.13
    RIGHT.append(("12-2", from_torch))

MISTAKES = [
    ("12-1", 62, "round up"),
    ("12-1", 64, "One less"),
    ("12-1", 16, "holds four"),
    ("12-1", 32, "four bytes"),
    ("12-2", changed(loss_of, KEPT), "all tokens are alive"),
    ("12-2", changed(loss_of, ("128", "4096")), "How large is one chunk"),
    ("12-2", changed(loss_of, *MEANS), "With 1021 tokens: Your result is"),
]
