"""Exercises of lesson 00: what a simulation knows, one share of the peak, and the largest batch."""

import functools
from dataclasses import replace

import torch

import labkit as lab
from labkit.exercises import Exercise, Feedback
from labkit.exercises.checks import call, expect_choice, expect_number
from labkit.memory import Run, format_bytes, positive_int

SEQ_LEN = 256  # as in the lesson
FIELDS = ("peak_bytes", "by_category", "flops", "seconds_per_step")


def train(device, batch_size=8, precision="fp32", model_name="SmolLM2-135M", seed=0):
    """The lesson's experiment; a test holds the two to the same bytes."""
    torch.manual_seed(seed)
    model = lab.model(model_name, device=device, dtype=lab.dtype_of(precision))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for ids in lab.batches(device=device, batch_size=batch_size, seq_len=SEQ_LEN, seed=seed):
        with lab.autocast(device, precision):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@functools.cache
def small_run() -> Run:
    return lab.simulate(train, gpu="t4", batch_size=4, model_name="SmolLM2-tiny")


# --- 1: what a simulated run lacks -------------------------------------------------------------


def what_is_missing():
    # Nothing is computed on tensors without numbers, so nothing takes time.
    return "seconds_per_step"


def check_missing(answer):
    run = small_run()
    known = {name: getattr(run, name) for name in FIELDS}
    missing = next(name for name, value in known.items() if value is None)
    problem = expect_choice(answer, missing, FIELDS)
    if problem is None:
        return Feedback(
            True,
            f"`{missing}` is None in a simulated run: tensors without numbers are not computed "
            "with, so there is nothing to time.",
        )
    folded = str(answer).lower().replace("-", "_")
    if folded in ("loss", "losses"):
        return f"You gave {folded!r}. True, losses are missing as well, but not among the four."
    if folded not in known:
        return problem
    return f"You chose {folded!r}. A simulated run knows it: {_shown(folded, known[folded])}."


def _shown(name, value):
    if name == "peak_bytes":
        return format_bytes(value)
    if name == "by_category":
        return ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in value.items())
    return f"{value:.3g} operations"


# --- 2: one share of the peak ------------------------------------------------------------------


def optimizer_percent(run):
    return 100 * run.bytes_of("optimizer") / run.peak_bytes


def check_share(answer):
    run = small_run()
    given = call(answer, run)
    problem = expect_number(given, optimizer_percent(run), rel_tolerance=0.005, unit="%")
    if problem:
        return _wrong_share(given, run) or problem
    message = (
        f"On our run your function gives {given:.3g} %: {format_bytes(run.bytes_of('optimizer'))} "
        f"of {format_bytes(run.peak_bytes)}."
    )
    parts = {name: nbytes for name, nbytes in run.by_category.items() if name != "optimizer"}
    stateless = replace(run, by_category=parts, peak_bytes=sum(parts.values()))
    try:
        call(answer, stateless)
    except KeyError:
        message += (
            " One remark: an optimizer without state, such as plain SGD, has no entry in "
            '`by_category`. `run.bytes_of("optimizer")` then gives 0 and raises nothing.'
        )
    return Feedback(True, message)


def _wrong_share(given, run):
    """What the learner divided by what, where that can be seen."""
    state = run.bytes_of("optimizer")
    mistakes = {
        "the state over the weights": 100 * state / run.bytes_of("weights"),
        "the state over the capacity of the card": 100 * state / run.capacity_bytes,
        "the share of the weights": 100 * run.bytes_of("weights") / run.peak_bytes,
        "the bytes of the state": state,
    }
    for words, value in mistakes.items():
        if expect_number(given, value, rel_tolerance=0.005) is None:
            return (
                f"Your function gives {given:,.4g}. That is {words}. Asked for is the state's "
                "share of the peak, in percent."
            )
    return None


# --- 3: the largest batch on a T4 --------------------------------------------------------------


@functools.cache
def t4_run(rows: int) -> Run:
    return lab.simulate(train, gpu="t4", batch_size=rows)


def largest_batch():
    few, many = 8, 16  # both peak in backward, so both lie on the line
    per_row = (t4_run(many).peak_bytes - t4_run(few).peak_bytes) / (many - few)
    paid_once = t4_run(few).peak_bytes - few * per_row
    rows = int((lab.gpu("t4").budget_bytes - paid_once) // per_row)
    while not t4_run(rows).fits:
        rows -= 1  # the tensors would fit, the allocator's blocks do not
    return rows


def check_batch(answer):
    if isinstance(answer, float):
        if not answer.is_integer():
            return f"You gave {answer:g}. A batch has whole rows: does the last, cut one still fit?"
        answer = int(answer)
    rows = positive_int(answer, "the batch", most=1 << 20)
    room = lab.gpu("t4").budget_bytes
    run, one_more = t4_run(rows), t4_run(rows + 1)
    needed = format_bytes(run.peak_bytes)
    if run.peak_bytes > room:
        return (
            f"A batch of {rows} needs {needed}; a T4 leaves a program "
            f"{format_bytes(room)}. Weights and optimizer state take their part of it before the "
            "first row does, and the driver takes some of the 16 GB on the box."
        )
    if not run.fits:
        return (
            f"Very close. The tensors of a batch of {rows} are {needed} and would fit, but the "
            f"blocks that PyTorch hands out would need {format_bytes(run.reserved_bytes)} of "
            f"{format_bytes(room)}. Go down a row at a time until `fits` says yes."
        )
    if one_more.fits:
        why = (
            "You are close. Round down only at the end, and take both points from batches that "
            "peak in backward, of four rows or more."
            if not t4_run(rows + 2).fits
            else "Did you scale the whole peak with the batch? Weights and optimizer state do not "
            "grow with it."
        )
        return (
            f"A batch of {rows} fits, with {needed} of {format_bytes(room)}. But so "
            f"does one of {rows + 1}. {why}"
        )
    return Feedback(
        True,
        f"A batch of {rows} fits: {needed} of tensors, {format_bytes(run.reserved_bytes)} of "
        f"blocks in {format_bytes(room)}. One of {rows + 1} does not.",
    )


EXERCISES = (
    Exercise(
        "00-1",
        question="Which of these is missing from a simulated run?",
        hints=(
            "Simulated tensors have a shape and a type, but no numbers. What can be found out "
            "from shapes alone?",
            "Look at `imagined.peak_bytes`, `imagined.by_category`, `imagined.flops` and "
            "`imagined.seconds_per_step` in a cell of your own.",
        ),
        solution=what_is_missing,
        check=check_missing,
    ),
    Exercise(
        "00-2",
        question="How many percent of a run's peak are the optimizer's state?",
        hints=(
            "Part over whole, times 100. The whole is `run.peak_bytes`.",
            'The part is `run.bytes_of("optimizer")`. Do not forget to `return` the result.',
        ),
        solution=optimizer_percent,
        check=check_share,
        kind="function",
    ),
    Exercise(
        "00-3",
        question="What is the largest batch with which SmolLM2-135M trains on a T4, in fp32?",
        hints=(
            "peak = paid once + rows × per row. Call `t4_run` for two batches; the difference of "
            "their `peak_bytes` over the difference of the rows is what one row costs.",
            "Do not take a batch of 1: there the peak is in the optimizer's step, off the line. "
            "8 and 16 will do.",
            'rows = (lab.gpu("t4").budget_bytes - paid once) / per row, rounded down; then one '
            "less at a time until `t4_run(rows).fits`.",
        ),
        solution=largest_batch,
        check=check_batch,
    ),
)
