"""Answers to lesson 12's exercises."""

import linecache

import torch
from exercise_answers.changed import changed
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from labkit.exercises import lesson_12
from labkit.exercises.lesson_12 import loss_of


def in_forward(*replacements):
    """The solution, with parts of the lesson's class replaced."""
    source = "".join(linecache.getlines("<lesson 12, GradientInForward>"))
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    space = dict(vars(lesson_12))
    exec(source, space)
    return lambda *inputs: space["GradientInForward"].apply(*inputs, -(-len(inputs[2]) // 128))


MEANS = [('"sum"', '"mean"'), ("total / count", "total / len(parts[0])")]
NOT_IGNORED = [("(targets != -100)[:, None]", "torch.ones(len(targets), 1)")]


def checkpointed(hidden, weight, labels):
    def part(rows, targets):
        logits = functional.linear(rows, weight).float()
        return functional.cross_entropy(logits, targets, reduction="sum")

    pieces = zip(hidden.split(128), labels.split(128), strict=True)
    total = sum(checkpoint(part, *piece, use_reentrant=False) for piece in pieces)
    return total / (labels != -100).sum()


KEPT = ("checkpoint(part, *piece, use_reentrant=False)", "part(*piece)")


def from_torch(hidden, weight, labels):
    options = torch.nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(hidden, weight, labels, options=options)


RIGHT = [("12-2", in_forward((".float()", "")))]  # the text asks for no format of the logits
if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # since 2.13
    RIGHT.append(("12-2", from_torch))

MISTAKES = [
    ("12-1", 62, "round up"),
    ("12-1", 64, "One less"),
    ("12-1", 16, "holds four"),
    ("12-1", 32, "four bytes"),
    ("12-2", checkpointed, "times the weight"),
    ("12-2", changed(checkpointed, KEPT), "all tokens are alive"),
    ("12-2", changed(loss_of, ("128", "4096")), "is it the chunks"),
    ("12-2", in_forward(*NOT_IGNORED), "With labels of -100"),
    ("12-2", in_forward(("(labels != -100).sum()", "len(labels)")), "With labels of -100"),
    ("12-2", in_forward(*MEANS), "With 1021 tokens: Your result is"),
]
