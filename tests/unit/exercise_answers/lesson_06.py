"""Answers to lesson 06's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_06 import thrifty

FIRST_HALF = "model.model.layers[:6]"

RIGHT = [
    ("06-1", 7.5),
    ("06-2", changed(thrifty, (FIRST_HALF, "model.model.layers[::2]"))),
]
MISTAKES = [
    ("06-1", 22.5, "forward pass alone"),
    ("06-1", 8.3333, "Not all of the forward"),
    ("06-1", 25, "share of the blocks"),
    ("06-2", changed(thrifty, (FIRST_HALF, "model.model.layers")), "arithmetic; the limit is"),
    ("06-2", changed(thrifty, ("lr=1e-2", "lr=1.0")), "loss"),
    ("06-2", changed(thrifty, (FIRST_HALF, "model.model.layers[6:]")), "still kept"),
    ("06-2", changed(thrifty, (FIRST_HALF, "model.model.layers[1::2]")), "still kept"),
    ("06-2", changed(thrifty, (FIRST_HALF, "model.model.layers[:5]")), "target at most"),
]
