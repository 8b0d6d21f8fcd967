"""Lesson 14's exercises: the bytes of block-wise states, and a peak made mostly of states."""

import torch

import labkit as lab
from labkit.exercises import checks
from labkit.exercises.engine import check_of

STEPS = 20
MOST_PEAK = 0.7
NOISE = 0.02


def bytes_per_parameter():
    # Two moments, each one byte and its share of the block's scale.
    return 2 * (1 + 4 / 256)


@check_of(
    "14-1",
    bytes_per_parameter,
    "One byte for each of the two moments, and then the scales.",
    "4 bytes for 256 numbers, for each moment: 2 × (1 + 4 / 256).",
)
def check_bytes(answer):
    near = {
        2.0: "The scales are missing: each block of 256 has one for each moment.",
        1 + 4 / 256: "That is one moment; AdamW has two.",
        2 + 4 / 256: "Each of the two moments has scales of its own.",
        8.0: "That is 32-bit AdamW.",
    }
    return checks.expect_number(answer, bytes_per_parameter(), rel_tolerance=1e-3, slips=near)


def light(device, steps=20):
    import bitsandbytes as bnb

    torch.manual_seed(0)
    model = lab.model("SmolLM2-tiny", device=device, layers=4)
    optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-3)
    for ids in lab.batches(device=device, batch_size=1, seq_len=64, steps=steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@check_of(
    "14-2",
    light,
    "Of what is the peak made? `lab.bars([lab.measure(heavy)])` shows it.",
    "Replace the optimizer by its 8-bit form, with the same learning rate.",
)
def check_light(answer):
    run = checks.run_experiment(answer, mode="measure", steps=STEPS)
    heavy = {"name": "SmolLM2-tiny", "layers": 4, "batch_size": 1, "seq_len": 64}
    reference = checks.reference_run(checks.train, mode="measure", steps=STEPS, **heavy)
    if problem := checks.memory_target(run, int(MOST_PEAK * reference.peak_bytes)):
        return problem
    if problem := checks.same_start(run.losses[0], reference.losses[0]):
        return problem
    ours, theirs = (sum(each.losses[-5:]) / 5 for each in (run, reference))
    if not abs(ours / theirs - 1) <= NOISE:  # also true of NaN
        return f"Your last losses are {ours:.4g} on average, the original's {theirs:.4g}."
    return None
