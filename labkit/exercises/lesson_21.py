"""Exercises of lesson 21: how many positions fit, and batches within a budget of bytes."""

import math

import numpy as np

from labkit.exercises.checks import Correct, call, expect_results
from labkit.exercises.engine import check_of

MOST_PADDING, MOST_BATCHES = 0.1, 1.25
# Two runs, (positions, peak), and a budget: the larger run comes first, too; one barely grows.
RUNS = (
    ((1024, 3_100_000_000), (2048, 4_800_000_000), 14_500_000_000),
    ((900, 61_000_000_000), (300, 43_100_000_000), 79_000_000_000),
    ((512, 9_000_000_000), (4096, 9_900_000_000), 10_000_000_000),
)


def most_positions(first, second, budget_bytes):
    positions, peak = first
    other_positions, other_peak = second
    bytes_each = (other_peak - peak) / (other_positions - positions)
    fixed = peak - positions * bytes_each
    return math.floor((budget_bytes - fixed) / bytes_each)


def _slips(first, second, budget_bytes):
    (positions, peak), (others, other_peak) = first, second
    each = (other_peak - peak) / (others - positions)
    proportional = "Not all of the peak grows with the positions: what is left of it at none?"
    return {
        budget_bytes / each: "Weights, gradients and states need a part of the budget, too.",
        budget_bytes * positions / peak: proportional,
        budget_bytes * others / other_peak: proportional,
        (budget_bytes - peak) / each: "That many fit *beside* the first run's. How many in all?",
    }


@check_of("21-1", most_positions)
def check_positions(answer):
    for job in RUNS:
        given, right = call(answer, *job), most_positions(*job)
        if given == right + 1:
            return f"With {given:,} positions the last one no longer fits: which way do you round?"
        if given == right - 1:
            return f"{given:,} positions fit, and so does one more: which way do you round?"
    return expect_results(answer, most_positions, RUNS, slips=_slips, rel_tolerance=0)


def batches(lengths, budget_bytes, fixed, linear, square):
    found, batch = [], []
    # From the longest on: the first text of a batch says what each of its rows takes.
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        longest = lengths[batch[0]] if batch else lengths[number]
        row_bytes = linear * longest + square * longest**2
        if fixed + (len(batch) + 1) * row_bytes > budget_bytes:
            found.append(batch)
            batch = []
        batch.append(number)
    return [*found, batch]


def data_sets() -> list[tuple[list[int], int, int, int, int]]:
    """Return lengths, none of them sorted, and a model for each: budget, fixed, linear, square."""
    random = np.random.default_rng(0)
    chats = random.lognormal(4.6, 0.8, 600).clip(16, 512).astype(int).tolist()
    longest = [*random.integers(20, 250, 600).tolist(), 1024]  # one fills a batch by itself
    return [
        (chats, 8_000_000_000, 1_500_000_000, 1_600_000, 1_700),
        (longest[::-1], 10_000_000_000, 6_000_000_000, 1_200_000, 2_400),
        ([30, 7] * 300, 2_000_000_000, 1_000_000_000, 3_000_000, 9_000),
    ]


@check_of("21-2", batches)
def check_batches(answer):
    for lengths, *model in data_sets():
        given = [list(batch) for batch in call(answer, list(lengths), *model)]
        if problem := _wrong_batches(given, lengths, *model):
            return f"For {len(lengths)} texts, the longest of {max(lengths)} tokens: {problem}"
    return Correct(
        "That is right. A limit in tokens cannot do it: R T² is T times R T, so the same R T takes "
        "more bytes where texts are long. A limit that suits the longest texts leaves the batches "
        "of short ones far below the budget."
    )


def _wrong_batches(given, lengths, budget_bytes, fixed, linear, square) -> str | None:
    """Return what is wrong with the batches of one data set."""
    if not all(given):
        return "one of the batches is empty."
    numbers = [number for batch in given for number in batch]
    if sorted(numbers) != list(range(len(lengths))):
        return (
            f"the batches have {len(numbers)} numbers, {len(set(numbers))} of them different. Each "
            f"text's number, from 0 to {len(lengths) - 1}, must be there once."
        )
    positions = 0
    for batch in given:
        longest = max(lengths[number] for number in batch)
        positions += len(batch) * longest
        taken = fixed + len(batch) * (linear * longest + square * longest**2)
        if taken > budget_bytes:
            return (
                f"{len(batch)} rows, the longest of {longest} tokens, take {taken / 1e9:.2f} GB; "
                f"the budget is {budget_bytes / 1e9:.2f} GB. Is every term there?"
            )
    padding = 1 - sum(lengths) / positions
    if padding > MOST_PADDING:
        return f"{padding:.0%} of all positions are padding. Put texts of similar length together."
    fewest = len(batches(lengths, budget_bytes, fixed, linear, square))
    most = math.ceil(MOST_BATCHES * fewest) + 1
    if len(given) > most:
        return f"these are {len(given)} batches; at most {most}. Fill them to the budget."
    return None
