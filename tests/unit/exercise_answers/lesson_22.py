"""Answers to lesson 22's exercises."""

from labkit.exercises.lesson_22 import SEVEN, factor

RIGHT = [("22-2", "--amp --fused --checkpointing --chunk=512 --optimizer cpu")]
MISTAKES = [
    ("22-1", lambda w, g, s, a, k: k, "do not shrink with the activations"),
    ("22-1", lambda w, g, s, a, k: (w + s + a) / (w + s + a / k), "another moment"),
    ("22-1", lambda w, g, s, a, k: (w + s + a) / (w + s + max(a / k, g)), "Before it, too"),
    ("22-1", lambda w, g, s, a, k: (w + s + g + a) / (w + s + g + a / k), "two moments"),
    ("22-1", lambda *job: 1 / factor(*job), "the share that is left"),
    ("22-2", SEVEN, "Which switch makes gradients wait"),
    ("22-2", SEVEN.replace("--micro=2", ""), "temporary bytes"),
    ("22-2", "--amp --fused --checkpointing --chunk=256", "Moments on the GPU"),
    ("22-2", "--amp --fused --checkpointing --chunk=256 --optimizer 8bit", "moments are rounded"),
    ("22-2", "--amp --checkpointing --chunk=256 --optimizer=cpu", "Written-out attention"),
    ("22-2", "--bf16 --checkpointing --chunk=256 --optimizer=cpu", "another training"),
    ("22-2", "--amp --flash", "unknown: --flash"),
    ("22-2", "--amp --chunk", "expected one argument"),
]
