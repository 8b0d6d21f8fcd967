"""Answers to lesson 22's exercises."""

from labkit.exercises.lesson_22 import STACK, factor, leaner

MISTAKES = [
    ("22-1", lambda w, g, s, a, k: k, "do not shrink with the activations"),
    ("22-1", lambda w, g, s, a, k: (w + s + a) / (w + s + a / k), "another moment"),
    ("22-1", lambda w, g, s, a, k: (w + s + a) / (w + s + max(a / k, g)), "Before it, too"),
    ("22-1", lambda w, g, s, a, k: (w + s + g + a) / (w + s + g + a / k), "two moments"),
    ("22-1", lambda *job: 1 / factor(*job), "the share that is left"),
    ("22-2", STACK, "Which switch makes gradients wait"),
    ("22-2", STACK | {"micro": None}, "temporary bytes"),
    ("22-2", leaner() | {"on_host": False, "eight_bit": True}, "States on the card"),
    ("22-2", leaner() | {"precision": "bf16"}, "another training"),
]
