"""Exercises of lesson 22: what a technique is worth given the rest, and a leaner stack."""

from collections.abc import Mapping
from typing import Any

import torch

import labkit as lab
from labkit.exercises import checks
from labkit.exercises.checks import Correct, expect_results, memory_target, settings_of
from labkit.exercises.engine import check_of
from labkit.plan.recipe import Recipe
from labkit.plan.techniques import HostOptimizer, chunked_loss
from labkit.runs import Run
from labkit.values import GIB, PRECISIONS, format_bytes, one_of


def factor(weights, gradients, states, activations, k):
    def peak(activations):
        return weights + states + max(activations, gradients)  # backward, or the optimizer's step

    return peak(activations) / peak(activations / k)


# (weights, gradients, states, activations, k), in GiB
JOBS = (
    (2, 2, 4, 40, 4),  # backward's moment is the peak before and after
    (2, 2, 4, 40, 1000),  # the optimizer's step is the peak after
    (4, 4, 8, 3, 10),  # the optimizer's step is the peak before, too
    (1, 0.1, 0.2, 9, 2),  # adapters
)


@check_of(
    "22-1",
    factor,
    "Write down both moments: backward holds weights, states and activations; the "
    "optimizer's step holds weights, states and gradients.",
    "before = weights + states + max(activations, gradients).",
)
def check_factor(answer):
    return expect_results(answer, factor, JOBS, slips=_slips)


def _slips(weights, gradients, states, activations, k):
    fixed, after = weights + states, activations / k
    before_peak, after_peak = fixed + activations, fixed + after
    return {
        k: "The weights and states do not shrink with the activations.",
        before_peak / after_peak: "After the division another moment may be the fullest: the "
        "optimizer's step.",
        before_peak / (fixed + max(after, gradients)): "Before it, too, the optimizer's step may "
        "be the fullest moment.",
        (before_peak + gradients) / (after_peak + gradients): "Gradients and activations are not "
        "there at the same time: they belong to two moments.",
        1 / factor(weights, gradients, states, activations, k): "You return the share that is "
        "left. How many times smaller is that?",
    }


MODEL, ROWS = "SmolLM2-135M", 4
MOST_BYTES = int(1.4 * GIB)
#: Every setting of the lesson's job, as in its whole stack.
STACK = {
    "precision": "amp-bf16",
    "attention": "sdpa",
    "recompute": True,
    "chunk": 1024,
    "micro": 2,
    "eight_bit": True,
    "on_host": True,
}


def job(
    device,
    layers,
    precision="fp32",
    attention="eager",
    recompute=False,
    chunk=None,
    micro=None,
    eight_bit=False,
    on_host=False,
):
    """The lesson's job, at the size of the exercise."""
    dtype = lab.dtype_of(precision)
    model = lab.model(MODEL, device=device, dtype=dtype, layers=layers, attention=attention)
    lab.checkpointing(model, on=recompute)
    weights = list(model.parameters())
    if on_host:
        optimizer = HostOptimizer(weights, Recipe())
    elif eight_bit:
        import bitsandbytes

        optimizer = bitsandbytes.optim.AdamW8bit(weights)
    else:
        optimizer = torch.optim.AdamW(weights)
    for ids in lab.batches(device=device, batch_size=ROWS, seq_len=1024):
        total = torch.zeros((), device=device)
        for rows in ids.split(micro or ROWS):
            with lab.autocast(device, precision):
                if chunk is None:
                    loss = model(input_ids=rows, labels=rows).loss
                else:
                    loss = chunked_loss(model, rows, chunk)
                loss = loss * len(rows) / ROWS
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        yield total


def simulated(**settings: Any) -> Run:
    """The job with these settings on the GPU of the exercise."""
    return checks.simulated(job, gpu="rtx-4090", layers=30, alike="layers", **settings)


def leaner():
    # Nothing is left of the layers' activations, so halving the rows saves nothing any more, and
    # makes gradients wait through the loss. What stands in the peak then is a piece of logits.
    layers = {"precision": "amp-bf16", "attention": "sdpa", "recompute": True}
    return {**layers, "chunk": 256, "on_host": True}


@check_of(
    "22-2",
    leaner,
    "Look at the table under the bars: what stands in the peak of the whole stack?",
    "Gradients stand there because the second half of the rows comes after the first. Is "
    "halving the rows still worth it, with checkpointing on?",
    "The temporary bytes are logits, `chunk` rows of them: 49152 columns of 4 bytes.",
)
def check_leaner(answer):
    settings = settings_of(answer, STACK)
    precision = one_of(settings.get("precision", "fp32"), PRECISIONS, "precision")
    if not precision.startswith(("fp32", "amp-bf16")):
        return f"With {precision} it is another training: take fp32 or amp-bf16."
    run = simulated(**settings)
    if problem := memory_target(run, MOST_BYTES):
        return f"{problem} {_leaner_advice(settings, run)}"
    whole = simulated(**STACK)
    return Correct(
        f"That is right: {format_bytes(run.peak_bytes)}, where the whole stack took "
        f"{format_bytes(whole.peak_bytes)}."
    )


def _leaner_advice(settings: Mapping[str, Any], run: Run) -> str:
    if run.bytes_of("optimizer"):
        return "States on the card alone are more than what is to be saved."
    if settings.get("micro") and run.bytes_of("gradients"):
        return "Which switch makes gradients wait while there are still activations?"
    if settings.get("chunk") is None or run.bytes_of("temporary") > run.bytes_of("gradients") / 2:
        return "What are the temporary bytes? Which setting says how many of them there are?"
    return "Compare with the whole stack, one setting at a time."
