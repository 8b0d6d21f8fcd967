"""Exercises of lesson 01: where activations catch up with the states, and the optimizer's guest."""

import functools
from collections.abc import Callable

import torch

from labkit import models
from labkit.claims import plain_value
from labkit.exercises import Exercise
from labkit.exercises.checks import Feedback, call, quote, run_experiment, same_losses
from labkit.memory import Category, Run, format_bytes

GPU, MODEL, SMALL_MODEL = "t4", "SmolLM2-135M", "SmolLM2-tiny"
BF16_GPU = "rtx-3090"  # a T4 only emulates bfloat16, and has no fused attention for it
STATES = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER)


def _train(model_name, precision, batch_size, seq_len, make_optimizer=torch.optim.AdamW):
    """The lesson's step, as an experiment; ``make_optimizer`` is given the parameters."""
    # Building it once beforehand also lets a simulation find transformers loaded.
    models.parameter_count(model_name)

    def train(device, steps=2):
        torch.manual_seed(0)
        model = models.model(model_name, device=device, dtype=models.dtype_of(precision))
        optimizer = call(make_optimizer, model.parameters())
        data = models.batches(device=device, batch_size=batch_size, seq_len=seq_len, steps=steps)
        for ids in data:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    return train


def _most(run: Run) -> dict[Category, int]:
    """The most that each category held at any moment."""
    return {name: max(row) for name, row in run.trace.timeline().bytes_by_category.items()}


# --- 1: the crossing, calculated, then run -----------------------------------------------------

SEQ_LEN = 128


@functools.cache
def _crossing_run(batch_size: int) -> tuple[int, int]:
    """Activations and states, in bytes, of one step in bf16."""
    train = _train(MODEL, "bf16", batch_size, SEQ_LEN)
    most = _most(run_experiment(train, world="simulate", gpu=BF16_GPU, steps=1))
    return most[Category.ACTIVATIONS], sum(most[name] for name in STATES)


def crossing_batch():
    import labkit as lab

    def step(device, batch_size=4):
        model = lab.model("SmolLM2-135M", device=device, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for ids in lab.batches(device=device, batch_size=batch_size, seq_len=128):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    model = lab.model("SmolLM2-135M", device="meta")
    states = (2 + 2 + 2 + 2) * sum(each.numel() for each in model.parameters())
    # One small run says what a text costs; the rest is a division.
    run = lab.simulate(step, gpu="rtx-3090", steps=1, batch_size=4)
    activations = max(run.trace.timeline().bytes_by_category["activations"])
    return round(states / (activations / 4))


def check_crossing(answer):
    value, problem = plain_value(answer)
    if problem or isinstance(value, bool):
        return f"A batch size is asked for; you gave {quote(answer)}."
    if value != int(value):
        return f"You gave {value:g}. Batches are whole: round to the nearest."
    if not 1 <= value <= 10_000:
        return f"You gave {value:g}. A batch of 1 to 10 000 texts can be tried."
    activations_bytes, states_bytes = _crossing_run(int(value))
    ratio = activations_bytes / states_bytes
    found = (
        f"We ran batch {int(value)}: {format_bytes(activations_bytes)} of activations, "
        f"{format_bytes(states_bytes)} of states."
    )
    if 0.9 <= ratio <= 1.1:
        return Feedback(True, f"{found} Equal within a tenth, as you calculated.")
    direction = "too large" if ratio > 1 else "too small"
    return f"{found} Your batch is {direction}. {_crossing_slip(ratio)}".strip()


def _crossing_slip(ratio: float) -> str:
    """A guess at what went wrong, from how far off the answer is."""
    slips = {
        SEQ_LEN: f"That looks like tokens: one text has {SEQ_LEN} of them.",
        2.0: "Did you count 16 bytes per parameter? In bf16 each of the four takes 2.",
        0.75: "Did you leave out one of the four: weights, gradients, two moments?",
        0.5: "Did you count half of the states? There are gradients and two moments, too.",
        0.25: "Did you count the weights only? Gradients and both moments are states, too.",
    }
    near = [text for factor, text in slips.items() if abs(ratio / factor - 1) < 0.12]
    return near[0] if near else ""


# --- 2: the optimizer's guest ------------------------------------------------------------------

MOST_BYTES_PER_PARAMETER = 18.5  # 16 are stored; a GPU's libraries take some besides


def make_optimizer(parameters):
    # One parameter after the other: the temporaries are as large as one tensor, not all of them.
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def default_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


@functools.cache
def _reference() -> Run:
    train = _train(SMALL_MODEL, "fp32", 2, 64, default_optimizer)
    return run_experiment(train, world="measure", steps=4)


def check_optimizer(answer: Callable) -> Feedback | str | None:
    def checked(parameters):
        made = call(answer, parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"an optimizer is asked for, not {quote(made)}")
        return made

    run = run_experiment(_train(MODEL, "fp32", 1, SEQ_LEN, checked), world="simulate", gpu=GPU)
    parameters = models.model_info(MODEL).parameters
    found = run.peak_bytes / parameters
    most = _most(run)
    if most.get(Category.OPTIMIZER, 0) < 7 * parameters:
        return (
            f"Your optimizer keeps {most.get(Category.OPTIMIZER, 0) / parameters:.1f} bytes per "
            "parameter. AdamW keeps 8, and it is to stay AdamW: other optimizers have a lesson "
            "of their own."
        )
    if found > MOST_BYTES_PER_PARAMETER:
        guest = run.by_category.get(Category.TEMPORARY, 0) / parameters
        return (
            f"Your peak is {found:.1f} bytes per parameter, the target at most "
            f"{MOST_BYTES_PER_PARAMETER}. {guest:.1f} of them are temporary: look for an "
            "argument of AdamW that decides how many parameters are updated at once."
        )
    real = _train(SMALL_MODEL, "fp32", 2, 64, checked)
    problem = same_losses(run_experiment(real, world="measure", steps=4), _reference())
    return problem or Feedback(True, f"{found:.2f} bytes per parameter at the peak, same losses.")


EXERCISES = (
    Exercise(
        "01-1",
        question=(
            "SmolLM2-135M in pure bf16 with AdamW on an RTX 3090, 128 tokens per text: at which "
            "batch size do the activations equal the states?"
        ),
        hints=(
            "Activations grow in proportion to the batch. One run at a small batch says what one "
            "text costs.",
            "In pure bf16 everything stored per parameter has 2 bytes. There are four such things.",
            "states = 8 bytes × parameters; batch = states / (activations of a run / its batch). "
            "For the activations of a run, take the most that its timeline ever holds.",
        ),
        solution=crossing_batch,
        check=check_crossing,
    ),
    Exercise(
        "01-2",
        question=(
            "Make an AdamW whose small-batch step peaks at 18.5 bytes per parameter or less on a "
            "GPU, with the same losses."
        ),
        hints=(
            "The extra bytes are temporaries of the update. How many parameters does AdamW "
            "update in one go?",
            "On a GPU AdamW works on lists of tensors, all parameters at once. The documentation "
            "of torch.optim.AdamW calls this `foreach`.",
        ),
        solution=make_optimizer,
        check=check_optimizer,
        kind="function",
    ),
)
