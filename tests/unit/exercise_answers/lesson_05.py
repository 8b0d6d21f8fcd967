"""Answers to lesson 05's exercises."""

import torch

import labkit as lab
from labkit.exercises.lesson_05 import SMALL, forgetful


def variant(write, dtype=torch.bfloat16, rate=0.003, start=0):
    """A training that stores each step through ``write(w, change)``."""

    def frugal(device, seed=0, width=64):
        torch.manual_seed(seed + start)
        shape = SMALL | {"hidden_size": width, "intermediate_size": 3 * width}
        model = lab.model("SmolLM2-tiny", device=device, dtype=dtype, **shape)
        for ids in lab.batches(device=device, batch_size=2, seq_len=64, seed=seed):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            with torch.no_grad():
                for w in model.parameters():
                    write(w, -rate * w.grad.float())
                    w.grad = None
            yield loss

    return frugal


def nearest(w, change):
    w.copy_(w + change)


def at_random(w, change):
    bits = (w + change).view(torch.int32)
    bits += torch.randint_like(bits, 1 << 16)
    w.copy_((bits & -(1 << 16)).view(torch.float32))


MISTAKES = [
    ("05-1", 2**-8, "the whole gap"),
    ("05-1", 0.75 / 256, "A 256th of the weight is"),
    ("05-1", 2**-7, "from 1 to 2"),
    ("05-1", 2**-12, "right for FP16"),
    ("05-2", forgetful, "Steps are still lost"),
    ("05-2", variant(at_random), "how many numbers do you widen"),
    ("05-2", variant(nearest, dtype=torch.float32), "no longer BF16"),
    ("05-2", variant(nearest, dtype=torch.float32, rate=0.006), "another training"),
    ("05-2", variant(at_random, start=1), "Your first loss"),
]
