"""Lesson 10's exercises: what a trace remembers, how to move off it, a compiler's trick by hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from labkit.exercises import (
    Exercise,
    call,
    expect_number,
    memory_target,
    run_experiment,
    same_losses,
)

MOST_PEAK = 0.8


def traced_gives():
    # The example's sum was above zero, so the trace holds `x.sum()` and no branch.
    return -3


def check_traced(answer: Any) -> str | None:
    if isinstance(answer, int | float) and answer == 0:
        return (
            "0 is what the Python function gives. The trace was made with a vector whose sum is "
            "above zero: which operators did it write down?"
        )
    return expect_number(answer, -3)


def portable_clip(x):
    # Below 1 the divisor is 1: both sides in one formula, and nothing for Python to decide.
    return x / x.norm().clamp(min=1)


def check_clip(answer: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    # Uneven, with signs and of two lengths, so that no limit on each number gives the same.
    long, short = torch.tensor([9.0, -2.0, 6.0, 0.5]), torch.tensor([0.6, -0.5, 0.3, 0.1])
    longer = torch.tensor([-8.0, 0.25, 3.0, -1.0, 2.0, 0.5, 7.0])
    for name, x in (("long", long), ("short", short), ("long", longer)):
        expected = x / max(float(x.norm()), 1.0)
        given = call(answer, x.clone())
        if not isinstance(given, torch.Tensor) or given.shape != x.shape:
            return f"A tensor of shape {tuple(x.shape)} is asked for; you gave {given!r}."
        if not torch.allclose(given, expected):
            return (
                f"For a {name} vector, {_shown(x)}, the result should be {_shown(expected)}; "
                f"yours is {_shown(given)}."
            )
    problem = _export_problem(answer, long)
    if problem:
        return (
            "The results are right, but torch.export does not take it: it still has to know a "
            f"value to go on ({problem}). Can a formula be right on both sides?"
        )
    return None


def _shown(vector: torch.Tensor) -> list[float]:
    return [round(number, 4) for number in vector.tolist()]


def _export_problem(answer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> str | None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return answer(x)

    try:
        torch.export.export(Module(), (x,))
    except Exception as error:  # many kinds, none of them public
        return type(error).__name__
    return None


def wasteful(device, batch_size=4, steps=3, activate=lambda h: h * torch.sigmoid(h)):
    torch.manual_seed(0)
    ups, downs = ([nn.Linear(a, b).to(device) for _ in range(6)] for a, b in ((64, 512), (512, 64)))
    optimizer = torch.optim.SGD([p for layer in ups + downs for p in layer.parameters()], lr=1e-2)
    for _ in range(steps):
        x = torch.randn(batch_size, 256, 64, device=device)
        for up, down in zip(ups, downs, strict=True):
            x = x + down(activate(up(x)))
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def frugal(device, batch_size=4, steps=3):
    # silu(h) is h * sigmoid(h) in one operator, which keeps h alone for backward.
    yield from wasteful(device, batch_size, steps, activate=nn.functional.silu)


def check_frugal(answer: Callable[..., Any]) -> str | None:
    reference = run_experiment(wasteful, world="measure", steps=3)
    run = run_experiment(answer, world="measure", steps=3)
    different = same_losses(run, reference)
    if different:
        return different
    extra = run.flops / reference.flops - 1
    if extra > 0.01:
        return (
            f"Your step does {extra:.0%} more arithmetic: it recomputes products. Keep every "
            "product and look at what stands between them."
        )
    return memory_target(run, int(MOST_PEAK * reference.peak_bytes))


EXERCISES = (
    Exercise(
        "10-1",
        question="What does the traced function return for minus ones?",
        hints=(
            "The trace holds the operators that ran for the example, in their order, and no `if`.",
            "For `torch.ones(3)` it ran `x.sum()`, and returned it.",
        ),
        solution=traced_gives,
        check=check_traced,
    ),
    Exercise(
        "10-2",
        question="Clip a vector to length 1 so that torch.export takes it.",
        hints=(
            "Dividing the short vector by 1 changes nothing. What is the divisor in general?",
            "`norm.clamp(min=1)` is the larger of the two.",
        ),
        solution=portable_clip,
        check=check_clip,
        kind="function",
    ),
    Exercise(
        "10-3",
        question="The same training at 80 % of the peak, eager and without recomputing products.",
        hints=(
            "Backward of `h * torch.sigmoid(h)` keeps two tensors: which?",
            "`torch.nn.functional.silu(h)` is the same function in one operator.",
        ),
        solution=frugal,
        check=check_frugal,
    ),
)
