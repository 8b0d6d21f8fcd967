"""Exercises of lesson 18: the tokens that hide a disk, and a GPU with room for a few layers."""

import torch

from gpumem.files import TemporaryFolder
from gpumem.trace import Category
from labkit.disk_store import DiskStore
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

# (weight, gradient, read, write, flops)
JOBS = (
    (2, 0, 8e9, 4e9, 48e12),
    (4, 0, 4e9, 2e9, 48e12),
    (4, 2, 8e9, 4e9, 96e12),
    (2, 4, 2e9, 1e9, 24e12),
)
LAYERS, WIDE, NARROW = 12, 2048, 64
ON_DEVICE, ON_HOST = 3.25, 5.25  # layers' weights; the quarters are for activations
roomy = from_notebook("18", "roomy", globals())


def tokens_to_hide(weight, gradient, read, write, flops):
    per_parameter = (2 * weight + 12 + gradient) / read + (weight + 12 + gradient) / write
    return per_parameter * flops / 6  # both times grow with the number of parameters


@check_of("18-1", tokens_to_hide)
def check_tokens(answer):
    return checks.expect_results(answer, tokens_to_hide, JOBS, slips=_slips) or checks.Correct(
        "That is right. The number of parameters is in both times and cancels: the same tokens "
        "hide the disk for any model."
    )


def _slips(weight, gradient, read, write, flops):
    def tokens(reading, writing, operations=6):
        return (reading / read + writing / write) * flops / operations

    reading, writing = 2 * weight + 12 + gradient, weight + 12 + gradient
    return {
        tokens(reading, weight + 12): "A gradient that is read back was written before.",
        tokens(writing, writing): "Forward is not the only one that needs the weight: backward "
        "reads it again.",
        tokens(reading - 4, writing - 4): "Adam's mean and square are 8 bytes; its master copy of "
        "the weight is 4 more.",
        tokens(reading, writing, 8): "Without checkpointing it is 6 operations per parameter and "
        "token: 2 forward, 4 backward.",
        max(reading / read, writing / write) * flops / 6: "Reading and writing come one after the "
        "other here: their times add up.",
    }


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


@check_of("18-2", thrifty)
def check_thrifty(answer):
    narrow = {"mode": "measure", "layers": LAYERS, "width": NARROW, "steps": 3}
    reference = checks.reference_run(roomy, shelf=None, **narrow)
    with TemporaryFolder() as folder:
        run = checks.run_experiment(answer, shelf=DiskStore(folder), **narrow)
        if problem := checks.same_losses(run, reference):
            return problem
        wide = narrow | {"mode": "simulate", "gpu": "t4", "width": WIDE}
        run = checks.run_experiment(answer, shelf=DiskStore(folder), **wide)
    layer_bytes = 4 * WIDE * WIDE
    peak = run.trace.peak()
    device_bytes = peak.total_bytes - peak.by_category.get(Category.UNATTRIBUTED, 0)
    if device_bytes > ON_DEVICE * layer_bytes:
        return (
            f"The losses are right. At its peak there are {device_bytes / layer_bytes:.1f} "
            f"layers on the GPU; at most three are allowed. Most of it is "
            f"{max(peak.by_category, key=peak.by_category.get)}."
        )
    start, stop = run.trace.steps()[-1]
    host_bytes = run.trace.peak("cpu", start=start, stop=stop).total_bytes
    if host_bytes > ON_HOST * layer_bytes:
        held = f"{host_bytes / layer_bytes:.1f} layers"
        return f"CPU memory holds {held} in the last step: they are to be on the shelf."
    return checks.Correct(
        f"That is right: {device_bytes / layer_bytes:.1f} of {LAYERS} layers on the GPU, "
        f"{host_bytes / layer_bytes:.1f} on the CPU."
    )
