"""Answers to lesson 11's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_11 import loss_of

KEPT = ("checkpoint(part, *piece, use_reentrant=False)", "part(*piece)")
MEANS = [('"sum"', '"mean"'), ("total / len(labels)", "total / len(hidden.split(128))")]


MISTAKES = [
    ("11-1", 62, "round up"),
    ("11-1", 64, "One less"),
    ("11-1", 16, "holds four"),
    ("11-1", 32, "four bytes"),
    ("11-2", changed(loss_of, KEPT), "all tokens are alive"),
    ("11-2", changed(loss_of, ("128", "4096")), "How large is one chunk"),
    ("11-2", changed(loss_of, *MEANS), "With 1021 tokens: Your result is"),
]
