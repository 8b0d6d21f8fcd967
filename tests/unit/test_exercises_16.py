"""Lesson 16's exercises: the stub, the solution, and the mistakes people make."""

import ast
import math
from functools import partial
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from exercise_rules import stub_and_solution
from torch.utils.checkpoint import checkpoint

import labkit as lab
from labkit.exercises import Status, lesson_16
from labkit.exercises.lesson_16 import JOBS, large, roomy

ROOT = Path(__file__).resolve().parents[2]


test_stub_and_solution = stub_and_solution("16")


def refused(id, answer):
    outcome = lab.exercise(id).check(answer)
    assert outcome.status is Status.NOT_YET
    return outcome.message


# --- 1: predict a slowdown ------------------------------------------------------------------------


def test_a_stub_that_is_a_function():
    assert lab.exercise("16-1").check(lambda *job: None).status is Status.NOT_ATTEMPTED


def answer(*, operations=8, crossings=3, nbytes=2, hide=None, seconds=False):
    """The solution, but for what is named."""

    def slowdown(parameters, tokens, flops_per_second, bytes_per_second, hidden):
        arithmetic = operations * parameters * tokens / flops_per_second
        copies = crossings * nbytes * parameters / bytes_per_second
        hidden = hidden if hide is None else hide
        step = max(arithmetic, copies) if hidden else arithmetic + copies
        return step if seconds else step / arithmetic

    return slowdown


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (answer(crossings=2), "gradients find their way"),
        (answer(crossings=1), "once more for backward"),
        (answer(nbytes=4), "BF16 has two bytes"),
        (answer(operations=6), "8 operations for each weight and token"),
        (answer(hide=False), "which is longer?"),
        (answer(hide=True), "first it computes, then it copies"),
        (answer(seconds=True), "not how many seconds"),
        (answer(crossings=7), "Divide the bytes that cross"),
        (lambda *job: 0.0, "you return 0"),
        (lambda *job: math.nan, "A number is asked for"),
        (lambda *job: "twice", "'twice'"),
        (lambda *job: True, "A number is asked for"),
        (lambda parameters, tokens: 1, "TypeError"),
    ],
)
def test_slowdown_mistakes(given, says):
    assert says in refused("16-1", given)


def test_a_number_of_another_library_will_do():
    for kind in (np.float64, torch.tensor):
        given = lab.exercise("16-1").check(lambda *job, kind=kind: kind(lesson_16.slowdown(*job)))
        assert given.status is Status.CORRECT


def test_the_jobs_tell_sum_and_maximum_apart_and_one_is_hidden():
    assert {hidden for *_, hidden in JOBS} == {True, False}
    found = [lesson_16.slowdown(*job) for job in JOBS if job[-1]]
    assert min(found) == 1 < max(found)


# --- 2: the largest model in so many bytes --------------------------------------------------------


def training(*, leave=True, back=True, saving=None, rate=1e-3, compute="device"):
    """`large`, but for what is named."""

    def variant(device, blocks=24, steps=2):
        torch.manual_seed(0)
        place = "cpu" if compute == "host" else device
        layers = [torch.nn.Linear(512, 512, device=place) for _ in range(blocks)]
        parts = [part for layer in layers for part in (layer, torch.nn.ReLU())]
        model = torch.nn.Sequential(*parts)
        placed = list(model.parameters())
        hosted = [p.detach().to("cpu", copy=True) for p in placed]
        optimizer = torch.optim.AdamW(hosted, lr=rate)

        def go(there, p):
            there.grad, p.grad = p.grad.to("cpu", copy=True), None

        pairs = list(zip(hosted, placed, strict=True))
        for there, p in pairs if leave else ():
            p.register_post_accumulate_grad_hook(partial(go, there))
        for _ in range(steps):
            x = torch.randn(128, 512, device=device).to(place)
            with saving() if saving else torch.enable_grad():
                loss = model(x).square().mean()
            loss.backward()
            for there, p in () if leave else pairs:
                go(there, p)
            optimizer.step()
            with torch.no_grad():
                for there, p in pairs if back else ():
                    p.copy_(there)
            yield loss.to(device)

    return variant


def on_host(device, blocks=24, steps=2):
    """All weights on the host, as the lesson fetches them."""

    def fetch(layer, x):
        weights = {name: p.to(device, copy=True) for name, p in layer.named_parameters()}
        return torch.func.functional_call(layer, weights, x)

    torch.manual_seed(0)
    made = [torch.nn.Linear(512, 512, device=device) for _ in range(blocks)]
    layers = [layer.to("cpu") for layer in made]
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], lr=1e-3)
    for _ in range(steps):
        x = torch.randn(128, 512, device=device)
        for layer in layers:
            x = torch.relu(checkpoint(fetch, layer, x, use_reentrant=False))
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def sgd(device, blocks=24, steps=2):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512, device=device) for _ in range(blocks)]
    parts = [part for layer in layers for part in (layer, torch.nn.ReLU())]
    model = torch.nn.Sequential(*parts)

    def step(p):
        p.data.add_(p.grad, alpha=-1e-3)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(steps):
        loss = model(torch.randn(128, 512, device=device)).square().mean()
        loss.backward()
        yield loss


def few(device, blocks=24, steps=2):
    return (yield from roomy(device, blocks=8, steps=steps))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (roomy, "The optimizer's state is still there"),
        (training(leave=False), "*all* gradients are on the device"),
        (on_host, "Need the weights themselves leave the device?"),
        (training(saving=torch.autograd.graph.save_on_cpu), "It fits, but takes"),
        (training(back=False), "loss"),
        (training(rate=1e-1), "loss"),
        (training(compute="host"), "The host computes"),
        (sgd, "loss"),
        (few, "loss"),
    ],
)
def test_large_mistakes(given, says):
    assert says in refused("16-2", given)


def test_another_right_answer():
    assert lab.exercise("16-2").check(training()).status is Status.CORRECT


def test_an_experiment_that_yields_nothing_yet():
    def stub(device, blocks=24, steps=2):
        yield ...

    assert lab.exercise("16-2").check(stub).status is Status.NOT_ATTEMPTED


def test_the_targets_leave_room_and_bite():
    run, watch = lesson_16._simulated(large, 24)
    few_blocks, _ = lesson_16._simulated(roomy, 8)
    many, plain = lesson_16._simulated(roomy, 24)
    assert run.peak_bytes < 0.9 * few_blocks.peak_bytes < 0.5 * many.peak_bytes
    assert plain.crossing_bytes == 0
    # Gradients there and weights back: 8 bytes for each weight.
    assert watch.crossing_bytes == 8 * 24 * (512 * 512 + 512)


# --- the notebook ---------------------------------------------------------------------------------


def notebook_code():
    notebook = nbformat.read(ROOT / "notebooks" / "16_cpu_offload.ipynb", as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebook_shows_the_experiment_that_is_checked():
    [source] = [source for source in notebook_code() if "def roomy" in source]
    module = ast.parse(Path(lesson_16.__file__).read_text(encoding="utf-8"))
    [checked] = [node for node in module.body if getattr(node, "name", "") == "roomy"]
    [shown] = [node for node in ast.parse(source).body if getattr(node, "name", "") == "roomy"]
    checked.body = checked.body[1:]  # its docstring
    assert ast.dump(shown) == ast.dump(checked)


def test_what_the_lesson_says_of_accelerate():
    import accelerate

    with pytest.raises(TypeError, match="cpu_offload"):
        accelerate.Accelerator(cpu_offload=True)
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)
    assert type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
