"""Lesson 04's exercises: what half of the activations is worth, and how to get to half the peak."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

import labkit as lab
from labkit.exercises import Exercise, expect_number, memory_target, run_experiment
from labkit.memory import Run

MOST_PEAK = 0.5
MOST_EXTRA_FLOPS = 0.4  # a whole forward pass more is a third


def saved_percent():
    # Half of two thirds of 12 GiB goes, 1.5 GiB comes; of 24 GiB.
    return 100 * (12 * 2 / 3 / 2 - 1.5) / 24


def check_saved(answer: Any) -> str | None:
    near = {
        100 * 4 / 24: "Autocast's copies of the weights are missing: they come on top.",
        25.0: "That halves all activations. Autocast reaches two thirds of them.",
        100 * 2.5 / 12: "That is the share of the activations. What share of the whole peak is it?",
        50.0: "That is the article's figure. Add up what is left.",
    }
    return expect_number(answer, saved_percent(), slips=near)


def full_precision(device, batch_size=16, steps=2):
    model = lab.model("SmolLM2-tiny", device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    for ids in lab.batches(device=device, batch_size=batch_size, seq_len=512, steps=steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


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


def check_halved(answer: Callable[..., Any]) -> str | None:
    update, updated = torch.amp.GradScaler.update, []

    def watched(scaler: torch.amp.GradScaler, *arguments: Any, **named: Any) -> None:
        updated.append(scaler.is_enabled())
        update(scaler, *arguments, **named)

    reference = run_experiment(full_precision, world="simulate", gpu="t4")
    with patch.object(torch.amp.GradScaler, "update", watched):
        run = run_experiment(answer, world="simulate", gpu="t4")
    return (
        _same_job(run, reference)
        or _in_fp16(run, scaled=any(updated))
        or _price(run, reference)
        or _peak(run, reference)
    )


def _same_job(run: Run, reference: Run) -> str | None:
    for category in ("weights", "optimizer"):
        ours, theirs = (max(_held(r, category)) for r in (run, reference))
        if abs(ours / theirs - 1) > 0.01:
            return (
                f"Your {category} take {lab.format_bytes(ours)} instead of "
                f"{lab.format_bytes(theirs)}: keep the model in FP32 and the optimizer as it is. "
                "Mixed precision is autocast, not `model.half()`."
            )
    if run.flops < 0.99 * reference.flops:
        return "Your step does less arithmetic than the original: keep the batch and the length."
    return None


def _held(run: Run, category: str) -> tuple[int, ...]:
    return run.trace.timeline().bytes_by_category.get(category, (0,))


def _in_fp16(run: Run, *, scaled: bool) -> str | None:
    if not any(storage.dtype == "float16" for storage in run.trace.storages):
        return "Nothing in your step is FP16: put autocast around the forward pass and the loss."
    if not scaled:
        return (
            "Your step has no scaler, or none that is enabled: `scaler.scale(loss).backward()`, "
            "`scaler.step(optimizer)`, `scaler.update()`."
        )
    return None


def _price(run: Run, reference: Run) -> str | None:
    extra = run.flops / reference.flops - 1
    if extra <= MOST_EXTRA_FLOPS:
        return None
    return f"Your step does {extra:.0%} more arithmetic; one more forward pass is a third."


def _peak(run: Run, reference: Run) -> str | None:
    problem = memory_target(run, int(MOST_PEAK * reference.peak_bytes))
    if problem:
        problem += " AMP alone does not get there: what attacks the activations themselves?"
    return problem


EXERCISES = (
    Exercise(
        "04-1",
        question="By how many percent does the peak fall?",
        hints=(
            "What is two thirds of the activations, and what is half of that?",
            "4 GiB go and 1.5 GiB come. Of how many in all?",
        ),
        solution=saved_percent,
        check=check_saved,
    ),
    Exercise(
        "04-2",
        question="FP16 autocast with a scaler at half of FP32's peak.",
        hints=(
            "What is left at the peak under AMP? `lab.bars` of your own run shows it.",
            "The activations are left. `lab.checkpointing(model)` attacks those.",
        ),
        solution=halved,
        check=check_halved,
    ),
)
