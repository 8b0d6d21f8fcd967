"""Answers to lesson 22's exercises."""

from labkit.exercises.lesson_22 import thrifty_fields

LONGEST = 19456  # the right answer to 22-1


def fields(**changes):
    return {**thrifty_fields(), **changes}


MISTAKES = [
    ("22-1", 20_000, "no multiple"),
    ("22-1", LONGEST - 1024, "a longer text"),
    ("22-1", LONGEST + 1024, "a shorter text"),
    ("22-2", fields(lora=16), "every weight is trained"),
    ("22-2", fields(optimizer="paged-adamw8bit"), "a paged optimizer"),
    ("22-2", fields(batch_size=64), "1024 to 16384"),
    ("22-2", {"seq_len": 1024, "batch_size": 1}, "no batch and no schedule helps"),
    ("22-2", fields(checkpointing=False), "a schedule can help"),
    ("22-2", fields(optimizer="adafactor"), "is moving bytes"),
]
