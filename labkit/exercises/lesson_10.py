"""Lesson 10's exercises: code that torch.export takes, and a scripted tower with a lower peak."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from gpumem.inputs import shown
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

MOST_PEAK, MOST_PIECES = 0.8, 4
Block = from_notebook("10", "Block", globals())
script_all = from_notebook("10", "script_all", globals())


def portable_clip(x):
    # Below 1 the divisor is 1: both sides in one formula, and nothing for Python to decide.
    return x / x.norm().clamp(min=1)


@check_of("10-1", portable_clip)
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


def tower(device: torch.device | str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(128) for _ in range(12)]).to(device)


def train(device: torch.device, convert: Callable[[nn.Module], nn.Module]) -> Iterator:
    model = convert(tower(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    while True:
        x = torch.randn(1, 64, 128, device=device)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def script_less_at_once(model):
    # Each piece's backward is a separate step, which frees the piece's activations at its end.
    # The largest piece decides, so all are equal.
    return nn.Sequential(*[torch.jit.script(model[at : at + 3]) for at in range(0, 12, 3)])


def pieces(model: nn.Module) -> int:
    """Return how many scripted modules Python calls: what is inside one does not count."""
    if isinstance(model, torch.jit.ScriptModule):
        return 1
    return sum(map(pieces, model.children()))


@check_of("10-2", script_less_at_once)
def check_pieces(answer):
    model = checks.call(answer, tower())
    if not isinstance(model, nn.Module):
        return f"A model is asked for; you returned {shown(model)}."
    scripted = set()
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            scripted.update(module.parameters())
    if scripted != set(model.parameters()):
        return "Not every parameter belongs to a scripted module."
    if pieces(model) > MOST_PIECES:
        return f"{pieces(model)} scripted modules; at most {MOST_PIECES} are asked for."
    run = checks.run_experiment(train, mode="measure", steps=2, convert=answer)
    reference = checks.reference_run(train, mode="measure", steps=2, convert=script_all)
    return checks.same_losses(run, reference) or checks.memory_target(
        run, int(MOST_PEAK * reference.peak_bytes)
    )
