"""Exercises of lesson 08: the longest context on a T4, and a soft cap without the square."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from gpumem.runs import Run
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

STEP, MOST_TOKENS = 512, 1 << 16
MOST_PEAK = 0.25
repeated = from_notebook("08", "repeated", globals())
AttentionInterface.register("repeated", repeated)
# Names of which the lesson's `train` makes its defaults.
model_name, precision, batch_size, seed, steps = "SmolLM2-135M", "amp-fp16", 1, 0, 1
train = from_notebook("08", "train", globals())
capped = from_notebook("08", "capped", globals())


def needs(attention: str, seq_len: int) -> Run:
    deep = {"layers": 30, "alike": "layers"}  # SmolLM2-135M's, from simulating a few
    return checks.simulated(train, gpu="t4", steps=1, attention=attention, seq_len=seq_len, **deep)


def longest():
    """Peaks are a + b n, with c n² more for eager; what is reserved may be one step too much."""
    import numpy as np

    found = {}
    for attention, lengths in {"eager": (1024, 2048, 2560), "repeated": (1024, 2048)}.items():
        runs = [needs(attention, n) for n in lengths]  # lab.simulate(train, gpu="t4", ...)
        peaks = [run.peak_bytes for run in runs]
        curve = np.polynomial.Polynomial.fit(lengths, peaks, deg=len(lengths) - 1)
        tried = range(STEP, MOST_TOKENS, STEP)
        longest = max(n for n in tried if curve(n) <= runs[0].capacity_bytes)
        found[attention] = longest if needs(attention, longest).fits else longest - STEP
    return found


@check_of("08-1", longest)
def check_longest(answer):
    lengths = checks.settings_of(answer, ("eager", "repeated"))
    if len(lengths) < 2:
        return "A length is asked for with `eager` and one with `repeated`."
    for attention, length in lengths.items():
        what, run_of = f"tokens with {attention}", partial(needs, attention)
        result = checks.expect_limit(length, what, run_of, most=MOST_TOKENS, step=STEP)
        if isinstance(result, str):
            return result
    factor = lengths["repeated"] / lengths["eager"]
    return checks.Correct(f"That is right: {factor:.1f} times the context on the same GPU.")


def thrifty(q, k, v, cap=5.0):
    def some_rows(queries, keys, values, start):
        scores = queries @ keys.transpose(-2, -1) * queries.shape[-1] ** -0.5
        scores = cap * torch.tanh(scores / cap)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(start + 1)
        return scores.masked_fill(future, -torch.inf).softmax(-1) @ values

    out = []
    for start in range(0, q.shape[-2], 128):
        stop = start + 128  # no query sees a key behind it
        parts = q[..., start:stop, :], k[..., :stop, :], v[..., :stop, :]
        out.append(checkpoint(some_rows, *parts, start, use_reentrant=False))
    return torch.cat(out, dim=-2)


def attend(device, attention=capped):
    """Forward and backward of one attention, once."""
    loss = attention(*(x.requires_grad_() for x in _inputs(device))).square().sum()
    loss.backward()
    yield loss


def _inputs(device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    # Larger than usual, so that the cap bites.
    return [2 * torch.randn(1, 4, 1024, 32, device=device) for _ in range(3)]


@check_of("08-2", thrifty)
def check_thrifty(answer):
    if problem := checks.same_gradients(answer, capped, *_inputs("cpu")):
        return f"{problem} Check the cap, and which keys the queries of each block may see."
    reference = checks.reference_run(attend, mode="measure", steps=1)
    run = checks.run_experiment(attend, mode="measure", steps=1, attention=answer)
    share = run.peak_bytes / reference.peak_bytes
    if problem := checks.memory_target(run, int(MOST_PEAK * reference.peak_bytes)):
        if run.flops > reference.flops:
            problem += " You do compute scores again. How many rows of them are alive while you do?"
        elif share < 1:
            problem += " What has autograd saved of each block when forward has ended?"
        else:
            problem += " How many rows of scores are alive at once, and how many does a row need?"
        return problem
    return checks.Correct(f"That is right: {share:.0%} of the peak, the same gradients.")
