"""Exercises of lesson 12: what Adafactor keeps, and AdamW's loss at two thirds of its bytes."""

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import labkit as lab
from labkit.exercises import Exercise
from labkit.exercises.checks import (
    Feedback,
    expect_number,
    memory_target,
    run_experiment,
)
from labkit.memory import InputError
from labkit.seeds import SEEDS, Losses, losses

ROWS, COLUMNS, FP32 = 4096, 14336, 4
MOST_PEAK, MOST_EXTRA_LOSS = 2 / 3, 0.02
WIDE, STEPS = 768, 60
Row = tuple[int, ...]


# --- 1: what Adafactor keeps -------------------------------------------------------------------


def state_bytes():
    rows, columns = 4096, 14336
    return 4 * (rows + columns)  # one mean for each row, one for each column, four bytes each


MISTAKES = {
    ROWS + COLUMNS: "That is how many numbers it keeps. How many bytes does each take?",
    FP32 * ROWS * COLUMNS: "That is as many bytes as the matrix itself has: SGD's momentum.",
    2 * FP32 * ROWS * COLUMNS: "That is what AdamW keeps. Adafactor keeps no number per weight.",
    2 * FP32 * (ROWS + COLUMNS): (
        "That would be two numbers for each row and each column. Adafactor has no first moment, "
        "only the mean of the squares."
    ),
    FP32 * ROWS: "That is the rows. What about the columns?",
    FP32 * COLUMNS: "That is the columns. What about the rows?",
    2 * (ROWS + COLUMNS): "Two bytes each would be BF16; the matrix is FP32.",
}


def check_state(answer):
    return expect_number(answer, state_bytes(), rel_tolerance=0, unit="bytes", slips=MISTAKES)


# --- 2: AdamW's loss at two thirds of its bytes ------------------------------------------------


def roomy(device, width=48, seed=0, steps=60):
    """The reference that the notebook shows."""
    torch.manual_seed(seed)
    shape = {"vocab_size": 256, "layers": 2, "hidden_size": width, "intermediate_size": 3 * width}
    model = lab.model("SmolLM2-tiny", device=device, **shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for ids in lab.batches(device=device, batch_size=4, seq_len=64, seed=seed, steps=steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


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


def check_thrifty(answer):
    reference, run = (
        run_experiment(experiment, world="simulate", gpu="t4", width=WIDE)
        for experiment in (roomy, answer)
    )
    if problem := _other_model(run, reference) or memory_target(
        run, int(MOST_PEAK * reference.peak_bytes)
    ):
        return f"At width {WIDE}: {problem}"
    theirs, expected = _train(roomy)
    try:
        ours, seen = _train(answer)
    except InputError as error:
        return f"Your experiment could not be trained: {error}"
    share = run.peak_bytes / reference.peak_bytes
    return (
        _other_data(ours, theirs)
        or _too_little_data(seen, expected)
        or _lost(ours, theirs)
        or Feedback(
            True,
            f"That is right: {share:.0%} of the peak, and a last loss of {ours.final:.2f} where "
            f"AdamW has {theirs.final:.2f}.",
        )
    )


def _train(experiment) -> tuple[Losses, set[Row]]:
    """The losses, and the rows that they come from.

    The losses do not tell a batch that is trained on again and again from a good optimizer. So the
    embedding is watched: however a step divides its batch, each row passes there.
    """
    rows: set[Row] = set()

    def record(module, inputs):
        if isinstance(module, torch.nn.Embedding):
            ids = torch.atleast_2d(inputs[0])
            rows.update(map(tuple, ids.reshape(-1, ids.shape[-1]).tolist()))

    with register_module_forward_pre_hook(record):
        return losses(experiment, seeds=SEEDS, steps=STEPS), rows


def _other_model(run, reference):
    """The forward pass must cost the same: no smaller model, no shorter rows."""
    return (
        None
        if abs(run.flops / reference.flops - 1) < 0.02
        else (
            f"your step does {run.flops / reference.flops:.2f} times the arithmetic of `roomy`'s. "
            "The model and the data must stay; only the update may change."
        )
    )


def _other_data(ours: Losses, theirs: Losses) -> str | None:
    """Before the first update nothing may differ."""
    for mine, other in zip(ours.curves, theirs.curves, strict=True):
        if not abs(mine[0] - other[0]) <= 1e-4 * other[0]:
            return (
                f"Your first loss is {mine[0]:.4g}, `roomy`'s is {other[0]:.4g}. Before the first "
                "update nothing may differ: the same seed, the same model, the same data."
            )
    return None


def _too_little_data(seen: set[Row], expected: set[Row]) -> str | None:
    found = len(seen & expected)
    if found == len(expected):
        return None
    return (
        f"Your model has seen {found} of the {len(expected)} rows of text that `roomy`'s sees. The "
        "data must stay: a new batch at every step."
    )


def _lost(ours: Losses, theirs: Losses) -> str | None:
    difference = ours.against(theirs).mean
    if difference <= MOST_EXTRA_LOSS:
        return None
    if difference != difference:
        return "The memory is right, but the loss is no longer finite: the rate is too high."
    return (
        f"The memory is right, but your last loss is {ours.final:.2f}, {difference:.0%} above "
        f"AdamW's {theirs.final:.2f}; at most {MOST_EXTRA_LOSS:.0%} is allowed. Is the learning "
        "rate one for *this* optimizer?"
    )


EXERCISES = (
    Exercise(
        "12-1",
        question="How many bytes does Adafactor keep for a 4096 × 14336 matrix in FP32?",
        hints=(
            "For a matrix of r rows and c columns it keeps one mean per row and one per column.",
            "4096 + 14336 numbers, of four bytes each.",
        ),
        solution=state_bytes,
        check=check_state,
    ),
    Exercise(
        "12-2",
        question="AdamW's loss within 2 % at two thirds of its peak.",
        hints=(
            "Which optimizer of the race had AdamW's loss or a better one, and next to no state?",
            "`torch.optim.Adafactor`; its default rate is too low here. Which one won the search?",
        ),
        solution=thrifty,
        check=check_thrifty,
    ),
)
