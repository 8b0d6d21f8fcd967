"""Exercises of lesson 13: where stepping inside backward stops paying, and AdamW's loss in half."""

import math

import torch

import labkit as lab
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook
from labkit.loss_comparison import losses

MOST_PEAK, MOST_EXTRA_LOSS = 1 / 2, 0.02
WIDE, STEPS = 1536, 60
roomy = from_notebook("13", "roomy", globals())
# gradients, copy, bytes of a row: some divide evenly, one has no copy
JOBS = ((475, 475, 220), (600, 0, 200), (600, 600, 150), (1000, 1000, 3000))


def useless_from(gradients, copy, row):
    return math.ceil((gradients + copy) / row)


def _slips(gradients, copy, row):
    rows = useless_from(gradients, copy, row)
    return {
        (gradients + copy) / row: "Rows are whole: which way do you round?",
        rows - 1: "There the peak still lies in the update: compare the two terms of the maximum.",
        rows + 1: "It is useless there, but that is not the smallest number of rows.",
        math.ceil(gradients / row): "The update after backward also makes its copy.",
    }


@check_of(
    "13-1",
    useless_from,
    "Which two terms does the maximum compare? Only one of them grows with the rows.",
    "Rows times `row` must reach `gradients + copy`: divide, and round up.",
)
def check_useless(answer):
    return checks.expect_results(answer, useless_from, JOBS, slips=_slips)


def thrifty(device, width=48, seed=0, steps=60):
    torch.manual_seed(seed)
    shape = {"vocab_size": 256, "layers": 2, "hidden_size": width, "intermediate_size": 3 * width}
    model = lab.model("SmolLM2-tiny", device=device, **shape)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)  # its rate is another one
    for ids in lab.batches(device=device, batch_size=4, seq_len=64, seed=seed, steps=steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@check_of(
    "13-2",
    thrifty,
    "For each weight: 4 bytes, its gradient 4, AdamW's state 8, the copy 4. Half of these 20 are "
    "10. Stepping inside backward leaves 12. Which term alone is large enough?",
    "`torch.optim.Adafactor`; its default rate is too low here. Which one won the search?",
)
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
