"""Exercises of lesson 06: what checkpointing costs, and a memory target with a price limit."""

from functools import partial

from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

MOST_PEAK, MOST_EXTRA_FLOPS = 0.60, 0.14
checkpoint_block = from_notebook("06", "checkpoint_block", globals())
train_blocks = from_notebook("06", "train_blocks", globals())


def extra_percent():
    forward = 1.0
    step = forward + 2 * forward  # backward costs two forwards
    repeated = 6 / 24 * 0.90 * forward  # the checkpointed share of one forward, once more
    return 100 * repeated / step


@check_of(
    "06-1",
    extra_percent,
    "Call the arithmetic of one forward pass 1. What does a whole step cost?",
    "A step is 1 forward + 2 for backward = 3. Which share of the 1 is done once more?",
)
def check_price(answer):
    slips = {
        100 * 6 / 24 * 0.90: "That is the growth of the forward pass alone; backward is part of "
        "the step too, and costs two forwards.",
        100 * 6 / 24 / 3: "Not all of the forward pass is in the blocks: 90 % is.",
        25: "That is the share of the blocks. Which share of a whole step is that?",
    }
    return checks.expect_number(answer, extra_percent(), rel_tolerance=0.005, slips=slips)


def choose(blocks):
    return blocks[:6]  # half of the price; the last block must not be among them


@check_of(
    "06-2",
    choose,
    "All 12 blocks cost 26 %. How many cost 14 %? And what is live when backward reaches the first "
    "block that it computes again?",
    "Half the blocks, but not the last one: backward reaches it first, while all the others still "
    "keep what they have.",
)
def check_choice(answer):
    how = {"mode": "measure", "steps": 2}
    run = checks.run_experiment(train_blocks, choose=partial(checks.call, answer), **how)
    reference = checks.reference_run(train_blocks, **how)
    if problem := checks.same_losses(run, reference):
        return problem
    if problem := checks.memory_target(run, int(MOST_PEAK * reference.peak_bytes)):
        if run.flops > reference.flops:
            problem += " Where do recomputed activations meet those that are still kept?"
        return problem
    if problem := checks.arithmetic_limit(run, reference, MOST_EXTRA_FLOPS):
        return f"{problem} Which blocks could keep what they compute?"
    peak, extra = run.peak_bytes / reference.peak_bytes, run.flops / reference.flops - 1
    return checks.Correct(
        f"That is right: {peak:.0%} of the peak for {extra:+.1%} arithmetic, equal losses."
    )
