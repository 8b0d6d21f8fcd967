"""Answers to lesson 23's exercises."""

from labkit.exercises.lesson_23 import thrifty_fields

LONGEST = 20480  # the right answer to 23-1


def fields(**changes):
    return {**thrifty_fields(), **changes}


MISTAKES = [
    ("23-1", 20_000, "no multiple"),
    ("23-1", LONGEST - 1024, "a longer text"),
    ("23-1", LONGEST + 1024, "a shorter text"),
    ("23-2", fields(lora=16), "every weight is trained"),
    ("23-2", fields(optimizer="paged-adamw8bit"), "a paged optimizer"),
    ("23-2", fields(batch_size=64), "1024 to 16384"),
    ("23-2", {"seq_len": 1024, "batch_size": 1}, "no batch and no schedule helps"),
    ("23-2", fields(checkpointing=False), "a schedule can help"),
    ("23-2", fields(optimizer="adafactor"), "is moving bytes"),
]
