"""Exercises of lesson 17: a slowdown from bytes and bandwidth, and a large model in few bytes."""

from functools import cache, partial, wraps
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpumem.runs import Run
from gpumem.units import format_bytes
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

# (parameters, tokens, flops_per_second, bytes_per_second, hidden)
JOBS = (
    (8_000_000_000, 2048, 100e12, 25e9, False),
    (8_000_000_000, 2048, 100e12, 25e9, True),  # the copies are what takes time
    (8_000_000_000, 8192, 100e12, 25e9, True),  # all hidden
    (1_000_000_000, 16384, 300e12, 50e9, False),
)
FEW, MANY = 8, 24  # blocks
# A GPU made up so that the link matters for layers this small; the link is PCIe 4.0, 16 lanes.
OPERATIONS_PER_SECOND, BYTES_PER_SECOND = 2.5e12, 31.5e9
MOST_TIME = 2.0
GPU = "rtx-4090"  # on which it is simulated: any would do, as nothing comes near its memory
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
roomy = from_notebook("17", "roomy", globals())


def slowdown(parameters, tokens, flops_per_second, bytes_per_second, hidden):
    arithmetic = 8 * parameters * tokens / flops_per_second  # 2 forward, 2 again, 4 backward
    copies = 3 * 2 * parameters / bytes_per_second  # fetched twice, gradients back; 2 bytes each
    together = max(arithmetic, copies) if hidden else arithmetic + copies
    plain = 6 * parameters * tokens / flops_per_second  # nothing copied, nothing computed again
    return together / plain


@check_of("17-1", slowdown)
def check_slowdown(answer):
    return checks.expect_results(answer, slowdown, JOBS, slips=_slips)


def _slips(parameters, tokens, flops_per_second, bytes_per_second, hidden):
    def other(operations=8, crossings=3, nbytes=2, plain=6, hidden=hidden):
        once = parameters * tokens / flops_per_second  # seconds of one operation for each
        arithmetic = operations * once
        copies = crossings * nbytes * parameters / bytes_per_second
        return (max(arithmetic, copies) if hidden else arithmetic + copies) / (plain * once)

    return {
        other(hidden=not hidden): "Hidden copies take no extra time: the longer of the two counts. "
        "If the GPU waits, it first computes and then copies.",
        other(crossings=2): "Gradients have to cross the link, too.",
        other(nbytes=4): "A weight in BF16 has two bytes.",
        other(operations=6): "Forward is computed twice: that makes 8 operations for each "
        "weight and token, not 6.",
        other(plain=8): "Plain training computes forward once: divide by the time of 6 operations "
        "for each weight and token, not 8.",
    }


def large(device, blocks=24, steps=2):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512, device=device) for _ in range(blocks)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.ReLU())])
    placed = list(model.parameters())
    hosted = [p.detach().to("cpu", copy=True) for p in placed]
    optimizer = torch.optim.AdamW(hosted, lr=1e-3)

    def leave(there, p):  # a gradient goes to the CPU as soon as it is there
        there.grad, p.grad = p.grad.to("cpu", copy=True), None

    for there, p in zip(hosted, placed, strict=True):
        p.register_post_accumulate_grad_hook(partial(leave, there))
    for _ in range(steps):
        loss = model(torch.randn(128, 512, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for there, p in zip(hosted, placed, strict=True):
                p.copy_(there)
        yield loss


class _Watch(TorchDispatchMode):
    """Counts bytes copied between device and CPU, and matrix products that the CPU computes."""

    def __init__(self) -> None:
        super().__init__()
        self.crossing_bytes = self.host_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = [x for x in args if isinstance(x, torch.Tensor)][-1]
            if source.device != out.device:
                self.crossing_bytes += source.nbytes
        if func in _PRODUCTS and out.device == torch.device("cpu"):
            self.host_products += 1
        return out


def _pinning_nothing(experiment):
    """Return the experiment such that it pins no memory where there is no accelerator.

    PyTorch refuses to there, and the lesson recommends it. Pinned memory is as large as other.
    """

    def unpinned(make):
        return lambda *arguments, pin_memory=False, **named: make(*arguments, **named)

    @wraps(experiment)
    def steps(*arguments, **named):
        makers = (torch.empty, torch.empty_like, torch.zeros, torch.zeros_like)
        patched = {make.__name__: unpinned(make) for make in makers}
        pin = mock.patch.object(torch.Tensor, "pin_memory", lambda x, *_: x)
        with pin, mock.patch.multiple(torch, **patched):
            yield from experiment(*arguments, **named)

    return experiment if torch.accelerator.is_available() else steps


@cache
def _simulated(experiment, blocks: int) -> tuple[Run, _Watch]:
    """Return the simulated run, and what its second step copied and computed where."""
    watches: list[_Watch] = []

    def watched(device, blocks=blocks, steps=2):
        training = _pinning_nothing(experiment)(device, blocks=blocks, steps=steps)
        for _ in range(steps):
            watches.append(_Watch())
            with watches[-1]:
                loss = next(training, None)
            yield loss

    return checks.run_experiment(watched, mode="simulate", gpu=GPU), watches[-1]


def _seconds(run: Run, watch: _Watch) -> float:
    return run.flops / OPERATIONS_PER_SECOND + watch.crossing_bytes / BYTES_PER_SECOND


@check_of("17-2", large)
def check_large(answer):
    run, watch = _simulated(answer, MANY)
    few, _ = _simulated(roomy, FEW)
    many, plain = _simulated(roomy, MANY)
    if watch.host_products:
        return (
            "The CPU computes matrix products. Offloading moves what is stored, not the products."
        )
    if run.peak_bytes > few.peak_bytes:
        advice = "The optimizer is gone, but at one moment *all* gradients are on the GPU."
        if run.bytes_of("optimizer"):
            advice = "The optimizer's state is still there, two numbers for each weight."
        return f"{checks.memory_target(run, few.peak_bytes)} {advice}"
    times = _seconds(run, watch) / _seconds(many, plain)
    if times > MOST_TIME:
        return (
            f"It fits, but takes {times:.2f} times as long, with "
            f"{format_bytes(watch.crossing_bytes)} over the link. Need the weights themselves "
            "leave the GPU?"
        )
    runs = checks.run_both(_pinning_nothing(answer), roomy, mode="measure", blocks=MANY, steps=2)
    return checks.same_losses(*runs) or checks.Correct(
        f"That is right: {MANY} blocks in {format_bytes(run.peak_bytes)}, where {FEW} took "
        f"{format_bytes(few.peak_bytes)}, in {times:.2f} times the time."
    )
