"""Answers to lesson 13's exercises."""

import torch
from exercise_answers.changed import changed

import labkit as lab
from labkit.exercises.lesson_13 import roomy, thrifty

INSIDE = "step_in_backward(model, partial(torch.optim.Adafactor, lr=0.1))"


def inside_backward(source):
    return changed(thrifty, (INSIDE, f"step_in_backward(model, partial(torch.optim.{source}))"))


def after_backward(device, width=48, seed=0, steps=60):
    torch.manual_seed(seed)
    shape = {"vocab_size": 256, "layers": 2, "hidden_size": width, "intermediate_size": 3 * width}
    model = lab.model("SmolLM2-tiny", device=device, **shape)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    for ids in lab.batches(device=device, batch_size=4, seq_len=64, seed=seed, steps=steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def _step_now(weight):
    weight.own_optimizer.step()
    weight.own_optimizer.zero_grad()


def inside(device, width=48, seed=0, steps=60):
    torch.manual_seed(seed)
    shape = {"vocab_size": 256, "layers": 2, "hidden_size": width, "intermediate_size": 3 * width}
    model = lab.model("SmolLM2-tiny", device=device, **shape)
    for weight in model.parameters():
        weight.own_optimizer = torch.optim.Adafactor([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(_step_now)
    for ids in lab.batches(device=device, batch_size=4, seq_len=64, seed=seed, steps=steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        yield loss


def forgets_base(gradients, extra, base, row):
    return -(-(gradients + extra) // row)


RIGHT = [
    ("13-1", lambda gradients, extra, base, row: max(1, -((base - gradients - extra) // row))),
    ("13-2", inside),
]
MISTAKES = [
    ("13-1", lambda g, extra, base, row: (g + extra - base) / row, "which way do you round"),
    ("13-1", lambda g, extra, base, row: (g + extra - base) // row, "behind the start"),
    ("13-1", lambda g, extra, base, row: (g + extra - base) // row + 1, "not the smallest"),
    ("13-1", lambda g, extra, base, row: -((base - g) // row), "the extra"),
    ("13-1", lambda g, extra, base, row: -((base - g - extra) // row), "at least one row"),
    ("13-1", forgets_base, "has its base"),
    ("13-2", roomy, "the target at most"),
    ("13-2", after_backward, "the target at most"),
    ("13-2", changed(inside, ("Adafactor", "AdamW")), "peak is optimizer"),
    ("13-2", inside_backward("Adafactor"), "for *this* optimizer"),
    ("13-2", inside_backward("SGD, lr=1e4"), "your last loss is nan"),
    ("13-2", changed(inside, ("3 * width", "3 * width // 2")), "less arithmetic"),
]
