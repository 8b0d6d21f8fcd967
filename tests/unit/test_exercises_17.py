"""Lesson 17's exercises: the stub, the solution, and the mistakes people make."""

import ast
from pathlib import Path

import nbformat
import pytest
import torch
from exercise_rules import stub_and_solution

import labkit as lab
from labkit.exercises import Status
from labkit.exercises.lesson_17 import roomy, thrifty

ROOT = Path(__file__).resolve().parents[2]

test_stub_and_solution = stub_and_solution("17")


def refused(id, answer):
    outcome = lab.exercise(id).check(answer)
    assert outcome.status is Status.NOT_YET
    return outcome.message


def test_stubs_that_are_functions():
    assert lab.exercise("17-1").check(lambda *job: None).status is Status.NOT_ATTEMPTED
    assert lab.exercise("17-2").check(lambda *setting: None).status is Status.NOT_ATTEMPTED


def test_the_notebook_shows_the_same_training():
    notebook = nbformat.read(ROOT / "notebooks" / "17_nvme_offload.ipynb", as_version=4)
    shown = [cell.source for cell in notebook.cells if "def roomy" in cell.source]
    [function] = [
        node for node in ast.parse(shown[0]).body if getattr(node, "name", None) == "roomy"
    ]
    given = ast.parse((ROOT / "labkit/exercises/lesson_17.py").read_text()).body
    [ours] = [node for node in given if getattr(node, "name", None) == "roomy"]
    assert ast.unparse(function) == ast.unparse(ast.fix_missing_locations(_without_docstring(ours)))


def _without_docstring(function):
    function.body = function.body[1:]
    return function


# --- 1: tokens that hide the disk ----------------------------------------------------------------


def tokens(reading, writing, read, write, flops, operations=6):
    return (reading / read + writing / write) * flops / operations


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda w, g, r, b, f: tokens(w + 12 + g, w + 12 + g, r, b, f), "backward reads it again"),
        (lambda w, g, r, b, f: tokens(2 * w + 12, w + 12, r, b, f), "The gradient travels too"),
        (lambda w, g, r, b, f: tokens(2 * w + 12 + g, w + 12, r, b, f), "written before"),
        (lambda w, g, r, b, f: tokens(2 * w + 8 + g, w + 8 + g, r, b, f), "master copy"),
        (lambda w, g, r, b, f: tokens(2 * w + 12 + g, 12 + g, r, b, f), "has to be written, too"),
        (lambda w, g, r, b, f: tokens(2 * w + 12 + g, w + 12 + g, r, b, f, 2), "forward pass"),
        (lambda w, g, r, b, f: tokens(2 * w + 12 + g, w + 12 + g, r, b, f, 8), "checkpointing"),
        (lambda w, g, r, b, f: (3 * w + 24 + 2 * g) / (r + b) * f / 6, "not the two speeds"),
        (
            lambda w, g, r, b, f: max((2 * w + 12 + g) / r, (w + 12 + g) / b) * f / 6,
            "their times add up",
        ),
        (
            lambda w, g, r, b, f: 1 / tokens(2 * w + 12 + g, w + 12 + g, r, b, f),
            "upside down",
        ),
        (
            lambda w, g, r, b, f: (2 * w + 12 + g) / r + (w + 12 + g) / b,
            "disk's seconds for each parameter",
        ),
        (lambda w, g, r, b, f: "many", "'many'"),
        (lambda w, g: 1, "TypeError"),
    ],
)
def test_tokens_that_do_not_hide_it(answer, says):
    assert says in refused("17-1", answer)


# --- 2: one layer on the device ------------------------------------------------------------------


def test_the_whole_tower_reads_nothing():
    assert "nothing was read from the shelf" in refused("17-2", roomy)


def other_losses(device, shelf, layers=12, width=64, steps=3):
    for loss in thrifty(device, shelf, layers, width, steps):
        yield 2 * loss


def test_other_losses():
    assert "loss" in refused("17-2", other_losses)


def all_brought_at_once(device, shelf, layers=12, width=64, steps=3):
    """Keeps its weights on the shelf between steps, and all of them on the device in one."""
    torch.manual_seed(0)
    tower = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
    for number, layer in enumerate(tower):
        shelf.put(str(number), layer.weight)
        layer.weight.data = torch.empty(0)
    for _ in range(steps):
        for number, layer in enumerate(tower):
            layer.weight.data = shelf.get(str(number), device)
        loss = tower(torch.ones(4, width, device=device)).square().mean()
        loss.backward()
        for number, layer in enumerate(tower):
            shelf.put(str(number), layer.weight - 0.1 * layer.weight.grad)
            layer.weight.grad, layer.weight.data = None, torch.empty(0)
        yield loss


def test_all_layers_at_once_are_too_many():
    message = refused("17-2", all_brought_at_once)
    assert "at most three are allowed" in message


class Memory:
    """A shelf that is none: it keeps its tensors on the host."""

    def __init__(self, shelf):
        self.shelf, self.kept = shelf, {}

    def put(self, name, tensor):
        self.shelf.put(name, tensor)
        self.kept[name] = tensor.detach().to("cpu", copy=True)

    def get(self, name, device):
        self.shelf.get(name, "cpu")
        return self.kept[name].to(device, copy=True)


def hidden_on_the_host(device, shelf, layers=12, width=64, steps=3):
    yield from thrifty(device, Memory(shelf), layers, width, steps)


def test_the_host_is_not_the_disk():
    assert "they are to be on the shelf" in refused("17-2", hidden_on_the_host)
