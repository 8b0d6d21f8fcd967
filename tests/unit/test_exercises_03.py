"""Lesson 03's exercises: the stub, the solution, and the mistakes people make."""

import pytest
from exercise_rules import stub_and_solution

import labkit as lab
from labkit.exercises import Status
from labkit.exercises.lesson_03 import (
    LOSS_BATCH,
    LOSS_LENGTH,
    LOSS_MODEL,
    activations,
    loss_gib,
)
from labkit.formula import Part, envelope
from labkit.memory import GIB

test_stub_and_solution = stub_and_solution("03")


def not_yet(id, answer):
    outcome = lab.exercise(id).check(answer)
    assert outcome.status is Status.NOT_YET
    return outcome.message


# --- 1: the loss ----------------------------------------------------------------------------------


def test_the_answer_is_what_a_trace_holds():
    how = {"batch_size": LOSS_BATCH, "seq_len": LOSS_LENGTH, "precision": "bf16"}
    rows = envelope(LOSS_MODEL, **how).beside(lab.estimate(LOSS_MODEL, gpu="h200", **how).run)
    [row] = [row for row in rows if row.part is Part.LOGITS]
    assert row.highest_bytes == pytest.approx(loss_gib() * GIB, rel=1e-6)


@pytest.mark.parametrize(
    ("share", "says"),
    [
        (1 / 3, "one copy, the formula's term"),
        (1 / 6, "one copy in 16 bits"),
        (1 / 2, "three copies in 16 bits"),
        (2 / 3, "two copies"),
        (1 / 4, "one text"),
        (GIB, "three binary prefixes"),
        (GIB / 1e9, "GiB against GB"),
        (5, "less"),
    ],
)
def test_loss_mistakes(share, says):
    assert says in not_yet("03-1", loss_gib() * share)


def test_a_loss_in_words_is_no_number():
    assert "A number" in not_yet("03-1", "13.9 GiB")


# --- 2: the mended formula ------------------------------------------------------------------------


def variant(norms=16, attention=4.0, shared=4.0, mlp=8.0, times=1.0):
    def answer(L, h, f, groups, s, b):
        return times * L * s * b * ((norms + attention + shared / groups) * h + mlp * f)

    return answer


def test_the_variant_with_no_mistake_is_right():
    assert lab.exercise("03-2").check(variant()).status is Status.CORRECT
    assert variant()(2, 64, 96, 3, 10, 5) == activations(2, 64, 96, 3, 10, 5)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (variant(norms=34, attention=0, shared=0, mlp=0), "still the paper's formula"),
        (variant(norms=8), "FP32 copies"),
        (variant(mlp=6), "do you have three?"),
        (variant(mlp=4), "do you have two?"),
        (variant(times=0.5), "two bytes"),
        (variant(mlp=20), "instead of"),
        (lambda L, h, f, groups, s, b: "many", "a number of bytes"),
        (lambda h: h, "Your function raised TypeError"),
    ],
)
def test_formula_mistakes(answer, says):
    assert says in not_yet("03-2", answer)


def test_key_and_value_of_every_head():
    """Where heads are grouped, the models tried must tell."""

    def answer(L, h, f, groups, s, b):
        return variant()(L, h, f, 1, s, b)

    assert "shared by `groups` heads" in not_yet("03-2", answer)


# --- 3: the job that should fit -------------------------------------------------------------------


def test_what_the_formula_accepts_the_trace_rejects():
    message = not_yet("03-3", {"batch_size": 4, "checkpointing": True})
    assert "says it would fit" in message
    assert "logits and loss" in message


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"batch_size": 4}, "agrees, the trace does not fit"),
        ({"batch_size": 1, "checkpointing": True}, "4096 tokens; at least 16384"),
        ({"batch_size": 4, "lora": 8}, "'lora' is not yours to change"),
        ({"batch_size": 2, "accumulate": 2, "checkpointing": True}, "So close"),
        ({"batch_size": 4, "attention": "warp"}, "unknown attention"),
        ([4], "as a dictionary"),
    ],
)
def test_settings_mistakes(answer, says):
    assert says in not_yet("03-3", answer)


def test_an_empty_dictionary_is_no_attempt():
    assert lab.exercise("03-3").check({}).status is Status.NOT_ATTEMPTED


@pytest.mark.parametrize(
    "answer",
    [
        {"batch_size": 1, "accumulate": 4, "checkpointing": True},
        {"batch_size": 4, "chunked_loss": True, "checkpointing": True, "attention": "flash"},
    ],
)
def test_other_ways_that_fit(answer):
    outcome = lab.exercise("03-3").check(answer)
    assert outcome.status is Status.CORRECT
    assert "16384 tokens a step" in outcome.message
