"""Lesson 10's exercises: what a trace remembers, how to move off it, a compiler's trick by hand."""

import torch
from torch import nn

from labkit.exercises import checks
from labkit.exercises.engine import check_of

MOST_PEAK, MOST_EXTRA_FLOPS = 0.8, 0.01  # no product is to be recomputed


def traced_gives():
    # The example's sum was above zero, so the trace holds `x.sum()` and no branch.
    return -3


@check_of(
    "10-1",
    traced_gives,
    "The trace holds the operators that ran for the example, in their order, and no `if`.",
    "For `torch.ones(3)` it ran `x.sum()`, and returned it.",
)
def check_traced(answer):
    if answer == 0:
        return "0 is what the Python function gives: which operators did the trace write down?"
    return checks.expect_number(answer, -3)


def portable_clip(x):
    # Below 1 the divisor is 1: both sides in one formula, and nothing for Python to decide.
    return x / x.norm().clamp(min=1)


@check_of(
    "10-2",
    portable_clip,
    "Dividing the short vector by 1 changes nothing. What is the divisor in general?",
    "`norm.clamp(min=1)` is the larger of the two.",
)
def check_clip(answer):
    # Uneven and with signs, so that no limit on each number gives the same.
    long, short = torch.tensor([9.0, -2.0, 6.0, 0.5]), torch.tensor([0.6, -0.5, 0.3, 0.1])
    for name, x in (("long", long), ("short", short)):
        expected = x / max(float(x.norm()), 1.0)
        given = checks.call(answer, x.clone())
        if not isinstance(given, torch.Tensor) or given.shape != x.shape:
            return f"A tensor of shape {tuple(x.shape)} is asked for; you gave {given!r}."
        if not torch.allclose(given, expected):
            return f"For a {name} vector, {x}, the result should be {expected}; yours is {given}."
    clip = nn.Module()
    clip.forward = answer
    try:
        torch.export.export(clip, (long,))
    except Exception as error:  # many kinds, none of them public
        return f"The results are right, but torch.export does not take it: {type(error).__name__}."
    return None


def wasteful(device, batch_size=4, steps=3):
    torch.manual_seed(0)
    ups, downs = ([nn.Linear(a, b).to(device) for _ in range(6)] for a, b in ((64, 512), (512, 64)))
    optimizer = torch.optim.SGD([p for layer in ups + downs for p in layer.parameters()], lr=1e-2)
    for _ in range(steps):
        x = torch.randn(batch_size, 256, 64, device=device)
        for up, down in zip(ups, downs, strict=True):
            h = up(x)
            x = x + down(h * torch.sigmoid(h))
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def frugal(device, batch_size=4, steps=3):
    torch.manual_seed(0)
    ups, downs = ([nn.Linear(a, b).to(device) for _ in range(6)] for a, b in ((64, 512), (512, 64)))
    optimizer = torch.optim.SGD([p for layer in ups + downs for p in layer.parameters()], lr=1e-2)
    for _ in range(steps):
        x = torch.randn(batch_size, 256, 64, device=device)
        for up, down in zip(ups, downs, strict=True):
            # silu(h) is h * sigmoid(h) in one operator, which keeps h alone for backward.
            x = x + down(nn.functional.silu(up(x)))
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@check_of(
    "10-3",
    frugal,
    "Backward of `h * torch.sigmoid(h)` keeps two tensors: which?",
    "`torch.nn.functional.silu(h)` is the same function in one operator.",
)
def check_frugal(answer):
    run, reference = checks.run_both(answer, wasteful, mode="measure", steps=2)
    return (
        checks.same_losses(run, reference)
        or checks.arithmetic_limit(run, reference, MOST_EXTRA_FLOPS)
        or checks.memory_target(run, int(MOST_PEAK * reference.peak_bytes))
    )
