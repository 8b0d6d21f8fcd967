"""Answers to lesson 06's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_06 import recompute

BACKWARD = "    output.backward(gradient)\n    return hidden.grad"
ONLY_THE_INPUT = "    return torch.autograd.grad(output, hidden, gradient)[0]"

RIGHT = [
    ("06-1", 18.0),
    ("06-2", changed(recompute, ("output.backward(", "torch.autograd.backward(output, "))),
]
MISTAKES = [
    ("06-1", 17, "2,136 MiB"),
    ("06-1", 15, "leaves out the loss"),
    ("06-1", 17.7, "which way do you round"),
    ("06-1", 24, "no better than some"),
    ("06-1", 20, "less"),
    ("06-2", changed(recompute, (BACKWARD, ONLY_THE_INPUT)), "block's weights"),
    ("06-2", changed(recompute, ("hidden.grad", "gradient")), "block's weights"),
    ("06-2", changed(recompute, ("torch.enable_grad()", "torch.no_grad()")), "does not require"),
]
