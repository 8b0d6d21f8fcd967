"""Exercises of lesson 00: what a simulation knows, one share of the peak, and the largest batch."""

import labkit as lab
from labkit.exercises.checks import (
    Correct,
    call,
    expect_limit,
    expect_number,
    simulated,
    train,
)
from labkit.exercises.engine import check_of
from labkit.runs import Run
from labkit.values import one_of

SEQ_LEN = 256  # as in the lesson
FIELDS = ("peak_bytes", "by_category", "flops", "seconds_per_step")


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


@check_of(
    "00-2",
    optimizer_percent,
    "Part over whole, times 100. The whole is `run.peak_bytes`.",
    'The part is `run.bytes_of("optimizer")`. Do not forget to `return` the result.',
)
def check_share(answer):
    run = simulated(train, gpu="t4", name="SmolLM2-tiny", batch_size=4, seq_len=SEQ_LEN)
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


def t4_run(rows: int) -> Run:
    deep = {"layers": 30, "alike": "layers"}  # SmolLM2-135M's, from simulating a few
    return simulated(train, gpu="t4", batch_size=rows, seq_len=SEQ_LEN, **deep)


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
    "peak = paid once + rows × per row. Call `t4_run` for batches of 8 and 16; the difference of "
    "their `peak_bytes` over 8 is what one row costs.",
    'rows = (lab.gpu("t4").budget_bytes - paid once) / per row, rounded down; then one '
    "less at a time until `t4_run(rows).fits`.",
)
def check_batch(answer):
    return expect_limit(
        answer,
        "rows",
        t4_run,
        most=1 << 20,
        too_much="Weights and optimizer state take their part before the first row does, and the "
        "driver takes some of the 16 GB on the box.",
        too_little="Weights and optimizer state do not grow with the batch: did you scale the "
        "whole peak?",
    )
