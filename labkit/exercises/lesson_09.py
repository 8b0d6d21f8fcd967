"""Lesson 09's exercises: which lines of a loop leak, and three leaks to stop."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import nn

from gpumem.experiment import Steps
from gpumem.inputs import InputError, shown
from gpumem.trace import Trace
from gpumem.tracker import track
from gpumem.units import format_bytes
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

#: The lines of exercise 1, and what to say to whoever judges one of them wrongly.
LINES = {
    "A": "kept.append(out.loss)",
    "B": "total = total + out.loss",
    "C": "kept.append(out.logits.detach())",
    "D": "kept.append(out.logits.square().mean())",
    "E": "kept.append(out.logits.detach().square().mean())",
    "F": "with torch.no_grad(): kept.append(model(input_ids=ids).logits[0, 0, 0])",
}
WHY = {
    "A": "has `backward()` run on this loss, and what is then left of its history?",
    "B": "which operations lead to `total`, and what does each still keep after `backward()`?",
    "C": "`detach()` cuts the history. What does it do to the tensor itself?",
    "D": "`square` keeps its input. Was it called before or after `backward()`?",
    "E": "does an operation keep its input where nothing needs a gradient?",
    "F": "there is no history. But of which tensor is this one number a view?",
}
STEPS = 8
MOST_PEAK = 0.5
# A record of plain numbers, or of small tensors, is no leak worth a word.
ALLOWED_GROWTH_BYTES = 4096
# `leaky` calls the model twice in a step, and its hook runs in each call.
HOOK = defaultdict(str, norm=" The hook runs in the validation pass, too.")
leaky = from_notebook("09", "leaky", globals())


def leaking():
    # C and F keep logits; D keeps them for a backward pass that never comes.
    return "CDF"


@check_of("09-1", leaking)
def check_lines(answer):
    given = _letters(answer)
    for letter, line in LINES.items():
        if (letter in given) != (letter in leaking()):
            return f"Think again about {letter}, `{line}`: {WHY[letter]}"
    return None


def _letters(answer: Any) -> set[str]:
    if isinstance(answer, Iterable):
        given = {part.upper() for part in "".join(map(str, answer)) if part not in " ,"}
        if given <= LINES.keys():
            return given
    raise InputError(f'give letters from A to F, such as "AB", not {shown(answer)}')


def tight(device, records, steps=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def record_norm(module, args, hidden):
        records["norm"].append(hidden.detach().norm())  # a norm keeps its input for backward

    model[1].register_forward_hook(record_norm)
    for _ in range(steps):
        x = torch.randn(256, 64, device=device)
        result = model(x)
        loss = (result - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        records["loss"].append(loss)
        records["row"].append(result[0].detach().clone())  # a view keeps all rows
        with torch.no_grad():  # nobody calls backward on it
            records["validation"].append((model(x) - x).square().mean())
        yield loss


@check_of("09-2", tight)
def check_tight(answer):
    records, trace = _run(answer)
    right_records, right_trace = _run(leaky)
    if problem := _other_records(records, right_records):
        return problem
    if problem := _still_growing(trace):
        return problem
    most_bytes = int(MOST_PEAK * right_trace.peak_bytes)
    if trace.peak_bytes <= most_bytes:
        return None
    peak, most = format_bytes(trace.peak_bytes), format_bytes(most_bytes)
    return f"Nothing grows any more, but your peak is {peak}; the target is at most {most}."


def _run(experiment: Callable[..., Iterator[Any]]) -> tuple[dict[str, list[Any]], Trace]:
    """Return the records and the trace of all steps on the CPU; a measurement watches only two."""
    device = torch.device("cpu")
    records = {"norm": [], "loss": [], "row": [], "validation": []}
    job = Steps(experiment, device, {"records": records, "steps": STEPS})
    with track(device="cpu") as tracker, closing(job):
        for _ in job.take(STEPS, tracker):
            pass
        trace = tracker.trace()
    if job.done < STEPS:
        raise InputError(f"it ended after {job.done} of {STEPS} steps")
    return records, trace


def _other_records(given: Mapping[str, list[Any]], right: Mapping[str, list[Any]]) -> str | None:
    for name, wanted in right.items():
        if len(given[name]) != len(wanted):
            count = len(given[name])
            return f"`records[{name!r}]` has {count} entries, not {len(wanted)}.{HOOK[name]}"
        for number, (ours, theirs) in enumerate(zip(given[name], wanted, strict=True), start=1):
            ours = torch.as_tensor(ours, dtype=torch.float32, device="cpu")
            if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-4):
                return f"Entry {number} of `records[{name!r}]` should still hold the same numbers."
    return None


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
