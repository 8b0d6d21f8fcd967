"""Answers to lesson 07's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_07 import in_pieces

BY_TOKENS = ", num_items_in_batch=n).loss"
ZERO_EACH = (
    "            loss.backward()\n",
    "            optimizer.zero_grad()\n            loss.backward()\n",
)
ONE_GRAPH = [
    ("            loss.backward()\n", ""),
    ("total += loss.detach()", "total = total + loss"),
    ("        optimizer.step()\n", "        total.backward()\n        optimizer.step()\n"),
]
MISTAKES = [
    ("07-1", 103, "without the division by four"),
    ("07-1", 0.2575, "factor for a token of the long piece"),
    ("07-1", 0.0388, "Upside down"),
    ("07-1", 25, "short pieces' tokens, too"),
    ("07-2", changed(in_pieces, ("split(4)", "split(32)")), "The piece sets the peak"),
    ("07-2", changed(in_pieces, *ONE_GRAPH), "unless it is detached"),
    ("07-2", changed(in_pieces, (BY_TOKENS, ").loss / 16")), "loss at step 1"),
    ("07-2", changed(in_pieces, ZERO_EACH), "loss at step 2"),
]
