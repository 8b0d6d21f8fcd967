"""Exercises of lesson 01: where activations reach the states, and AdamW without its copy."""

from functools import partial

import torch

import labkit as lab
from gpumem.units import format_bytes
from labkit.exercises import checks
from labkit.exercises.checks import train
from labkit.exercises.engine import check_of

SEQ_LEN = 128
DEEP = {"layers": 30, "alike": "layers"}  # all of its layers, from simulating a few
BF16_GPU = "rtx-3090"  # a T4 only emulates bfloat16, and has no fused attention for it
MOST_BYTES_PER_PARAMETER = 18.5  # 16 are stored; a GPU's libraries take some besides


def crossing_batch():
    model = lab.model("SmolLM2-135M", device="meta")
    states = (2 + 2 + 2 + 2) * sum(each.numel() for each in model.parameters())
    # One small run gives the cost of one text; the rest is a division.
    setting = {"precision": "bf16", "batch_size": 4, "seq_len": 128}
    run = lab.simulate(train, gpu="rtx-3090", steps=1, **setting)
    activations_of_one_text = run.highest_bytes("activations") / 4
    return round(states / activations_of_one_text)


@check_of("01-1", crossing_batch)
def check_crossing(answer):
    batch_size = checks.whole_number(answer, "the batch size", most=10_000)
    setting = {"precision": "bf16", "batch_size": batch_size, "seq_len": SEQ_LEN, **DEEP}
    run = checks.simulated(train, gpu=BF16_GPU, steps=1, **setting)
    activations_bytes = run.highest_bytes("activations")
    states_bytes = sum(map(run.highest_bytes, ("weights", "gradients", "optimizer")))
    ratio = activations_bytes / states_bytes
    found = (
        f"We ran batch {batch_size}: {format_bytes(activations_bytes)} of activations, "
        f"{format_bytes(states_bytes)} of states."
    )
    if 0.9 <= ratio <= 1.1:
        return checks.Correct(f"{found} Equal within a tenth, as you calculated.")
    slips = {
        SEQ_LEN: f"That looks like tokens: one text has {SEQ_LEN} of them.",
        2.0: "Did you count 16 bytes per parameter? In bf16 each of the four takes 2.",
        0.25: "Did you count the weights only? Gradients and both moments are states, too.",
    }
    direction = "large" if ratio > 1 else "small"
    slip = checks.nearest_slip(ratio, slips, rel_tolerance=0.12)
    return f"{found} Your batch is too {direction}. {slip}".strip()


def make_optimizer(parameters, lr=1e-3):
    # One parameter after the other: the temporaries are as large as one tensor, not all of them.
    return torch.optim.AdamW(parameters, lr=lr, foreach=False)


@check_of("01-2", make_optimizer)
def check_optimizer(answer):
    make = partial(checks.call, answer)
    setting = {"batch_size": 1, "seq_len": SEQ_LEN, "make": make, **DEEP}
    run = checks.run_experiment(train, mode="simulate", gpu="t4", **setting)
    parameters = lab.model_info("SmolLM2-135M").parameters
    found = run.peak_bytes / parameters
    if found > MOST_BYTES_PER_PARAMETER:
        temporary = run.bytes_of("temporary") / parameters
        return (
            f"Your peak is {found:.1f} bytes per parameter, the target at most "
            f"{MOST_BYTES_PER_PARAMETER}. {temporary:.1f} of them are temporary: look for an "
            "argument of AdamW that decides how many parameters are updated at once."
        )
    small = {"name": "SmolLM2-tiny", "batch_size": 2, "seq_len": 64, "steps": 4}
    real = checks.run_experiment(train, mode="measure", make=make, **small)
    reference = checks.reference_run(train, mode="measure", **small)
    problem = checks.same_losses(real, reference) or _is_adamw(answer)
    return problem or checks.Correct(f"{found:.2f} bytes per parameter at the peak, same losses.")


def _is_adamw(make) -> str | None:
    """Return None if an update without a gradient is AdamW's: too small a change for losses."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.zeros(1)
    checks.call(make, [weight], lr=0.1).step()
    if abs(weight.item() - (1 - 0.1 * 0.01)) < 1e-6:
        return None
    return (
        f"A weight of 1 without a gradient is {weight.item():.4g} after a step with `lr=0.1`; "
        "AdamW makes it 0.999. Does your optimizer take the given learning rate, and decay weights?"
    )
