"""Exercises of lesson 21: what a technique is worth given the rest, and a leaner stack."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from labkit import models
from labkit.claims import plain_value
from labkit.exercises import Exercise
from labkit.exercises.checks import Feedback, call, memory_target, quote
from labkit.experiment import PRECISIONS
from labkit.memory import GIB, InputError, Run, format_bytes, one_of
from labkit.recipes import Recipe
from labkit.simulate import simulate
from labkit.techniques import HostOptimizer
from labkit.text import batches

# --- 1: what is it worth, given the rest? ---------------------------------------------------------


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
TOLERANCE = 0.005


def check_factor(answer):
    for job in JOBS:
        given = call(answer, *job)
        value, problem = plain_value(given)
        if problem or isinstance(value, bool):
            return f"A number is asked for; you return {quote(given)}."
        if abs(value / factor(*job) - 1) > TOLERANCE:
            weights, gradients, states, activations, k = job
            return (
                f"{weights} GiB of weights, {gradients} of gradients, {states} of states and "
                f"{activations} of activations, divided by {k}: you return {value:.4g}. "
                f"{_factor_advice(value, *job)}"
            )
    return None


def _factor_advice(value, weights, gradients, states, activations, k):
    """Why ``value`` is not the factor of this job."""
    fixed, after = weights + states, activations / k
    mistakes = {
        "The weights and states do not shrink with the activations.": k,
        "After the division another moment may be the fullest: the optimizer's step.": (
            (fixed + activations) / (fixed + after)
        ),
        "Before it, too, the optimizer's step may be the fullest moment.": (
            (fixed + activations) / (fixed + max(after, gradients))
        ),
        "Gradients and activations are not there together: they are of two moments.": (
            (fixed + gradients + activations) / (fixed + gradients + after)
        ),
        "You return the share that is left. How many times smaller is that?": (
            1 / factor(weights, gradients, states, activations, k)
        ),
        "Do the states live on in backward? The optimizer keeps them from step to step.": (
            max(weights + activations, fixed + gradients) / max(weights + after, fixed + gradients)
        ),
    }
    for advice, number in mistakes.items():
        if abs(value / number - 1) <= TOLERANCE:
            return advice
    return "Write down the peak as a function of the activations: the larger of the two moments."


# --- 2: beat the stack by one step ----------------------------------------------------------------

MODEL, GPU, ROWS, LENGTH = "SmolLM2-135M", "rtx-4090", 4, 1024
MOST_BYTES = int(1.4 * GIB)
#: What the lesson's job can be told, and what each takes.
SWITCHES = ("precision", "attention", "recompute", "chunk", "micro", "eight_bit", "on_host")
STACK = {"precision": "amp-bf16", "attention": "sdpa", "recompute": True, "chunk": 1024,
         "micro": 2, "eight_bit": True, "on_host": True}  # fmt: skip


def job(device, layers, precision="fp32", attention="eager", recompute=False, chunk=None,
        micro=None, eight_bit=False, on_host=False) -> Iterator[torch.Tensor]:  # fmt: skip
    """The lesson's job, at the size of the exercise."""
    dtype = models.dtype_of(precision)
    model = models.model(MODEL, device=device, dtype=dtype, layers=layers, attention=attention)
    models.checkpointing(model, on=recompute)
    weights = list(model.parameters())
    if on_host:
        optimizer = HostOptimizer(weights, Recipe())
    elif eight_bit:
        import bitsandbytes

        optimizer = bitsandbytes.optim.AdamW8bit(weights)
    else:
        optimizer = torch.optim.AdamW(weights)
    for ids in batches(device=device, batch_size=ROWS, seq_len=LENGTH):
        total = torch.zeros((), device=device)
        for rows in ids.split(micro or ROWS):
            with models.autocast(device, precision):
                loss = _loss(model, rows, chunk) * len(rows) / ROWS
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        yield total


def _loss(model: Any, ids: torch.Tensor, chunk: int | None) -> torch.Tensor:
    if chunk is None:
        return model(input_ids=ids, labels=ids).loss
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    labels = ids[:, 1:].flatten()

    def piece(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model.lm_head(rows).float(), targets, reduction="sum")

    pieces = zip(hidden.split(chunk), labels.split(chunk), strict=True)
    return sum(checkpoint(piece, *pair, use_reentrant=False) for pair in pieces) / len(labels)


@functools.cache
def simulated(**settings: Any) -> Run:
    """The job with these settings on the card of the exercise; nothing is simulated twice."""
    depth = models.model_info(MODEL).config["num_hidden_layers"]
    return simulate(job, gpu=GPU, layers=depth, alike="layers", **settings)


def leaner():
    # Nothing is left of the layers' activations, so halving the rows saves nothing any more, and
    # makes gradients wait through the loss. What stands in the peak then is a piece of logits.
    return {
        "precision": "amp-bf16", "attention": "sdpa", "recompute": True, "chunk": 256,
        "on_host": True,
    }  # fmt: skip


def check_leaner(answer):
    if not isinstance(answer, Mapping):
        return f"A dictionary of settings is asked for; you gave {quote(answer)}."
    try:
        settings = {one_of(key, SWITCHES, "setting"): value for key, value in answer.items()}
        problem = _not_allowed(settings)
    except InputError as error:
        return str(error)
    if problem:
        return problem
    run = simulated(**settings)
    if problem := memory_target(run, MOST_BYTES):
        return f"{problem} {_leaner_advice(settings, run)}"
    whole = simulated(**STACK)
    return Feedback(
        True,
        f"That is right: {format_bytes(run.peak_bytes)}, where the whole stack took "
        f"{format_bytes(whole.peak_bytes)}, at {run.flops / whole.flops:.0%} of its operations.",
    )


def _not_allowed(settings: Mapping[str, Any]) -> str | None:
    """Why these settings are no answer, in a sentence; None if they are one."""
    precision = one_of(settings.get("precision", "fp32"), PRECISIONS, "precision")
    if not precision.startswith(("fp32", "amp-bf16")):
        return f"With {precision} it is another training: take fp32 or amp-bf16."
    one_of(settings.get("attention", "eager"), ("eager", "sdpa"), "attention")
    for name in ("recompute", "eight_bit", "on_host"):
        if not isinstance(settings.get(name, False), bool):
            return f"{name} is True or False, not {quote(settings[name])}."
    for name, most in (("micro", ROWS), ("chunk", ROWS * LENGTH)):
        value = settings.get(name)
        whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
        if value is not None and not whole:
            return f"{name} is a whole number from 1 to {most}, or None, not {quote(value)}."
    return None


def _leaner_advice(settings: Mapping[str, Any], run: Run) -> str:
    if run.bytes_of("optimizer"):
        return "States on the card alone are more than what is to be saved."
    if settings.get("micro") and run.bytes_of("gradients") and run.bytes_of("activations"):
        return "Which switch makes gradients wait while there are still activations?"
    if settings.get("chunk") is None or run.bytes_of("temporary") > run.bytes_of("gradients") / 2:
        return "What are the temporary bytes? Which setting says how many of them there are?"
    return "Compare with the whole stack, one setting at a time."


EXERCISES = (
    Exercise(
        "21-1",
        question=(
            "Write factor(weights, gradients, states, activations, k): how many times smaller the "
            "peak becomes if activations are divided by k."
        ),
        hints=(
            "Write down both moments: backward holds weights, states and activations; the "
            "optimizer's step holds weights, states and gradients.",
            "A peak is the larger of the two, before the division and after it.",
            "before = weights + states + max(activations, gradients).",
        ),
        solution=factor,
        check=check_factor,
        kind="function",
    ),
    Exercise(
        "21-2",
        question=("Find settings of the job whose peak is at most 1.4 GiB, for the same training."),
        hints=(
            "Look at the table under the bars: what stands in the peak of the whole stack?",
            "Gradients stand there because the second half of the rows comes after the first. Is "
            "halving the rows still worth it, with checkpointing on?",
            "The temporary bytes are logits, `chunk` rows of them: 49152 columns of 4 bytes.",
        ),
        solution=leaner,
        check=check_leaner,
    ),
)
