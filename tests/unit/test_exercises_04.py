"""Lesson 04's exercises: stubs, solutions, and the mistakes that people make."""

import inspect

import pytest
import torch
from exercise_rules import stub_and_solution

from labkit.exercises import Status, exercise, lesson_04


def outcome(id, answer):
    return exercise(id).check(answer)


def not_yet(id, answer):
    found = outcome(id, answer)
    assert found.status is Status.NOT_YET
    return found.message


test_stub_and_solution = stub_and_solution("04")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (100 / 6, "copies of the weights are missing"),
        (25, "reaches two thirds"),
        (torch.tensor(25.0), "You gave 25. That halves"),
        (20.8, "share of the whole peak"),
        (50, "the article's figure"),
        (9, "more"),
        (None.__class__, "number"),
    ],
)
def test_wrong_shares(answer, says):
    assert says in not_yet("04-1", answer)


def changed(*replacements):
    source = inspect.getsource(lesson_04.halved)
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    space = dict(vars(lesson_04))
    exec(source, space)
    return space["halved"]


NO_CHECKPOINTS = [("    lab.checkpointing(model)\n", "")]
NO_AUTOCAST = [("kind, dtype=torch.float16", "kind, enabled=False")]
NO_SCALER = [
    ("scaler.scale(loss).backward()", "loss.backward()"),
    ("scaler.step(optimizer)", "optimizer.step()"),
    ("        scaler.update()\n", ""),
]
IDLE_SCALER = [("GradScaler(kind)", "GradScaler(kind, enabled=False)")]
SHORTER = [("seq_len=512", "seq_len=256")]
PURE_BF16 = [("device=device)\n    lab", "device=device, dtype=torch.bfloat16)\n    lab")]
SGD = [("optim.AdamW(", "optim.SGD(")]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (NO_CHECKPOINTS, "what attacks the activations"),
        (NO_AUTOCAST, "Nothing in your step is FP16"),
        (NO_SCALER, "no scaler"),
        (IDLE_SCALER, "none that is enabled"),
        (SHORTER, "less arithmetic"),
        (PURE_BF16, "`model.half()`"),
        (SGD, "optimizer as it is"),
    ],
)
def test_other_jobs_and_half_measures(changes, says):
    assert says in not_yet("04-2", changed(*changes))


def test_the_original_step_is_not_yet_mixed():
    assert "Nothing in your step is FP16" in not_yet("04-2", lesson_04.full_precision)
