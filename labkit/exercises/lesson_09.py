"""Lesson 09's exercises: the price of one name, and three leaks in a loop."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from labkit.exercises import Exercise, expect_number, run_experiment, same_losses
from labkit.experiment import Steps
from labkit.memory import Trace, format_bytes
from labkit.tracker import track

STEPS = 8
HIDDEN, OUTPUT = 256 * 512, 256 * 64  # numbers in what the hook sees, and in the result
MOST_PEAK = 0.5
# A record of plain numbers, or of one-element tensors, is no leak worth a word.
ALLOWED_GROWTH_BYTES = 4096


def more_gib():
    # One logits tensor: rows x tokens x vocabulary x 4 bytes.
    return 8 * 1024 * 49152 * 4 / 2**30


def check_name(answer: Any) -> str | None:
    both = "That is the old and the new logits. How much of it would be there without the old ones?"
    return expect_number(answer, more_gib(), unit="GiB", slips={2 * more_gib(): both})


def leaky(device, steps=STEPS):
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


def tight(device, steps=STEPS):
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


def check_tight(answer: Callable[..., Any]) -> str | None:
    reference = run_experiment(leaky, world="measure", steps=STEPS)
    different = same_losses(run_experiment(answer, world="measure", steps=STEPS), reference)
    if different:
        return different
    with Reads() as reads:
        trace = trace_of(answer)
    wasteful = trace_of(leaky)
    return (
        _still_growing(trace) or _dropped(reads) or _too_high(trace.peak_bytes, wasteful.peak_bytes)
    )


class Reads(TorchFunctionMode):
    """Counts how often something much smaller is made of a tensor, by the tensor's length.

    The records themselves may be kept anywhere and as anything; what they are made of must be read.
    Backward is not seen: it calls no function of Python's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = next((a for a in (*args, *(kwargs or {}).values()) if torch.is_tensor(a)), None)
        if given is not None and (
            function in (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist)
            or (torch.is_tensor(result) and 64 * result.numel() <= given.numel())
        ):
            self.counts[given.numel()] += 1
        return result


def _dropped(reads: Reads) -> str | None:
    """Whether one of the three records is gone: a step reads what it keeps a number of."""
    if reads.counts[HIDDEN] < STEPS:
        return "Nothing grows, but `norms` is gone: keep a number per step of what the hook sees."
    if reads.counts[OUTPUT] < 3 * STEPS:  # the loss, the mean and the validation
        return (
            "Nothing grows, but a record is gone: the outputs' means and the validation's total "
            "are still to be kept, as numbers."
        )
    return None


def trace_of(experiment: Callable[..., Any]) -> Trace:
    """The trace of all steps, on the CPU: a measurement watches the first two, and a simulation
    has no values for the numbers that a loop keeps."""
    device = torch.device("cpu")
    job = Steps(experiment, device, {"steps": STEPS})
    with track(device="cpu") as tracker, job.closing():
        for _ in job.take(STEPS, tracker):
            pass
        return job.trace(tracker)


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


def _too_high(peak_bytes: int, reference_bytes: int) -> str | None:
    most_bytes = int(MOST_PEAK * reference_bytes)
    if peak_bytes <= most_bytes:
        return None
    return (
        f"Nothing grows any more, but your peak is {format_bytes(peak_bytes)}; the target is at "
        f"most {format_bytes(most_bytes)}."
    )


EXERCISES = (
    Exercise(
        "09-1",
        question="How many GiB does the old `out` add to the peak?",
        hints=(
            "What is the largest tensor in `out`, and what is its shape?",
            "8 × 1024 tokens, each with a score of 4 bytes for each of 49,152 words.",
        ),
        solution=more_gib,
        check=check_name,
    ),
    Exercise(
        "09-2",
        question="Stop the three leaks without changing the losses.",
        hints=(
            "`norms`, `outputs` and `total` outlive a step. What does each need to keep?",
            "A number needs `.item()`; a validation needs `torch.no_grad()`.",
        ),
        solution=tight,
        check=check_tight,
    ),
)
