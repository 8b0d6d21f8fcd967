"""Exercises of lesson 13: what Adafactor keeps, and AdamW's loss at two thirds of its bytes."""

import torch

import labkit as lab
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.toolbox.losses import losses

MOST_PEAK, MOST_EXTRA_LOSS = 2 / 3, 0.02
WIDE, STEPS = 768, 60


def state_bytes():
    rows, columns = 4096, 14336
    return 4 * (rows + columns)  # one mean for each row, one for each column, four bytes each


@check_of(
    "13-1",
    state_bytes,
    "For a matrix of r rows and c columns it keeps one mean per row and one per column.",
    "4096 + 14336 numbers, of four bytes each.",
)
def check_state(answer):
    rows, columns = 4096, 14336
    slips = {
        rows + columns: "That is how many numbers it keeps. How many bytes does each take?",
        4 * rows * columns: "That is as many bytes as the matrix itself has: SGD's momentum.",
        8 * rows * columns: "That is what AdamW keeps. Adafactor keeps no number per weight.",
        8 * (rows + columns): "That is two numbers for each. Adafactor has no first moment.",
    }
    return checks.expect_number(answer, state_bytes(), rel_tolerance=0, unit="bytes", slips=slips)


def roomy(device, width=48, seed=0, steps=60):
    torch.manual_seed(seed)
    shape = {"vocab_size": 256, "layers": 2, "hidden_size": width, "intermediate_size": 3 * width}
    model = lab.model("SmolLM2-tiny", device=device, **shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = lab.batches(device=device, batch_size=4, seq_len=64, seed=seed, steps=steps)
    yield from checks.train_steps(model, optimizer, rows)


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
    "Which optimizer of the race had AdamW's loss or a better one, and next to no state?",
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
