"""Lesson 15's exercises: the stub, the solution, and the mistakes people make."""

import copy
import math

import pytest
import torch
from torch import nn

import labkit as lab
from labkit.exercises import Status, lesson_15
from labkit.exercises.lesson_15 import EightBits, levels, rounding_error, shrink, stored_bytes


@pytest.fixture(scope="module")
def real():
    return lab.pretrained("SmolLM2-135M")


@pytest.fixture
def quick(monkeypatch, real):
    """The real model without loading it again, and judged by two rows."""
    model, tokenizer = real
    monkeypatch.setattr(lesson_15, "pretrained", lambda: (copy.deepcopy(model), tokenizer))
    monkeypatch.setattr(lesson_15, "ROWS", 2)


def test_levels():
    exercise = lab.exercise("15-1")
    assert exercise.check(...).status is Status.NOT_ATTEMPTED
    assert exercise.check(exercise.right_answer).status is Status.CORRECT
    assert exercise.check(torch.tensor(exercise.right_answer)).status is Status.CORRECT


EVEN = torch.linspace(-1, 1, 16)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("0 to 1", "16 numbers"),
        (list(range(16)), "between −1 and 1"),
        ([], "between −1 and 1"),
        ([math.nan] * 16, "between −1 and 1"),
        (torch.linspace(-1, 1, 15), "15 different levels"),
        ([0.0] * 16, "1 different levels"),
        (EVEN, "how far apart"),
        (EVEN.sign() * EVEN.abs() ** 1.3, "how far apart"),
    ],
)
def test_levels_mistakes(answer, says):
    outcome = lab.exercise("15-1").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def nf4():
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type("nf4", device="cpu")


def test_nf4_itself_is_not_better_than_nf4():
    outcome = lab.exercise("15-1").check(nf4())
    assert outcome.status is Status.NOT_YET


def test_nearly_enough_is_said_to_be_better():
    outcome = lab.exercise("15-1").check(0.8 * nf4() + 0.2 * torch.tensor(levels()))
    assert outcome.status is Status.NOT_YET
    assert "better, by" in outcome.message


def test_a_ladder_that_holds_every_weight_makes_no_error():
    assert rounding_error(torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([[2.0, -2.0, 0.0]])) == 0


def test_the_solution_meets_the_memory_target():
    assert lab.exercise("15-2").check(...).status is Status.NOT_ATTEMPTED
    outcome = lab.exercise("15-2").check(shrink)
    assert outcome.status is Status.CORRECT, outcome.message


def untouched(model, tokenizer):
    return model


def fractions_kept_as_floats(model, tokenizer):
    for parameter in model.parameters():  # fewer values, but the same 16 bits each
        parameter.data = (parameter.data * 8).round() / 8
    return model


def all_in_eight_bits(model, tokenizer):
    for name, old in list(model.named_modules()):
        if isinstance(old, nn.Linear):
            model.set_submodule(name, EightBits(old.weight.detach()))
    model.model.embed_tokens = model.lm_head
    return model


def everything_in_two_bits(model, tokenizer):
    class TwoBits(nn.Module):  # packed: four weights to a byte
        def __init__(self, weight):
            super().__init__()
            self.shape = weight.shape
            scale = weight.abs().amax(1, keepdim=True)
            codes = ((weight / scale + 1) * 1.5).round().to(torch.uint8).reshape(-1, 4)
            self.register_buffer("scale", scale)
            self.register_buffer("packed", sum(codes[:, i] << (2 * i) for i in range(4)))

        def forward(self, x):
            codes = torch.stack([self.packed >> (2 * i) & 3 for i in range(4)], 1)
            weight = (codes.view(self.shape) / 1.5 - 1) * self.scale
            return nn.functional.linear(x, weight) if x.is_floating_point() else weight[x]

    for name, old in list(model.named_modules()):
        if isinstance(old, nn.Linear):
            model.set_submodule(name, TwoBits(old.weight.detach()))
    model.model.embed_tokens = model.lm_head
    return model


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (untouched, "100.0% of the 16-bit bytes"),
        (fractions_kept_as_floats, "100.0% of the 16-bit bytes"),
        (all_in_eight_bits, "at most a third"),
        (everything_in_two_bits, "little enough, but the perplexity"),
        (lambda model, tokenizer: "small", "should return the model"),
    ],
)
def test_target_mistakes(answer, says):
    outcome = lab.exercise("15-2").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


@pytest.mark.usefixtures("quick")
def test_a_function_that_returns_nothing_is_no_attempt():
    outcome = lab.exercise("15-2").check(lambda model, tokenizer: None)
    assert outcome.status is Status.NOT_ATTEMPTED


def test_no_tensor_is_overlooked_or_counted_twice():
    layer = nn.Linear(10, 10, bias=False)  # 100 floats
    twice = nn.Sequential(layer, layer)
    twice.hidden = torch.zeros(30, dtype=torch.int8)  # no buffer, and counted all the same
    layer.register_buffer("halves", torch.zeros(5, dtype=torch.float16))
    assert stored_bytes(twice) == {"integers": 30, "trained floats": 200, "frozen floats": 10}


@pytest.mark.parametrize(("double", "scales"), [(False, 4 * 64), (True, 64 + 4)])
def test_packed_weights_count_with_their_scales(double, scales):
    import bitsandbytes as bnb

    kind = {"quant_type": "nf4", "compress_statistics": double}
    layer = bnb.nn.Linear4bit(64, 64, bias=False, **kind).to("cpu")
    assert stored_bytes(layer) == {"4-bit matrices": 64 * 64 // 2, "their scales": scales}


def test_tensors_in_lists_and_dicts_count():
    model = nn.Module()
    model.kept = [torch.zeros(1000, dtype=torch.int8), {"a": (torch.zeros(7, dtype=torch.int8),)}]
    model.kept.append(model.kept)
    model.layers = [nn.Linear(10, 10, bias=False)]  # not registered
    assert stored_bytes(model) == {"integers": 1007, "trained floats": 200}


def test_a_storage_counts_once_and_whole():
    model, flat = nn.Module(), torch.zeros(1000, dtype=torch.int8)
    model.a, model.b = flat[:10], flat[10:20]
    assert stored_bytes(model) == {"integers": 1000}
    model.a, model.b = torch.zeros(1000, dtype=torch.int8).view(torch.float64), None
    assert stored_bytes(model) == {"frozen floats": 1000}


@pytest.mark.parametrize("kinds", [(torch.float32, torch.int8), (torch.int8, torch.float32)])
def test_of_two_views_the_larger_counts(kinds):
    model, flat = nn.Module(), torch.zeros(1000, dtype=torch.int8)
    model.a, model.b = (flat.view(kind) for kind in kinds)
    assert stored_bytes(model) == {"integers": 1000}
