"""Answers to lesson 13's exercises."""

import torch
from exercise_answers.changed import changed

import labkit as lab
from labkit.exercises.lesson_13 import roomy, thrifty

ADAFACTOR = "torch.optim.Adafactor(model.parameters(), lr=0.1)"


def optimizer(source):
    return changed(thrifty, (ADAFACTOR, f"torch.optim.{source}"))


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


RIGHT = [
    ("13-1", lambda gradients, copy, row: -(-(gradients + copy) // row)),
    ("13-2", inside),
]
MISTAKES = [
    ("13-1", lambda gradients, copy, row: (gradients + copy) / row, "which way do you round"),
    ("13-1", lambda gradients, copy, row: (gradients + copy) // row, "lies in the update"),
    ("13-1", lambda gradients, copy, row: (gradients + copy) // row + 1, "not the smallest"),
    ("13-1", lambda gradients, copy, row: -(-gradients // row), "makes its copy"),
    ("13-2", roomy, "the target at most"),
    ("13-2", changed(inside, ("Adafactor", "AdamW")), "peak is optimizer"),
    ("13-2", optimizer("Adafactor(model.parameters())"), "for *this* optimizer"),
    ("13-2", optimizer("SGD(model.parameters(), lr=1e4)"), "your last loss is nan"),
    ("13-2", changed(thrifty, ("3 * width", "3 * width // 2")), "less arithmetic"),
]
