"""Exercises of lesson 13: where stepping in backward stops paying; AdamW's loss in a third."""

import math
from functools import partial

import torch

import labkit as lab
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook
from labkit.loss_comparison import losses

MOST_PEAK, MOST_EXTRA_LOSS = 1 / 3, 0.02
WIDE, STEPS = 2304, 60
roomy = from_notebook("13", "roomy", globals())
step_now = from_notebook("13", "step_now", globals())
step_in_backward = from_notebook("13", "step_in_backward", globals())
# Gradients, extra, base and row: about GPT-2's with AdamW and with Adafactor; one divides evenly,
# two have no base, and in the last two the start of backward is the peak at any batch.
JOBS = (
    (475, 475, 100, 380),
    (475, 294, 100, 380),
    (600, 0, 0, 200),
    (600, 600, 300, 110),
    (200, 200, 600, 90),
    (1000, 1000, 0, 3000),
)


def useless_from(gradients, extra, base, row):
    return max(1, math.ceil((gradients + extra - base) / row))


def _slips(gradients, extra, base, row):
    exact = (gradients + extra - base) / row
    rows = max(1, math.ceil(exact))
    return {
        exact: "Rows are whole: which way do you round?",
        rows - 1: "There the peak still lies behind the start of backward: compare the two terms.",
        rows + 1: "It is useless there, but that is not the smallest number of rows.",
        math.ceil(exact): "A batch has at least one row.",
        math.ceil((gradients + extra) / row): "The start of backward has its base, too.",
        math.ceil((gradients - base) / row): "Something comes on top of the gradients: the extra.",
    }


@check_of("13-1", useless_from)
def check_useless(answer):
    return checks.expect_results(answer, useless_from, JOBS, slips=_slips)


def thrifty(device, width=48, seed=0, steps=60):
    torch.manual_seed(seed)
    shape = {"vocab_size": 256, "layers": 2, "hidden_size": width, "intermediate_size": 3 * width}
    model = lab.model("SmolLM2-tiny", device=device, **shape)
    step_in_backward(model, partial(torch.optim.Adafactor, lr=0.1))  # its rate is another one
    for ids in lab.batches(device=device, batch_size=4, seq_len=64, seed=seed, steps=steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        yield loss


@check_of("13-2", thrifty)
def check_thrifty(answer):
    run, reference = checks.run_both(answer, roomy, mode="simulate", gpu="t4", width=WIDE)
    most_bytes = int(MOST_PEAK * reference.peak_bytes)
    problem = checks.arithmetic_limit(run, reference, 0.02) or checks.memory_target(run, most_bytes)
    if problem:
        return f"At width {WIDE}: {problem}"
    ours, theirs = losses(answer, steps=STEPS), checks.reference_losses(roomy, steps=STEPS)
    for mine, other in zip(ours.curves, theirs.curves, strict=True):
        if problem := checks.same_start(mine[0], other[0], rel_tolerance=1e-4):
            return problem
    difference = ours.against(theirs).mean
    if not difference <= MOST_EXTRA_LOSS:  # also true of NaN
        return (
            f"The memory is right, but your last loss is {ours.final:.2f}, AdamW's "
            f"{theirs.final:.2f}. Is the learning rate one for *this* optimizer?"
        )
    share = run.peak_bytes / reference.peak_bytes
    return checks.Correct(f"That is right: {share:.0%} of the peak, last loss {difference:+.1%}.")
