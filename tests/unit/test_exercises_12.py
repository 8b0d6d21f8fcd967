"""Lesson 12's exercises: the stub, the solution, and the mistakes people make."""

import pytest
import torch
from exercise_rules import stub_and_solution

import labkit as lab
from labkit.exercises import Status
from labkit.exercises.lesson_12 import roomy

test_stub_and_solution = stub_and_solution("12")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (18432, "How many bytes"),
        (4 * 4096 * 14336, "SGD's momentum"),
        (8 * 4096 * 14336, "what AdamW keeps"),
        (147456, "no first moment"),
        (16384, "What about the columns"),
        (57344, "What about the rows"),
        (36864, "BF16"),
        ("72 KiB", "A number"),
        (70000, "The right answer is more"),
    ],
)
def test_state_mistakes(answer, says):
    outcome = lab.exercise("12-1").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def trained_by(make, *, shrink=1, other_seed=0, rows=4, again=1, split=4):
    """``again`` trains on every batch as many times; ``split`` sends that many rows at a time."""

    def thrifty(device, width=48, seed=0, steps=60):
        torch.manual_seed(seed + other_seed)
        shape = {
            "vocab_size": 256, "layers": 2, "hidden_size": width,
            "intermediate_size": 3 * width // shrink,
        }  # fmt: skip
        model = lab.model("SmolLM2-tiny", device=device, **shape)
        optimizer = make(model.parameters())
        data = lab.batches(device=device, batch_size=rows, seq_len=64, seed=seed)
        for step in range(steps):
            if step % again == 0:
                ids = next(data)
            loss = 0
            for part in ids.split(split):
                part_loss = model(input_ids=part, labels=part).loss * len(part) / len(ids)
                part_loss.backward()
                loss += part_loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    return thrifty


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adafactor(parameters):
    return torch.optim.Adafactor(parameters, lr=0.1)


def timid(parameters):
    return torch.optim.Adafactor(parameters)


def reckless(parameters):
    return torch.optim.SGD(parameters, lr=1e4)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (roomy, "the target at most"),
        (trained_by(momentum), "rate one for *this* optimizer"),
        (trained_by(sgd), "rate one for *this* optimizer"),
        (trained_by(timid), "rate one for *this* optimizer"),
        (trained_by(reckless), "no longer finite"),
        (trained_by(adafactor, shrink=2), "The model and the data must stay"),
        (trained_by(adafactor, rows=2), "The model and the data must stay"),
        (trained_by(adafactor, other_seed=1), "Before the first update nothing may differ"),
        (trained_by(adafactor, again=60), "has seen 12 of the"),
        (trained_by(adafactor, again=2), "has seen 360 of the"),
    ],
    ids=[
        "stub",
        "momentum",
        "sgd",
        "timid",
        "reckless",
        "smaller",
        "fewer rows",
        "other seed",
        "one batch",
        "half the batches",
    ],
)
def test_target_mistakes(answer, says):
    outcome = lab.exercise("12-2").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def test_a_batch_in_pieces_is_the_same_data():
    outcome = lab.exercise("12-2").check(trained_by(adafactor, split=2))
    assert outcome.status is Status.CORRECT, outcome.message


def test_an_experiment_without_a_seed_is_told_so():
    def thrifty(device, width=48, steps=60):
        yield from trained_by(adafactor)(device, width, 0, steps)

    outcome = lab.exercise("12-2").check(thrifty)
    assert outcome.status is Status.NOT_YET
    assert "seed" in outcome.message
