"""Answers to lesson 18's exercises."""

from labkit.exercises.lesson_18 import roomy, thrifty


def tokens(weights_read=2, adam=12, gradients_written=1, operations=6):
    """The solution of 18-1, except for what is named."""

    def given(weight, gradient, read, write, flops):
        reading = weights_read * weight + adam + gradient
        writing = weight + adam + gradients_written * gradient
        return (reading / read + writing / write) * flops / operations

    return given


def at_once(w, g, r, b, f):
    return max((2 * w + 12 + g) / r, (w + 12 + g) / b) * f / 6


class ShelfInMemory:
    """Uses the disk too, but keeps its tensors in CPU memory."""

    def __init__(self, shelf):
        self.shelf, self.tensors = shelf, {}

    def put(self, name, tensor):
        self.shelf.put(name, tensor)
        self.tensors[name] = tensor.detach().to("cpu", copy=True)

    def get(self, name, device):
        self.shelf.get(name, "cpu")
        return self.tensors[name].to(device, copy=True)


def kept_on_the_cpu(device, shelf, layers=12, width=64, steps=3):
    yield from thrifty(device, ShelfInMemory(shelf), layers, width, steps)


MISTAKES = [
    ("18-1", tokens(weights_read=1), "backward reads it again"),
    ("18-1", tokens(gradients_written=0), "written before"),
    ("18-1", tokens(adam=8), "master copy"),
    ("18-1", tokens(operations=8), "checkpointing"),
    ("18-1", at_once, "their times add up"),
    ("18-2", roomy, "at most three are allowed"),
    ("18-2", kept_on_the_cpu, "they are to be on the shelf"),
]
