"""Answers to lesson 20's exercises."""

from accelerate import infer_auto_device_map

from labkit.exercises.lesson_20 import place


def to_the_brim(model, room):
    return place(model, {0: room[0] + 256 * 2**20, 1: room[1]})


def without_the_head(model, room):
    return {name: card for name, card in place(model, room).items() if name != "lm_head"}


def auto(model, room):
    return infer_auto_device_map(model, dict(room), model._no_split_modules)


RIGHT = [("20-1", auto)]
MISTAKES = [
    ("20-1", lambda model, room: {"": 1}, "GPU 1 peaks at"),
    ("20-1", to_the_brim, "A pass needs room, too"),
    ("20-1", lambda model, room: {**place(model, room), "model.layers.3": 1}, "crosses 3 times"),
    ("20-1", lambda model, room: {**place(model, room), "model.layers.3.mlp": 1}, "cut in two"),
    ("20-1", without_the_head, "lm_head must be on GPU 0 or 1, not on None"),
    ("20-2", {"order": "GPipe", "pieces": 4}, "is idle 43% of the time"),  # the one given
    ("20-2", {"order": "GPipe", "pieces": 16}, "is idle 16% of the time, little enough. But"),
    ("20-2", {"order": "1F1B", "pieces": 32}, "1 text in a micro-batch is too few"),
    ("20-2", {"order": "1F1B", "pieces": 12}, "cannot be cut into 12"),
]
