"""Answers to lesson 06's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_06 import thrifty

EVERY_SECOND = "for block in blocks[::2]"


MISTAKES = [
    ("06-1", 22.5, "forward pass alone"),
    ("06-1", 8.3333, "Not all of the forward"),
    ("06-1", 25, "share of the blocks"),
    ("06-2", changed(thrifty, (EVERY_SECOND, "for block in blocks")), "arithmetic; the limit is"),
    ("06-2", changed(thrifty, ("lr=1e-2", "lr=1.0")), "loss"),
    ("06-2", changed(thrifty, (EVERY_SECOND, "for block in blocks[8:]")), "still kept"),
]
