"""Exercises of lesson 00: one share of the peak, and the largest batch."""

import torch

import labkit as lab
from gpumem.runs import Run
from labkit.exercises import checks
from labkit.exercises.checks import simulated, train
from labkit.exercises.engine import check_of

SEQ_LEN = 256  # as in the lesson


def optimizer_percent(run):
    return 100 * run.bytes_of("optimizer") / run.peak_bytes


def amsgrad(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


@check_of("00-1", optimizer_percent)
def check_share(answer):
    asked = "Asked for is the state's share of the peak, in percent."
    # Three numbers of state per weight and one: what is true of AdamW's two only is wrong for both.
    for make, precision in ((amsgrad, "bf16"), (momentum, "fp32")):
        how = {"name": "SmolLM2-tiny", "batch_size": 4, "seq_len": SEQ_LEN, "precision": precision}
        run = simulated(train, gpu="t4", make=make, **how)
        state_bytes, weight_bytes = run.bytes_of("optimizer"), run.bytes_of("weights")
        weight_percent = 100 * weight_bytes / run.peak_bytes
        slips = {
            100 * state_bytes / run.reserved_bytes: f"That is a share of reserved memory. {asked}",
            100 * state_bytes / run.capacity_bytes: f"That is the state over the capacity. {asked}",
            weight_percent: f"That is the share of the weights. {asked}",
            2 * weight_percent: "AdamW stores twice the weights; this run does not.",
            100 * state_bytes / weight_bytes: f"That is the state over the weights. {asked}",
            state_bytes: f"Those are the bytes of the state. {asked}",
        }
        given, right = checks.call(answer, run), optimizer_percent(run)
        rounded = 0.51 / right  # whole percents are right, too
        problem = checks.expect_number(given, right, rel_tolerance=rounded, unit="%", slips=slips)
        if problem:
            return f"Tried on a run with {make.__name__}, {precision}: {problem}"
    return None


def t4_run(rows: int) -> Run:
    deep = {"layers": 30, "alike": "layers"}  # SmolLM2-135M's, from simulating a few
    return simulated(train, gpu="t4", batch_size=rows, seq_len=SEQ_LEN, **deep)


def largest_batch():
    few, many = 8, 16  # both peak in backward, so both lie on the line
    reserved_by_few, reserved_by_many = t4_run(few).reserved_bytes, t4_run(many).reserved_bytes
    per_row = (reserved_by_many - reserved_by_few) / (many - few)
    paid_once = reserved_by_few - few * per_row
    return int((lab.gpu("t4").budget_bytes - paid_once) // per_row)


@check_of("00-2", largest_batch)
def check_batch(answer):
    return checks.expect_limit(
        answer,
        "rows",
        t4_run,
        most=1 << 20,
        too_much="Reserved memory decides: did your line go through `peak_bytes`? And a T4 leaves "
        "less to a program than the 16 GB on the box.",
        too_little="Weights and optimizer state do not grow with the batch: did you scale all of "
        "reserved memory?",
    )
