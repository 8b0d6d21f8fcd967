"""Answers to lesson 03's exercises."""

from labkit.exercises.lesson_03 import activations


def formula(norms=16, attention=4.0, shared=4.0, mlp=8.0, times=1.0):
    def answer(layers, h, f, groups, s, b):
        return times * layers * s * b * ((norms + attention + shared / groups) * h + mlp * f)

    return answer


def one_text(layers, h, f, groups, s, b):
    return activations(layers, h, f, groups, s, 1)


def heads_not_grouped(layers, h, f, groups, s, b):
    return activations(layers, h, f, 1, s, b)


RIGHT = [
    ("03-1", formula()),
    ("03-2", {"batch_size": 1, "accumulate": 4, "checkpointing": True}),
]
MISTAKES = [
    ("03-1", formula(norms=34, attention=0, shared=0, mlp=0), "still the paper's formula"),
    ("03-1", formula(norms=8), "FP32 copies"),
    ("03-1", formula(mlp=6), "GiB. Llama's MLP keeps four"),
    ("03-1", formula(times=0.5), "two bytes"),
    ("03-1", one_text, "That is one text"),
    ("03-1", heads_not_grouped, "shared by `groups` heads"),
    ("03-2", {"batch_size": 4, "checkpointing": True}, "The trace does not fit: its tensors take"),
    ("03-2", {"batch_size": 2, "accumulate": 2, "checkpointing": True}, "the allocator's blocks"),
    ("03-2", {"batch_size": 1, "checkpointing": True}, "4096 tokens; at least 16384"),
]
