"""Answers to lesson 10's exercises."""

import torch
from torch import nn


def with_branch(x):
    return x / x.norm() if x.norm() > 1 else x


def portable(x):
    return torch.cond(x.norm() > 1, lambda x: x / x.norm(), lambda x: x.clone(), (x,))


def in_place(model):
    for number, block in enumerate(model):
        model[number] = torch.jit.script(block)
    return model


def traced(model):
    return nn.Sequential(*[torch.jit.trace(b, torch.ones(1, 64, 128)) for b in model])


def eager(model):
    return model


def first_block_eager(model):
    return nn.Sequential(model[0], *map(torch.jit.script, model[1:]))


def halves(model):
    return nn.Sequential(torch.jit.script(model[:6]), torch.jit.script(model[6:]))


def fewer(model):
    return nn.Sequential(*map(torch.jit.script, model[:11]))


RIGHT = [("10-1", portable), ("10-2", in_place)]
MISTAKES = [
    ("10-1", lambda x: x / x.norm(), "For a short vector"),
    ("10-1", lambda x: 1.0, "A tensor of shape (4,)"),
    ("10-1", with_branch, "torch.export does not take it"),
    ("10-2", torch.jit.script, "at most"),
    ("10-2", halves, "at most"),
    ("10-2", eager, "Not every parameter"),
    ("10-2", first_block_eager, "Not every parameter"),
    ("10-2", fewer, "should still be"),
    ("10-2", lambda model: 5, "A model is asked for"),
]
