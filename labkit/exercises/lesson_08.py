"""Exercises of lesson 08: the longest context on a T4, and a soft cap without the square."""

import functools

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from labkit.claims import plain_value
from labkit.exercises import Exercise
from labkit.exercises.checks import (
    Feedback,
    NotAttempted,
    call,
    memory_target,
    quote,
    run_experiment,
)
from labkit.memory import Run, format_bytes

CARD, STEP, MOST_TOKENS = "t4", 512, 1 << 16
WAYS = ("eager", "repeated")
MOST_PEAK, MOST_ERROR = 0.25, 1e-4


# --- 1: the longest context --------------------------------------------------------------------


def repeated(module, query, key, value, attention_mask, **others):
    """SDPA for transformers with each head of keys copied for its queries."""
    each = module.num_key_value_groups
    key, value = (t.repeat_interleave(each, dim=1) for t in (key, value))
    causal = attention_mask is None
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, is_causal=causal)
    return out.transpose(1, 2).contiguous(), None


def train(device, seq_len=512, attention="eager", layers=None):
    """The lesson's step in FP16 autocast, one row."""
    from transformers import AttentionInterface

    import labkit as lab

    AttentionInterface.register("repeated", repeated)
    model = lab.model("SmolLM2-135M", device=device, layers=layers)
    model.set_attn_implementation(attention)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for ids in lab.batches(device=device, batch_size=1, seq_len=seq_len, steps=1):
        with lab.autocast(device, "amp-fp16"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@functools.cache
def needs(attention: str, seq_len: int) -> Run:
    """One step on the T4. Remembered, because a learner asks for the same lengths again."""
    return run_experiment(
        train, world="simulate", gpu=CARD, steps=1, attention=attention, seq_len=seq_len
    )


def longest():
    """Peaks are a + b n, with c n² more for eager; the largest n that fits is looked up."""
    import numpy as np

    found = {}
    for attention, lengths in {"eager": (1024, 2048, 2560), "repeated": (1024, 2048)}.items():
        runs = [needs(attention, n) for n in lengths]  # lab.simulate(train, gpu="t4", ...)
        peaks = [run.peak_bytes for run in runs]
        curve = np.polynomial.Polynomial.fit(lengths, peaks, deg=len(lengths) - 1)
        tried = range(STEP, MOST_TOKENS, STEP)
        found[attention] = max(n for n in tried if curve(n) <= runs[0].capacity_bytes)
    return found


def check_longest(answer):
    if isinstance(answer, dict) and any(v is ... for v in answer.values()):
        raise NotAttempted("Put two lengths in tokens where the dots are.")
    if not isinstance(answer, dict) or set(answer) != set(WAYS):
        return (
            f"A dict with the lengths of 'eager' and 'repeated' is asked for, not {quote(answer)}."
        )
    for attention, length in answer.items():
        tokens, problem = plain_value(length)
        if problem or isinstance(tokens, bool) or tokens < STEP:
            return f"{attention}: a length in tokens is asked for; you gave {quote(length)}."
        if tokens % STEP:
            return f"{attention}: {tokens:g} is no multiple of {STEP}."
        if problem := _fits(attention, int(tokens)):
            return problem
    factor = answer["repeated"] / answer["eager"]
    return Feedback(True, f"That is right: {factor:.1f} times the context on the same card.")


def _fits(attention: str, length: int) -> str | None:
    tried = min(length, MOST_TOKENS)
    run = needs(attention, tried)
    if run.oom:
        who = "They" if tried == length else f"Even {tried}"
        return (
            f"{attention}: {length} tokens do not fit. {who} need {format_bytes(run.peak_bytes)}, "
            f"and a T4 can hold {format_bytes(run.capacity_bytes)}."
        )
    longer = needs(attention, length + STEP)
    if longer.oom is None:
        spare_bytes = longer.capacity_bytes - longer.peak_bytes
        return (
            f"{attention}: {length} tokens fit, and so do {length + STEP}, with "
            f"{format_bytes(spare_bytes)} to spare. Go on."
        )
    return None


# --- 2: soft-capped scores without the square --------------------------------------------------

SHAPE, TOKENS = (1, 4, 1024, 32), 1024


def capped(q, k, v, cap=5.0):
    """The reference that the notebook shows; shapes [batch, heads, tokens, head size]."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    scores = cap * torch.tanh(scores / cap)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


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
    q, k, v = _inputs(device)
    loss = attention(q, k, v).square().sum()
    loss.backward()
    yield loss


def _inputs(device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    # Larger than usual, so that the cap bites.
    tensors = [2 * torch.randn(SHAPE, device=device) for _ in range(3)]
    return [tensor.requires_grad_() for tensor in tensors]


def check_thrifty(answer):
    if problem := _different(answer):
        return problem
    reference = run_experiment(attend, world="measure", steps=1)
    run = run_experiment(attend, world="measure", steps=1, attention=answer)
    share = run.peak_bytes / reference.peak_bytes
    if problem := memory_target(run, int(MOST_PEAK * reference.peak_bytes)):
        if run.flops > reference.flops:
            problem += " You do compute scores again. How many rows of them are alive while you do?"
        elif share < 1:
            problem += " What has autograd saved of each block when forward has ended?"
        return problem
    return Feedback(True, f"That is right: {share:.0%} of the peak, the same gradients.")


def _different(answer) -> str | None:
    """Why the output or a gradient is not that of ``capped``; None where they agree."""
    from labkit import relative_error

    found = {}
    for attention in (capped, answer):
        inputs = _inputs("cpu")
        out = call(attention, *inputs)
        if not isinstance(out, torch.Tensor) or tuple(out.shape) != SHAPE:
            shape = tuple(out.shape) if isinstance(out, torch.Tensor) else quote(out)
            return f"`thrifty` must return a tensor of shape {SHAPE}, not {shape}."
        if not out.requires_grad:
            return "Your output cannot be differentiated: something detached it from q, k and v."
        out.square().sum().backward()
        if any(tensor.grad is None for tensor in inputs):
            return "One of q, k and v gets no gradient: something detached it."
        found[attention] = [out, *(tensor.grad for tensor in inputs)]
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    for name, ours, right in zip(names, found[answer], found[capped], strict=True):
        error = relative_error(ours, right)
        if not error <= MOST_ERROR:  # also true of NaN
            return (
                f"The {name} is {error:.1%} off that of `capped`. Check the cap, and which keys "
                "the queries of each block may see."
            )
    return None


EXERCISES = (
    Exercise(
        "08-1",
        question="The longest contexts on a T4, in multiples of 512, eager and not.",
        hints=(
            "Run each way at 1024 and 2048 tokens. Doubling multiplies the part that grows with n "
            "by 2 and the part that grows with n² by 4.",
            "Three lengths give the three numbers of a + b n + c n² (for 'repeated', c is small). "
            "Set that equal to `run.capacity_bytes` and solve for n.",
            "Then try: `lab.simulate(train, gpu='t4', precision='amp-fp16', attention='eager', "
            "seq_len=n, steps=1).oom` is None where it fits.",
        ),
        solution=longest,
        check=check_longest,
    ),
    Exercise(
        "08-2",
        question="Soft-capped attention in plain PyTorch at a quarter of the peak.",
        hints=(
            "Cut the queries into blocks of rows. A block of rows needs its own scores only.",
            "Backward must not find the scores of all blocks saved: "
            "`checkpoint(some_rows, queries, keys, values, start, use_reentrant=False)`.",
            "The queries of a block that begins at `start` have no future before it: "
            "`.triu(start + 1)`, and keys behind the block can be cut off.",
        ),
        solution=thrifty,
        check=check_thrifty,
        kind="function",
    ),
)
