"""Exercises of lesson 11: how many chunks, and a loss over 128 thousand words that fits."""

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from labkit.claims import plain_value
from labkit.comparing import relative_error
from labkit.exercises import Exercise
from labkit.exercises.checks import (
    Feedback,
    call,
    expect_number,
    memory_target,
    quote,
    run_experiment,
)
from labkit.memory import GIB, Run, format_bytes

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

VOCABULARY, WIDTH, TOKENS = 128_256, 2048, 8192
MOST_PEAK_BYTES = 5 * GIB // 2
# Forward's product with the weight. Backward's two may be made in place, which is not counted.
LEAST_PRODUCTS = 0.9
GPU = "rtx-4090"


# --- 1: how many chunks ------------------------------------------------------------------------


def chunks():
    tokens, bytes_per_token = 4 * 8192, 128_256 * 4
    tokens_per_chunk = 256 * 1024**2 // bytes_per_token
    return -(-tokens // tokens_per_chunk)  # rounded up


def check_chunks(answer):
    value, _ = plain_value(answer)
    if value is not None and not isinstance(value, bool):
        logits_bytes = 4 * 8192 * 128_256 * 4
        slips = {
            62: "62. Then a chunk is a little over the limit: round up.",
            64: "64. That fits, and divides the tokens evenly: a good choice. One less fits, too.",
            8: "8. Count the tokens of all four rows, and four bytes for each score.",
            16: "16. Is that one row? A batch holds four.",
            32: "32. Logits in fp32 take four bytes, not two.",
            67: "67. A MiB is 1024², not 1000², bytes.",
        }
        if value in slips:
            return f"You gave {slips[value]}"
        if abs(value / (logits_bytes / (256 * 1024**2)) - 1) < 1e-3:
            return f"You gave {value:g}. That is the ratio; a number of chunks is whole."
    return expect_number(answer, chunks(), rel_tolerance=0)


# --- 2: a memory target with 128 thousand words ------------------------------------------------


def whole_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The reference: all logits at once."""
    return functional.cross_entropy(functional.linear(hidden, weight).float(), labels)


def loss_of(hidden, weight, labels):
    def part(rows, targets):
        logits = functional.linear(rows, weight).float()
        return functional.cross_entropy(logits, targets, reduction="sum")

    pieces = zip(hidden.split(128), labels.split(128), strict=True)
    total = sum(checkpoint(part, *piece, use_reentrant=False) for piece in pieces)
    return total / len(labels)


def check_loss(answer):
    problem = _not_the_same(answer)
    if problem:
        return problem
    run = run_experiment(_backward_of(answer), world="simulate", gpu=GPU)
    problem = memory_target(run, MOST_PEAK_BYTES)
    if problem:
        return f"{problem} {_why_too_high(run)}"
    products = _products(run)
    if products < LEAST_PRODUCTS:
        return (
            f"With {TOKENS} tokens your loss does the arithmetic of {products:.1f} products with "
            "the weight; forward alone takes one. Are all tokens in it?"
        )
    return Feedback(
        True,
        f"That is right: {format_bytes(run.peak_bytes)} with weight and gradients, and the same "
        "loss and gradients.",
    )


def _not_the_same(answer: Loss) -> str | None:
    generator = torch.Generator().manual_seed(0)
    for tokens in (24, 1021):  # the second is prime: no number of chunks divides it
        # Later tokens are harder, so that a token with too much weight shows in the loss.
        hidden = torch.randn(tokens, 16, generator=generator)
        hidden *= torch.linspace(0.1, 3, tokens)[:, None]
        weight = torch.randn(97, 16, generator=generator)
        labels = torch.randint(97, (tokens,), generator=generator)
        theirs, ours = (
            _loss_and_gradients(f, hidden, weight, labels) for f in (answer, whole_loss)
        )
        if isinstance(theirs, str):
            return theirs
        if not relative_error(theirs[0], ours[0]) < 1e-5:
            return (
                f"With {tokens} tokens your loss is {theirs[0].item():.5g}; it should be "
                f"{ours[0].item():.5g}. Are all tokens in it, and do all weigh the same?"
            )
        if not relative_error(theirs[1:], ours[1:]) < 1e-4:
            return (
                f"With {tokens} tokens your loss is right, but its gradients are not. Does "
                "backward reach every chunk, with the weight that forward gave it?"
            )
    return None


def _loss_and_gradients(loss_of: Loss, *inputs: torch.Tensor) -> list[torch.Tensor] | str:
    hidden, weight = (tensor.clone().requires_grad_() for tensor in inputs[:2])
    loss = call(loss_of, hidden, weight, inputs[2])
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return f"Return the loss, a tensor with one number; you returned {quote(loss)}."
    if not loss.requires_grad:
        return "Your loss has no gradient: was it computed under no_grad, or detached?"
    loss.backward()
    if hidden.grad is None or weight.grad is None:
        return "Backward of your loss does not reach both hidden and weight."
    return [loss.detach().reshape(()), hidden.grad, weight.grad]


def _backward_of(loss_of: Loss) -> Callable[..., Iterator[torch.Tensor]]:
    def experiment(device: torch.device) -> Iterator[torch.Tensor]:
        kind = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
        weight = torch.randn(VOCABULARY, WIDTH, **kind)
        while True:
            hidden = torch.randn(TOKENS, WIDTH, **kind)
            labels = torch.randint(VOCABULARY, (TOKENS,), device=device)
            loss = loss_of(hidden, weight, labels)
            loss.backward()
            weight.grad = None
            yield loss

    return experiment


def _products(run: Run) -> float:
    """The arithmetic, in products of all tokens with the weight: a plain loss does three."""
    return run.flops / (2 * TOKENS * WIDTH * VOCABULARY)


def _why_too_high(run: Run) -> str:
    kept = max(run.trace.timeline().bytes_by_category.get("activations", (0,)))
    if kept > TOKENS * VOCABULARY * 4 and _products(run) < 3.5:
        return (
            "At some moment the logits of all tokens are alive: without a checkpoint, autograd "
            "keeps every chunk's until backward."
        )
    return (
        "The weight stays, and autograd adds up its gradient in up to three copies. How large is "
        "one chunk of logits?"
    )


EXERCISES = (
    Exercise(
        "11-1",
        question="The smallest number of chunks whose fp32 logits take at most 256 MiB each.",
        hints=(
            "How many bytes are the logits of a single token?",
            "128 256 × 4 bytes a token. How many whole tokens fit in 256 × 1024² bytes? Divide "
            "4 × 8 192 by that, and round up.",
        ),
        solution=chunks,
        check=check_chunks,
    ),
    Exercise(
        "11-2",
        question="The mean cross-entropy of 8 192 tokens over 128 256 words, within 2.5 GiB.",
        hints=(
            "The weight is half a GiB, and autograd holds up to three copies of its gradient as it "
            "adds the chunks up. What is left for one chunk of logits, in all its copies?",
            "`hidden.split(128)` gives pieces of 128 tokens. Sum their losses with "
            '`reduction="sum"`, each inside a `checkpoint`, and divide by `len(labels)`.',
        ),
        kind="function",
        solution=loss_of,
        check=check_loss,
    ),
)
