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
BY_SHARE = (
    ", labels=theirs" + BY_TOKENS,
    ", labels=theirs).loss * (theirs[:, 1:] != -100).sum() / n",
)
RAGGED_PIECES = ("labels=theirs,", "labels=ragged(some),")
RIGHT = [
    ("07-2", changed(in_pieces, BY_SHARE, ("split(4)", "split(8)"))),
    ("07-2", changed(in_pieces, ("split(4)", "split(1)"))),
]
MISTAKES = [
    ("07-1", lambda piece, batch, pieces: piece / batch, "divides by the number of pieces after"),
    ("07-1", lambda piece, batch, pieces: batch / piece / pieces, "Upside down"),
    ("07-1", lambda piece, batch, pieces: piece / batch / pieces, "number of pieces twice"),
    ("07-1", lambda piece, batch, pieces: 1, "leaves the mean of means"),
    ("07-1", lambda piece, batch, pieces: pieces, "counts fully"),
    ("07-2", changed(in_pieces, ("split(4)", "split(32)")), "The piece sets the peak"),
    ("07-2", changed(in_pieces, *ONE_GRAPH), "unless it is detached"),
    ("07-2", changed(in_pieces, (BY_TOKENS, ").loss / 16")), "loss at step 1"),
    ("07-2", changed(in_pieces, RAGGED_PIECES), "made before the batch is cut"),
    ("07-2", changed(in_pieces, ZERO_EACH), "loss at step 2"),
]
