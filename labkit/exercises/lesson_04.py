"""Lesson 04's exercises: what half of the activations is worth, and how to get to half the peak."""

from unittest.mock import patch

import torch

import labkit as lab
from labkit.exercises import checks
from labkit.exercises.engine import check_of

MOST_PEAK = 0.5
MOST_EXTRA_FLOPS = 0.4  # a whole forward pass more is a third


def saved_percent():
    # Half of two thirds of 12 GiB goes, 1.5 GiB comes; of 24 GiB.
    return 100 * (12 * 2 / 3 / 2 - 1.5) / 24


@check_of(
    "04-1",
    saved_percent,
    "What is two thirds of the activations, and what is half of that?",
    "4 GiB go and 1.5 GiB come. Of how many in all?",
)
def check_saved(answer):
    near = {
        100 * 4 / 24: "Autocast's copies of the weights are missing: they come on top.",
        25.0: "That halves all activations. Autocast reaches two thirds of them.",
        100 * 2.5 / 12: "That is the share of the activations. What share of the whole peak is it?",
        50.0: "That is the article's figure. Add up what is left.",
    }
    return checks.expect_number(answer, saved_percent(), slips=near)


def halved(device, batch_size=16, steps=2):
    kind = torch.device(device).type
    model = lab.model("SmolLM2-tiny", device=device)
    lab.checkpointing(model)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(kind)
    for ids in lab.batches(device=device, batch_size=batch_size, seq_len=512, steps=steps):
        with torch.amp.autocast(kind, dtype=torch.float16):
            loss = model(input_ids=ids, labels=ids).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield loss


@check_of(
    "04-2",
    halved,
    "What is left at the peak under AMP? `lab.bars` of your own run shows it.",
    "The activations are left. `lab.checkpointing(model)` attacks those.",
)
def check_halved(answer):
    update, enabled = torch.amp.GradScaler.update, []

    def watched(scaler, *arguments):
        enabled.append(scaler.is_enabled())
        update(scaler, *arguments)

    with patch.object(torch.amp.GradScaler, "update", watched):
        run = checks.run_experiment(answer, mode="simulate", gpu="t4")
    full_precision = {"name": "SmolLM2-tiny", "batch_size": 16, "seq_len": 512}
    reference = checks.simulated(checks.train, gpu="t4", **full_precision)
    for category in ("weights", "optimizer"):
        ours, theirs = (checks.highest_bytes(each, category) for each in (run, reference))
        if abs(ours / theirs - 1) > 0.01:
            return (
                f"Your {category} take {lab.format_bytes(ours)} instead of "
                f"{lab.format_bytes(theirs)}: keep the model in FP32 and the optimizer as it is. "
                "Mixed precision is autocast, not `model.half()`."
            )
    if not any(storage.dtype == "float16" for storage in run.trace.storages):
        return "Nothing in your step is FP16: put autocast around the forward pass and the loss."
    if not any(enabled):
        return (
            "Your step has no scaler, or none that is enabled: `scaler.scale(loss).backward()`, "
            "`scaler.step(optimizer)`, `scaler.update()`."
        )
    if problem := checks.arithmetic_limit(run, reference, MOST_EXTRA_FLOPS):
        return problem
    if problem := checks.memory_target(run, int(MOST_PEAK * reference.peak_bytes)):
        return f"{problem} AMP alone does not get there: what attacks the activations themselves?"
    return None
