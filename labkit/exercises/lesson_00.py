"""Exercises of lesson 00: what a simulation knows, one share of the peak, and the largest batch."""

import functools

import torch

import labkit as lab
from labkit.exercises.checks import Correct, call, expect_number, whole_number
from labkit.exercises.engine import check_of
from labkit.runs import Run
from labkit.values import format_bytes, one_of

SEQ_LEN = 256  # as in the lesson
FIELDS = ("peak_bytes", "by_category", "flops", "seconds_per_step")


def train(device, batch_size=8, precision="fp32", model_name="SmolLM2-135M", seed=0, layers=None):
    """The lesson's experiment; a test compares the bytes of the two."""
    torch.manual_seed(seed)
    model = lab.model(model_name, device=device, dtype=lab.dtype_of(precision), layers=layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for ids in lab.batches(device=device, batch_size=batch_size, seq_len=SEQ_LEN, seed=seed):
        with lab.autocast(device, precision):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def what_is_missing():
    # Nothing is computed on tensors without numbers, so nothing takes time.
    return "seconds_per_step"


@check_of(
    "00-1",
    what_is_missing,
    "Simulated tensors have a shape and a type, but no numbers. What can be found out "
    "from shapes alone?",
    "Look at `imagined.peak_bytes`, `imagined.by_category`, `imagined.flops` and "
    "`imagined.seconds_per_step` in a cell of your own.",
)
def check_missing(answer):
    chosen = one_of(answer, FIELDS, "choice")
    if chosen != what_is_missing():
        return f"You chose {chosen!r}. A simulated run knows it: print `imagined.{chosen}`."
    return Correct(
        "`seconds_per_step` is None in a simulated run: tensors without numbers are not computed "
        "with, so there is nothing to time."
    )


def optimizer_percent(run):
    return 100 * run.bytes_of("optimizer") / run.peak_bytes


@functools.cache
def small_run() -> Run:
    return lab.simulate(train, gpu="t4", batch_size=4, model_name="SmolLM2-tiny")


@check_of(
    "00-2",
    optimizer_percent,
    "Part over whole, times 100. The whole is `run.peak_bytes`.",
    'The part is `run.bytes_of("optimizer")`. Do not forget to `return` the result.',
)
def check_share(answer):
    run = small_run()
    state_bytes, weight_bytes = run.bytes_of("optimizer"), run.bytes_of("weights")
    asked = "Asked for is the state's share of the peak, in percent."
    slips = {
        100 * state_bytes / weight_bytes: f"That is the state over the weights. {asked}",
        100 * state_bytes / run.capacity_bytes: f"That is the state over the capacity. {asked}",
        100 * weight_bytes / run.peak_bytes: f"That is the share of the weights. {asked}",
        state_bytes: f"Those are the bytes of the state. {asked}",
    }
    right = optimizer_percent(run)
    return expect_number(call(answer, run), right, rel_tolerance=0.005, unit="%", slips=slips)


@functools.cache
def t4_run(rows: int) -> Run:
    deep = {"layers": 30, "alike": "layers"}  # SmolLM2-135M's, from simulating a few
    return lab.simulate(train, gpu="t4", batch_size=rows, **deep)


def largest_batch():
    few, many = 8, 16  # both peak in backward, so both lie on the line
    per_row = (t4_run(many).peak_bytes - t4_run(few).peak_bytes) / (many - few)
    paid_once = t4_run(few).peak_bytes - few * per_row
    rows = int((lab.gpu("t4").budget_bytes - paid_once) // per_row)
    while not t4_run(rows).fits:
        rows -= 1  # the tensors would fit, the allocator's blocks do not
    return rows


@check_of(
    "00-3",
    largest_batch,
    "peak = paid once + rows × per row. Call `t4_run` for two batches; the difference of "
    "their `peak_bytes` over the difference of the rows is what one row costs.",
    "Do not take a batch of 1: there the peak is in the optimizer's step, off the line. "
    "8 and 16 will do.",
    'rows = (lab.gpu("t4").budget_bytes - paid once) / per row, rounded down; then one '
    "less at a time until `t4_run(rows).fits`.",
)
def check_batch(answer):
    rows = whole_number(answer, "the batch", most=1 << 20)
    run = t4_run(rows)
    tensors, blocks = format_bytes(run.peak_bytes), format_bytes(run.reserved_bytes)
    room = format_bytes(run.capacity_bytes)
    if run.peak_bytes > run.capacity_bytes:
        return (
            f"A batch of {rows} needs {tensors}; a T4 leaves a program {room}. Weights and "
            "optimizer state take their part of it before the first row does, and the driver takes "
            "some of the 16 GB on the box."
        )
    if not run.fits:
        return (
            f"Very close. The tensors of a batch of {rows} are {tensors} and would fit, but the "
            f"blocks that PyTorch hands out would need {blocks} of {room}. Go down a row at a time "
            "until `fits` says yes."
        )
    if t4_run(rows + 1).fits:
        return (
            f"A batch of {rows} fits, with {tensors} of {room}. But so does one of {rows + 1}. "
            "Weights and optimizer state do not grow with the batch: did you scale the whole peak?"
        )
    return Correct(
        f"A batch of {rows} fits: {tensors} of tensors, {blocks} of blocks in {room}. One of "
        f"{rows + 1} does not."
    )
