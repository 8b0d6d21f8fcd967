"""Exercises of lesson 12: how many chunks, and a loss over 128 thousand tokens that fits."""

import math

import torch
from torch.nn import functional

from gpumem.units import GIB, format_bytes
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

VOCABULARY, WIDTH, TOKENS = 128_256, 2048, 8192
MOST_PEAK_BYTES = 2 * GIB
GPU = "rtx-4090"
GradientInForward = from_notebook("12", "GradientInForward", globals())


def chunks():
    tokens, bytes_per_token = 4 * 8192, 128_256 * 4
    tokens_per_chunk = 256 * 1024**2 // bytes_per_token
    return -(-tokens // tokens_per_chunk)  # rounded up


@check_of("12-1", chunks)
def check_chunks(answer):
    slips = {
        62: "Then a chunk is a little over the limit: round up.",
        64: "That fits, and divides the tokens evenly: a good choice. One less fits, too.",
        16: "Is that one row? A batch holds four.",
        32: "Logits in fp32 take four bytes, not two.",
    }
    return checks.expect_number(answer, chunks(), rel_tolerance=0, slips=slips)


def whole_loss(hidden, weight, labels):
    """The reference: all logits at once."""
    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)


def loss_of(hidden, weight, labels):
    return GradientInForward.apply(hidden, weight, labels, math.ceil(len(labels) / 128))


# Limit: simulation does not see inside F.linear_cross_entropy, so its chunks may be too large.
@check_of("12-2", loss_of)
def check_loss(answer):
    generator = torch.Generator().manual_seed(0)
    for tokens in (24, 1021):  # the second is prime: no number of chunks divides it
        # Later tokens are harder, so that a token with too much weight shows in the loss.
        hidden = torch.randn(tokens, 16, generator=generator)
        hidden *= torch.linspace(0.1, 3, tokens)[:, None]
        weight = torch.randn(97, 16, generator=generator)
        labels = torch.randint(97, (tokens,), generator=generator)
        if problem := checks.same_gradients(answer, whole_loss, hidden, weight, labels):
            return f"With {tokens} tokens: {problem} Do all of them weigh the same?"
    labels[::3] = -100
    if problem := checks.same_gradients(answer, whole_loss, hidden, weight, labels):
        return (
            f"With labels of -100: {problem} Those tokens count neither in the sum nor in the mean."
        )
    run = checks.run_experiment(_backward, mode="simulate", gpu=GPU, loss_of=answer)
    if problem := checks.memory_target(run, MOST_PEAK_BYTES):
        whole_bytes = TOKENS * VOCABULARY * 4
        if run.highest_bytes("activations") > whole_bytes:
            return f"{problem} At some moment the logits of all tokens are alive: who keeps them?"
        copies = run.peak_bytes / (VOCABULARY * WIDTH * 2)
        return f"{problem} It is {copies:.1f} times the weight: is it the chunks, or its gradients?"
    return checks.Correct(f"That is right: {format_bytes(run.peak_bytes)}, weight and all.")


def _backward(device, loss_of):
    kind = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    weight = torch.randn(VOCABULARY, WIDTH, **kind)
    while True:
        hidden = torch.randn(TOKENS, WIDTH, **kind)
        labels = torch.randint(VOCABULARY, (TOKENS,), device=device)
        loss = loss_of(hidden, weight, labels)
        loss.backward()
        weight.grad = None
        yield loss
