"""Answers to lesson 06's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_06 import choose

FIRST_HALF = "blocks[:6]"


RIGHT = [
    ("06-1", 7.5),
    ("06-2", changed(choose, (FIRST_HALF, "blocks[::2]"))),
]
MISTAKES = [
    ("06-1", 22.5, "forward pass alone"),
    ("06-1", 8.3333, "Not all of the forward"),
    ("06-1", 25, "share of the blocks"),
    ("06-2", changed(choose, (FIRST_HALF, "blocks")), "arithmetic; the limit is"),
    ("06-2", lambda blocks: 6, "not iterable"),
    ("06-2", changed(choose, (FIRST_HALF, "blocks[6:]")), "still kept"),
    ("06-2", changed(choose, (FIRST_HALF, "blocks[1::2]")), "still kept"),
    ("06-2", changed(choose, (FIRST_HALF, "blocks[:5]")), "target at most"),
]
