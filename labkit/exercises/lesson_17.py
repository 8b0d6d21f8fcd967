"""Exercises of lesson 17: the tokens that hide a disk, and a device that holds one layer."""

import math
from contextlib import closing

import torch

from labkit.claims import plain_value
from labkit.disk import Scratch, Shelf
from labkit.exercises import Exercise
from labkit.exercises.checks import (
    Feedback,
    call,
    expect_number,
    run_experiment,
    same_losses,
)
from labkit.memory import Category, format_bytes

# --- 1: how many tokens hide the disk? -----------------------------------------------------------


def tokens_to_hide(weight, gradient, read, write, flops):
    per_parameter = (2 * weight + 12 + gradient) / read + (weight + 12 + gradient) / write
    return per_parameter * flops / 6  # both times grow with the number of parameters


# (weight, gradient, read, write, flops)
JOBS = (
    (2, 0, 8e9, 4e9, 48e12),
    (4, 0, 4e9, 2e9, 48e12),
    (4, 2, 8e9, 4e9, 96e12),
    (2, 4, 2e9, 1e9, 24e12),
)


def _wrong_ways(weight, gradient, read, write, flops):
    """What people compute instead, and what to say then."""
    state, both = 12, weight + 12 + gradient

    def tokens(reading, writing, operations=6):
        return (reading / read + writing / write) * flops / operations

    reading = 2 * weight + state + gradient
    return {
        tokens(2 * weight + state + gradient, weight + state): "A gradient that is read back was "
        "written before.",
        tokens(weight + state + gradient, both): "Forward is not the only one that needs the "
        "weight: backward reads it again.",
        tokens(2 * weight + state, weight + state): "The gradient travels too: it is written, and "
        "read back for the optimizer.",
        tokens(2 * weight + 8 + gradient, weight + 8 + gradient): "Adam's mean and square are 8 "
        "bytes; its master copy of the weight is 4 more.",
        tokens(reading, state + gradient): "The new weight has to be written, too.",
        tokens(reading, both, 2): "2 operations per parameter and token are a forward pass; "
        "backward costs twice as many again.",
        tokens(reading, both, 8): "Without checkpointing it is 6 operations per parameter and "
        "token: 2 forward, 4 backward.",
        (reading + both) / (read + write) * flops / 6: "Reading and writing come one after the "
        "other: add the two times, not the two speeds.",
        max(reading / read, both / write) * flops / 6: "Reading and writing come one after the "
        "other here: their times add up.",
        1 / tokens(reading, both): "That is upside down: seconds of the disk for each parameter, "
        "over seconds of the GPU for each parameter and token.",
        reading / read + both / write: "Those are the disk's seconds for each parameter. In how "
        "many tokens does the GPU spend as long on it?",
    }


def check_tokens(answer):
    for job in JOBS:
        given, right = call(answer, *job), tokens_to_hide(*job)
        problem = expect_number(given, right)
        if problem is None:
            continue
        value, _ = plain_value(given)
        for wrong, advice in _wrong_ways(*job).items():
            told_apart = not math.isclose(wrong, right, rel_tol=1e-3)
            if told_apart and value and math.isclose(value, wrong, rel_tol=1e-3):
                return f"{_job_text(*job)}: {advice}"
        return f"{_job_text(*job)}: {problem}"
    return Feedback(
        True,
        "That is right. The number of parameters is in both times and cancels: the same tokens "
        "hide the disk for any model.",
    )


def _job_text(weight, gradient, read, write, flops):
    return (
        f"Weights of {weight} and gradients of {gradient} bytes, {read / 1e9:g} GB/s read and "
        f"{write / 1e9:g} GB/s written, {flops / 1e12:g} TFLOP/s"
    )


# --- 2: a device that holds one layer ------------------------------------------------------------

LAYERS, WIDE, NARROW = 12, 2048, 64
ON_DEVICE, ON_HOST = 3.25, 5.25  # layers' weights; the quarters are for activations


def roomy(device, shelf, layers=12, width=64, steps=3):
    """The training that the notebook shows: the whole tower on the device."""
    torch.manual_seed(0)
    linear = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
    tower = torch.nn.Sequential(*linear).to(device)
    for _ in range(steps):
        loss = tower(torch.ones(4, width, device=device)).square().mean()
        loss.backward()
        for weight in tower.parameters():
            weight.data -= 0.1 * weight.grad
            weight.grad = None
        yield loss


def thrifty(device, shelf, layers=12, width=64, steps=3):
    torch.manual_seed(0)
    tower = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])

    def come(layer, *_):
        layer.weight.untyped_storage().resize_(layer.weight.nbytes)
        layer.weight.data.copy_(shelf.get(layer.file, "cpu"))

    def leave(layer, *_):
        layer.weight.untyped_storage().resize_(0)

    for number, layer in enumerate(tower):
        layer.file = str(number)
        shelf.put(layer.file, layer.weight)
        layer.weight.data = torch.empty_like(layer.weight, device=device)
        leave(layer)
        layer.register_forward_pre_hook(come)
        layer.register_forward_hook(leave)
        if number:  # the first layer's backward has no input to differentiate by
            layer.register_full_backward_pre_hook(come)

        def update(weight, layer=layer):
            leave(layer)
            new = shelf.get(layer.file, "cpu") - 0.1 * weight.grad.to("cpu")
            weight.grad = None
            shelf.put(layer.file, new)

        layer.weight.register_post_accumulate_grad_hook(update)

    for _ in range(steps):
        loss = tower(torch.ones(4, width, device=device)).square().mean()
        loss.backward()
        yield loss


def check_thrifty(answer):
    with Scratch() as folder:
        shelf = Shelf(folder)
        ours = run_experiment(_with(roomy, Shelf(folder), NARROW), world="measure", steps=3)
        run = run_experiment(_with(answer, shelf, NARROW), world="measure", steps=3)
        if problem := same_losses(run, ours):
            return problem
        if not shelf.read_bytes:
            return (
                "The losses are right, but nothing was read from the shelf: where are the weights?"
            )
        wide = run_experiment(
            _with(answer, Shelf(folder), WIDE), world="simulate", gpu="t4", steps=3
        )
    return _places(wide)


def _with(answer, shelf, width):
    """The experiment with its shelf: what runs experiments hands over plain values only."""

    def experiment(device, steps=3):
        with closing(call(answer, device, shelf, LAYERS, width, steps)) as generator:
            yield from generator

    return experiment


def _places(run):
    layer_bytes = 4 * WIDE * WIDE
    peak = run.trace.peak()
    device_bytes = peak.total_bytes - peak.by_category.get(Category.UNATTRIBUTED, 0)
    if device_bytes > ON_DEVICE * layer_bytes:
        return (
            f"The losses are right. At its peak the device holds {device_bytes / layer_bytes:.1f} "
            f"layers, {format_bytes(device_bytes)}; at most three are allowed. Most of it is "
            f"{max(peak.by_category, key=peak.by_category.get)}. Who is still there when the next "
            "one comes?"
        )
    start, stop = run.trace.steps()[-1]
    host_bytes = run.trace.peak("cpu", start=start, stop=stop).total_bytes
    if host_bytes > ON_HOST * layer_bytes:
        return (
            f"The device is as empty as it should be, but the host holds "
            f"{host_bytes / layer_bytes:.1f} layers in the last step: they are to be on the shelf."
        )
    return Feedback(
        True,
        f"That is right: {device_bytes / layer_bytes:.1f} of {LAYERS} layers on the device, "
        f"{host_bytes / layer_bytes:.1f} on the host.",
    )


EXERCISES = (
    Exercise(
        "17-1",
        question="From how many tokens per step on does computing hide the disk?",
        hints=(
            "For each parameter: how many bytes does a step read, and how many does it write? "
            "Divide each by its speed and add.",
            "For each parameter and token the GPU does 6 operations, so it takes `6 / flops` "
            "seconds. How many tokens fill the disk's seconds?",
        ),
        solution=tokens_to_hide,
        check=check_tokens,
        kind="function",
    ),
    Exercise(
        "17-2",
        question="The same training with three layers' weights on the device.",
        hints=(
            "The lesson's `OnDisk` does it for any model: what is left of it with plain SGD?",
            "Fill a layer's storage in `register_forward_pre_hook` and "
            "`register_full_backward_pre_hook`, empty it in `register_forward_hook`, and step in "
            "`register_post_accumulate_grad_hook`, on the host.",
        ),
        solution=thrifty,
        check=check_thrifty,
        kind="function",
    ),
)
