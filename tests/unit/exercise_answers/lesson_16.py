"""Answers to lesson 16's exercises."""

import torch
from torch import nn

from labkit.exercises.lesson_16 import EightBits, shrink, weights_gb


def eight_bits(model):
    for name, old in list(model.named_modules()):
        if isinstance(old, nn.Linear):
            model.set_submodule(name, EightBits(old.weight.detach()))
    model.model.embed_tokens = model.lm_head
    return model


def only_layers(model):
    head = model.lm_head
    model = shrink(model)
    model.model.embed_tokens.codes = head.weight.to(torch.bfloat16)
    return model


def four_layers(model):
    model.model.layers = model.model.layers[:4]
    return model


def adapted(model):
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    return shrink(model)


RIGHT = [("16-1", 39.5), ("16-1", lambda: round(weights_gb(), 1))]
MISTAKES = [
    ("16-1", 35.3, "are weights, too"),
    ("16-1", 37.4, "as large as the embedding"),
    ("16-1", 42.7, "double them"),
    ("16-1", 38.4, "Scales take bytes"),
    ("16-1", 36.36, "Llama-2-70B"),
    ("16-1", 39.5e9, "check the units"),
    ("16-2", lambda model: model, "100.0% of the 16-bit bytes"),
    ("16-2", eight_bits, "are allowed"),
    ("16-2", only_layers, "are allowed"),
    ("16-2", four_layers, "little enough, but the perplexity"),
    ("16-2", adapted, "grad"),
    ("16-2", lambda model: "small", "should return the model"),
]
