"""Exercises of lesson 12: how many chunks, and a loss over 128 thousand tokens that fits."""

import torch
from torch.nn import functional

from gpumem.units import GIB, format_bytes
from labkit.exercises import checks
from labkit.exercises.engine import check_of

VOCABULARY, WIDTH, TOKENS = 128_256, 2048, 8192
MOST_PEAK_BYTES = 2 * GIB
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
    class GradientInForward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden, weight, labels):
            hidden_gradient = torch.empty_like(hidden)
            weight_gradient = torch.zeros_like(weight)
            count = (labels != -100).sum()
            total = 0
            parts = [tensor.split(128) for tensor in (hidden, labels, hidden_gradient)]
            for rows, targets, rows_gradient in zip(*parts, strict=True):
                part = functional.linear(rows, weight).float().log_softmax(-1)
                total += functional.nll_loss(part, targets, reduction="sum")
                part.exp_()
                part[torch.arange(len(targets)), targets.clamp(min=0)] -= 1
                part *= (targets != -100)[:, None] / count
                part = part.to(weight.dtype)
                rows_gradient.copy_(part @ weight)
                weight_gradient.addmm_(part.T, rows)
            ctx.save_for_backward(hidden_gradient, weight_gradient)
            return total / count

        @staticmethod
        def backward(ctx, scale):
            hidden_gradient, weight_gradient = ctx.saved_tensors
            return scale * hidden_gradient, scale * weight_gradient, None

    return GradientInForward.apply(hidden, weight, labels)


# Limit: simulation does not see inside F.linear_cross_entropy, so its chunks may be too large.
@check_of(
    "12-2",
    loss_of,
    "The weight is half a GiB, and checkpointed chunks take three copies of its gradient, too. "
    "Which of the lesson's two ways takes fewer?",
    "Compute the gradient in forward, in chunks of 128 tokens. Ignored labels get no gradient, and "
    "do not count in the mean.",
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
