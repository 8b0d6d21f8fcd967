"""Lesson 04's exercises: from which batch on AMP pays, and how to get to half the peak."""

import math
from unittest.mock import patch

import torch

import labkit as lab
from gpumem.runs import Run
from gpumem.trace import Category, Work
from labkit.exercises import checks
from labkit.exercises.engine import check_of

MOST_PEAK = 0.5
MOST_EXTRA_FLOPS = 0.4  # a whole forward pass more is a third


def rows_needed():
    copies_gib = 2 * 350e6 / 2**30
    saved_gib = 0.6 / 2 / 2  # by each row: autocast reaches half of it, and halves that
    return math.floor(copies_gib / saved_gib) + 1


@check_of("04-1", rows_needed)
def check_rows(answer):
    answer = checks.whole_number(answer, "The number of rows")
    slips = {
        4: "With 4 rows the activations save 0.60 GiB, and the copies add 0.65.",
        3: "That halves all activations. Autocast reaches half of them.",
        2: "That saves whole rows. They are halved, and only where autocast reaches.",
        9: "That counts 4 bytes for each copied weight. The copies have 16 bits.",
        1: "The copies come on top: 2 bytes for each parameter.",
    }
    return checks.expect_number(answer, rows_needed(), rel_tolerance=0, slips=slips)


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


@check_of("04-2", halved)
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
        ours, theirs = (each.highest_bytes(category) for each in (run, reference))
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
    if _gradients_add_up(run):
        return "Your gradients add up from step to step: `optimizer.zero_grad()` is missing."
    if problem := checks.arithmetic_limit(run, reference, MOST_EXTRA_FLOPS):
        return problem
    if problem := checks.memory_target(run, int(MOST_PEAK * reference.peak_bytes)):
        return f"{problem} AMP alone does not get there: what attacks the activations themselves?"
    return None


def _gradients_add_up(run: Run) -> bool:
    """Return whether two steps have neither freed the gradients nor set them to zero."""
    cleared_bytes = run.trace.work.get("zero_", Work()).moved_bytes
    for event in run.trace.events:
        if run.trace.storages[event.storage].category is Category.GRADIENTS:
            cleared_bytes += max(0, -event.change_bytes)
    return cleared_bytes < run.bytes_of(Category.WEIGHTS)
