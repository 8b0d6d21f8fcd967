"""Answers to lesson 21's exercises."""

from labkit.exercises.lesson_21 import STACK, factor, leaner

MISTAKES = [
    ("21-1", lambda w, g, s, a, k: k, "do not shrink with the activations"),
    ("21-1", lambda w, g, s, a, k: (w + s + a) / (w + s + a / k), "another moment"),
    ("21-1", lambda w, g, s, a, k: (w + s + a) / (w + s + max(a / k, g)), "Before it, too"),
    ("21-1", lambda w, g, s, a, k: (w + s + g + a) / (w + s + g + a / k), "two moments"),
    ("21-1", lambda *job: 1 / factor(*job), "the share that is left"),
    ("21-2", STACK, "Which switch makes gradients wait"),
    ("21-2", STACK | {"micro": None}, "temporary bytes"),
    ("21-2", leaner() | {"on_host": False, "eight_bit": True}, "States on the card"),
    ("21-2", leaner() | {"precision": "bf16"}, "another training"),
]
