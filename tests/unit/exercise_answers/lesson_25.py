"""Answers to lesson 25's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_25 import conversations, growing, steady

RIGHT = [("25-2", changed(steady, ("prompt + steps - 1", "prompt + steps")))]
MISTAKES = [
    ("25-1", changed(conversations, ("sorted(lengths)", "lengths")), "Who comes first"),
    (
        "25-1",
        changed(conversations, ("-(-length // PAGE_TOKENS)", "length / PAGE_TOKENS")),
        "whole",
    ),
    ("25-1", changed(conversations, ("-(-length //", "(length //")), "begun"),
    (
        "25-1",
        changed(conversations, ("-(-length // PAGE_TOKENS)", "length // PAGE_TOKENS + 1")),
        "fill one page",
    ),
    ("25-2", growing, "are enough"),
    ("25-2", changed(steady, (") % 1000", ") % 999")), "number at step"),
    ("25-2", changed(steady, ("steps - 1)", "steps + 900)")), "are enough"),
]
