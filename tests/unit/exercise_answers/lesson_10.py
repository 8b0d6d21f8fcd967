"""Answers to lesson 10's exercises."""

import torch
from torch import nn


def with_branch(x):
    return x / x.norm() if x.norm() > 1 else x


def portable(x):
    return torch.cond(x.norm() > 1, lambda x: x / x.norm(), lambda x: x.clone(), (x,))


def each_block(model):
    for number, block in enumerate(model):
        model[number] = torch.jit.script(block)
    return model


def traced(model):
    x = torch.ones(1, 64, 128)
    return nn.Sequential(*[torch.jit.trace(model[at : at + 3], x) for at in range(0, 12, 3)])


def nested(model):
    quarters = [torch.jit.script(nn.Sequential(*model[at : at + 3])) for at in range(0, 12, 3)]
    return nn.Sequential(nn.Sequential(*quarters[:2]), nn.Sequential(*quarters[2:]))


def eager(model):
    return model


def first_block_eager(model):
    return nn.Sequential(model[0], *map(torch.jit.script, (model[1:4], model[4:8], model[8:])))


def halves(model):
    return nn.Sequential(torch.jit.script(model[:6]), torch.jit.script(model[6:]))


def fewer(model):
    return nn.Sequential(*[torch.jit.script(model[at : min(at + 3, 11)]) for at in range(0, 12, 3)])


def uneven(model):
    return nn.Sequential(*map(torch.jit.script, (model[:6], model[6:8], model[8:10], model[10:])))


RIGHT = [("10-1", portable), ("10-2", nested)]
MISTAKES = [
    ("10-1", lambda x: x / x.norm(), "For a short vector"),
    ("10-1", lambda x: 1.0, "A tensor of shape (4,)"),
    ("10-1", with_branch, "torch.export does not take it"),
    ("10-2", torch.jit.script, "at most"),
    ("10-2", halves, "at most"),
    ("10-2", uneven, "at most"),
    ("10-2", each_block, "12 scripted modules"),
    ("10-2", eager, "Not every parameter"),
    ("10-2", first_block_eager, "Not every parameter"),
    ("10-2", fewer, "should still be"),
    ("10-2", lambda model: 5, "A model is asked for"),
]
