"""Answers to lesson 16's exercises."""

import torch
from torch import nn

from labkit.exercises.lesson_16 import EightBits, levels

EVEN = torch.linspace(-1, 1, 16)


def nf4():
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type("nf4", device="cpu")


def eight_bits(model, tokenizer):
    for name, old in list(model.named_modules()):
        if isinstance(old, nn.Linear):
            model.set_submodule(name, EightBits(old.weight.detach()))
    model.model.embed_tokens = model.lm_head
    return model


def four_layers(model, tokenizer):
    model.model.layers = model.model.layers[:4]
    return model


RIGHT = [("16-1", lambda: torch.tensor(levels()))]
MISTAKES = [
    ("16-1", "0 to 1", "16 numbers"),
    ("16-1", list(range(16)), "between −1 and 1"),
    ("16-1", torch.linspace(-1, 1, 15), "15 different levels"),
    ("16-1", EVEN, "how far apart"),
    ("16-1", nf4, "NF4's"),
    ("16-1", lambda: 0.8 * nf4() + 0.2 * torch.tensor(levels()), "better, by"),
    ("16-2", lambda model, tokenizer: model, "100.0% of the 16-bit bytes"),
    ("16-2", eight_bits, "not a third"),
    ("16-2", four_layers, "little enough, but the perplexity"),
    ("16-2", lambda model, tokenizer: "small", "should return the model"),
]
