"""Exercises of lesson 12: how many chunks, and a loss over 128 thousand tokens that fits."""

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gpumem.units import GIB, format_bytes
from labkit.exercises import checks
from labkit.exercises.engine import check_of

VOCABULARY, WIDTH, TOKENS = 128_256, 2048, 8192
MOST_PEAK_BYTES = 5 * GIB // 2
GPU = "rtx-4090"


def chunks():
    tokens, bytes_per_token = 4 * 8192, 128_256 * 4
    tokens_per_chunk = 256 * 1024**2 // bytes_per_token
    return -(-tokens // tokens_per_chunk)  # rounded up


@check_of(
    "12-1",
    chunks,
    "How many bytes are the logits of a single token?",
    "128 256 × 4 bytes a token. How many whole tokens fit in 256 × 1024² bytes? Divide "
    "4 × 8 192 by that, and round up.",
)
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
    def part(rows, targets):
        logits = functional.linear(rows, weight).float()
        return functional.cross_entropy(logits, targets, reduction="sum")

    pieces = zip(hidden.split(128), labels.split(128), strict=True)
    total = sum(checkpoint(part, *piece, use_reentrant=False) for piece in pieces)
    return total / len(labels)


# Limit: simulation does not see inside F.linear_cross_entropy, so its chunks may be too large.
@check_of(
    "12-2",
    loss_of,
    "The weight is half a GiB, and checkpointed chunks take up to three copies of its gradient. "
    "What is left for one chunk of logits, in all its copies?",
    "`hidden.split(128)` gives pieces of 128 tokens. Sum their losses with "
    '`reduction="sum"`, each inside a `checkpoint`, and divide by `len(labels)`.',
)
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
    run = checks.run_experiment(_backward, mode="simulate", gpu=GPU, loss_of=answer)
    if problem := checks.memory_target(run, MOST_PEAK_BYTES):
        whole_bytes = TOKENS * VOCABULARY * 4
        if run.highest_bytes("activations") > whole_bytes:
            return f"{problem} At some moment the logits of all tokens are alive: who keeps them?"
        return f"{problem} How large is one chunk of logits?"
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
