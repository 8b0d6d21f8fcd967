"""The calculator without a frontend: values are set, and what it shows is read."""

import dataclasses
from types import SimpleNamespace

import ipywidgets
import pytest

import labkit as lab
from gpumem.estimation.textbook_formula import formula_estimate
from gpumem.units import GIB
from labkit.widgets import calculator as module
from labkit.widgets.calculator import calculate, calculator, part_table, verdict

TINY = {"model": "SmolLM2-tiny", "gpu": "t4", "precision": "fp32", "seq_len": 128}


@pytest.fixture
def pair():
    how = {"batch_size": 4, "seq_len": 128}
    return formula_estimate("SmolLM2-tiny", **how), lab.estimate("SmolLM2-tiny", gpu="t4", **how)


def test_each_choice_is_answered_with_the_names_of_calculate(monkeypatch):
    shown, asked = [], []
    monkeypatch.setattr(module, "display", shown.append)
    monkeypatch.setattr(module, "calculate", lambda **chosen: asked.append(chosen) or len(asked))
    calculator(**TINY, batch_size=3)
    answer, box = shown
    first = {**TINY, "batch_size": 3, "optimizer": "adamw", "checkpointing": False}
    assert (answer, asked) == (1, [first])
    controls = {each.description: each for each in box.children if hasattr(each, "description")}
    assert controls.keys() == first.keys()
    assert isinstance(controls["batch_size"], ipywidgets.SelectionSlider)
    controls["precision"].value = "amp-fp16"
    assert (shown[2], asked[1]) == (2, {**first, "precision": "amp-fp16"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "bf16"}, "no bfloat16 in hardware"),
        ({"model": "/no/such/<b>folder</b>"}, "unknown model"),
    ],
)
def test_a_refused_choice_says_why(changes, reason):
    refused = calculate(**{**TINY, **changes})
    assert refused.text.startswith("This cannot be trained: ")
    assert reason in refused.text
    assert "<b>folder" not in refused.html


def test_the_answer_holds_the_verdict_and_every_part(pair):
    answer = calculate(**TINY, batch_size=4)
    assert answer.text.startswith("It fits. PyTorch reserves ")
    for text in (part_table(*pair).text, *map(str, pair[0].by_part), "2 × 4 P", " 1.00 "):
        assert text in answer.text
    together = answer.text.splitlines()[-1]
    for nbytes in (pair[0].total_bytes, pair[1].peak_allocated_bytes):
        assert lab.format_bytes(nbytes) in together


@pytest.mark.parametrize(
    ("reserved", "capacity", "total", "words"),
    [
        (4, 8, 5, ("✔", "It fits", "same answer")),
        (9, 8, 5, ("✘", "does not fit", "out-of-memory")),
        (9, 8, 10, ("✘", "does not fit", "same answer")),
        (4, 8, 10, ("✔", "It fits", "larger card")),
        (7.8, 8, 5, ("!", "Too close to call", "The formula says 5.00 GiB.")),
        (8.2, 8, 5, ("!", "Too close to call", "The formula says 5.00 GiB.")),
    ],
)
def test_verdicts(pair, reserved, capacity, total, words):
    sizes = {"reserved_bytes": int(reserved * GIB), "capacity_bytes": capacity * GIB}
    trace = dataclasses.replace(pair[1], run=dataclasses.replace(pair[1].run, **sizes))
    text, look = verdict(SimpleNamespace(total_bytes=total * GIB), trace)
    for word, place in zip(words, (look.symbol, *text.splitlines()), strict=True):
        assert word in place
