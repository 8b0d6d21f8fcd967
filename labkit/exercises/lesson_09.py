"""Lesson 09's exercises: the price of one name, and three leaks in a loop."""

from collections import Counter
from contextlib import closing

import torch
from torch import nn

from labkit.exercises.checks import expect_number, run_both, same_losses
from labkit.exercises.engine import check_of
from labkit.experiment import Steps
from labkit.trace import Trace
from labkit.tracker import track
from labkit.values import format_bytes

STEPS = 8
MOST_PEAK = 0.5
# A record of plain numbers, or of one-element tensors, is no leak worth a word.
ALLOWED_GROWTH_BYTES = 4096


def more_gib():
    # One logits tensor: rows x tokens x vocabulary x 4 bytes.
    return 8 * 1024 * 49152 * 4 / 2**30


@check_of(
    "09-1",
    more_gib,
    "What is the largest tensor in `out`, and what is its shape?",
    "8 × 1024 tokens, each with a score of 4 bytes for each of 49,152 words.",
)
def check_name(answer):
    both = "That is the old and the new logits. How much of it would be there without the old ones?"
    return expect_number(answer, more_gib(), unit="GiB", slips={2 * more_gib(): both})


def leaky(device, steps=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    norms, outputs, total = [], [], 0
    model[1].register_forward_hook(lambda module, args, result: norms.append(result))
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(256, 64, device=device)
        result = model(x)
        loss = (result - x).square().mean()
        loss.backward()
        optimizer.step()
        outputs.append(result)  # only their means are read later
        total = total + (model(x) - x).square().mean()  # validation
        yield loss


def tight(device, steps=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    norms, means, total = [], [], 0
    # Numbers are kept, no tensors.
    model[1].register_forward_hook(lambda module, args, result: norms.append(result.norm().item()))
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(256, 64, device=device)
        result = model(x)
        loss = (result - x).square().mean()
        loss.backward()
        optimizer.step()
        means.append(result.mean().item())
        with torch.no_grad():  # validation needs no history
            total = total + (model(x) - x).square().mean().item()
        yield loss


@check_of(
    "09-2",
    tight,
    "`norms`, `outputs` and `total` outlive a step. What does each need to keep?",
    "A number needs `.item()`; a validation needs `torch.no_grad()`.",
)
def check_tight(answer):
    if problem := same_losses(*run_both(answer, leaky, mode="measure", steps=STEPS)):
        return problem
    trace = _trace_of(answer)
    if problem := _still_growing(trace):
        return problem
    most_bytes = int(MOST_PEAK * _trace_of(leaky).peak_bytes)
    if trace.peak_bytes <= most_bytes:
        return None
    peak, most = format_bytes(trace.peak_bytes), format_bytes(most_bytes)
    return f"Nothing grows any more, but your peak is {peak}; the target is at most {most}."


def _trace_of(experiment) -> Trace:
    """Return the trace of all steps on the CPU; a measurement watches only the first two."""
    device = torch.device("cpu")
    job = Steps(experiment, device, {"steps": STEPS})
    with track(device="cpu") as tracker, closing(job):
        for _ in job.take(STEPS, tracker):
            pass
        return tracker.trace()


def _still_growing(trace: Trace) -> str | None:
    ends = [stop - 1 for _, stop in trace.steps()]
    before, after = (trace.live_at(ends[n]) for n in (2, STEPS - 2))
    grown = sum(s.nbytes for s in after) - sum(s.nbytes for s in before)
    if grown <= ALLOWED_GROWTH_BYTES:
        return None
    newest = max(Counter(after) - Counter(before), key=lambda storage: storage.nbytes)
    where = f" in module {newest.module!r}" if newest.module else ""
    return (
        f"Your loop holds {format_bytes(grown)} more after step {STEPS - 1} than after step 3. "
        f"Among what it holds is a tensor of shape {newest.shape} that {newest.operator} "
        f"made{where}: who keeps it?"
    )
