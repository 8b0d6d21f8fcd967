"""Answers to lesson 01's exercises."""

import torch

from labkit.exercises.checks import adamw

CROSSING = 9  # the right answer to 01-1


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


def adam(parameters, lr=1e-3):
    return torch.optim.Adam(parameters, lr=lr, foreach=False)


def own_rate(parameters, lr=1e-3):
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def fused(parameters, lr=1e-3):
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


RIGHT = [("01-2", fused)]
MISTAKES = [
    ("01-1", 2 * CROSSING, "16 bytes per parameter"),
    ("01-1", 128 * CROSSING, "looks like tokens"),
    ("01-2", adamw, "are temporary"),
    ("01-2", sgd, "Your loss at step 2"),
    ("01-2", adam, "and decay weights?"),
    ("01-2", own_rate, "take the given learning rate"),
]
