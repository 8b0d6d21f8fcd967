"""Exercises of lesson 06: where checkpointing stops paying, and `checkpoint` written by hand."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

import labkit as lab
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

Checkpoint = from_notebook("06", "Checkpoint", globals())


def blocks_needed():
    loss_mib, kept_mib, input_mib, gradients_mib = 600, 200, 8, 2000
    # 600 + 24 × 200 − n × (200 − 8) is where backward begins, and must not exceed 2000.
    too_much_mib = loss_mib + 24 * kept_mib - gradients_mib
    return math.ceil(too_much_mib / (kept_mib - input_mib))


@check_of("06-1", blocks_needed)
def check_blocks(answer):
    answer = checks.whole_number(answer, "The number of blocks")
    slips = {
        17: "Backward then begins with 600 + 7 × 200 + 17 × 8 = 2,136 MiB, more than it ends with.",
        15: "That leaves out the loss, which lies on the blocks' activations.",
        14: "That leaves out the loss, which lies on the blocks' activations.",
        24: "All blocks are no better than some: where backward ends, nothing changes.",
    }
    return checks.expect_number(answer, blocks_needed(), rel_tolerance=0, slips=slips)


def train_blocks(device: str, again: Callable[..., torch.Tensor] | None = None) -> Iterator:
    """Train twelve blocks, each computed again by ``again`` if it is given."""
    torch.manual_seed(0)
    model = lab.model("SmolLM2-tiny", device=device, layers=12, vocab_size=256)
    for block in model.model.layers if again else ():
        block.forward = partial(_checkpointed, block.forward, again)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for ids in lab.batches(device=device, batch_size=4, seq_len=256, steps=2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def _checkpointed(forward, again, hidden, **more):
    return Checkpoint.apply(partial(forward, **more), again, hidden)


def recompute(run, hidden, gradient):
    hidden = hidden.detach().requires_grad_()
    with torch.enable_grad():
        output = run(hidden)
    output.backward(gradient)
    return hidden.grad


@check_of("06-2", recompute)
def check_recompute(answer):
    how = {"mode": "measure"}
    run = checks.run_experiment(train_blocks, again=partial(checks.call, answer), **how)
    reference = checks.reference_run(train_blocks, **how)
    if problem := checks.same_losses(run, reference):
        return f"{problem} Do the block's weights get gradients, and its input the right one?"
    peak, extra = run.peak_bytes / reference.peak_bytes, run.flops / reference.flops - 1
    return checks.Correct(
        f"That is right: equal losses, {peak:.0%} of the peak for {extra:+.0%} arithmetic."
    )
