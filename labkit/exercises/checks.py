"""What the checks of the exercises are built from.

Each ``expect_…`` and each comparison returns None where all is well, else a sentence for the
learner, so that a check reads ``return expect_number(...) or memory_target(...)``.

Limits: losses are compared as numbers, step by step; a simulated run has none.
"""

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from labkit.claims import format_value, plain_value
from labkit.hardware import pretend
from labkit.memory import GIB, MIB, InputError, Run, format_bytes, one_of

WORLDS = ("run", "measure", "simulate")
# Wrong by one of these factors is a slip with units, and is said to be one.
UNIT_SLIPS = {
    1024.0: "1024, a binary prefix",
    1000.0: "1000, a decimal prefix",
    float(MIB): "1024², two binary prefixes",
    float(GIB): "1024³, three binary prefixes",
    1e9: "1000³, three decimal prefixes",
    GIB / 1e9: "1024³/1000³, GiB against GB",
    8.0: "8, bits against bytes",
    100.0: "100, percent against shares",
}
NEAR_A_SLIP = 0.005  # relative


class NotAttempted(Exception):  # noqa: N818 (an outcome, not an error)
    """The learner's function is still the stub. The message says what to do."""


@dataclass(frozen=True)
class Feedback:
    """What a check found, with a message of its own."""

    correct: bool
    message: str


def quote(answer: Any) -> str:
    """What the learner gave, short enough for a sentence. Never raises."""
    try:
        return reprlib.repr(answer)
    except (Exception, SystemExit):  # `repr` runs the learner's code; 10**5000 has too many digits
        return f"a value of type {type(answer).__name__} that cannot be printed"


# --- values ------------------------------------------------------------------------------------


def expect_number(
    answer: Any,
    expected: float,
    *,
    rel_tolerance: float = 0.02,
    unit: str = "",
    slips: Mapping[float, str] | None = None,
) -> str | None:
    """None if ``answer`` is a number within ``rel_tolerance`` of ``expected``, else why not.

    Args:
        answer: what the learner gave.
        expected: the right number; 0 must be met exactly.
        rel_tolerance: how far off, relative to ``expected``, still counts.
        unit: shown after the numbers; ``"bytes"`` and the units of claims show as those do.
        slips: numbers that a known mistake gives, other than 0, and a sentence about each.
    """
    value, problem = plain_value(answer)
    if problem or isinstance(value, bool):
        kind = f" of {unit}" if unit else ""
        return f"A number{kind} is asked for; you gave {quote(answer)}."
    if abs(value - expected) <= rel_tolerance * abs(expected):
        return None
    if slip := _near(value, slips or {}):
        given = f"{value:,.0f}" if value == int(value) else f"{value:g}"
        return f"You gave {given}. {slip}"
    shown = format_value(value, unit) if unit else f"{value:g}"
    direction = "less" if value > expected else "more"
    if expected and (slip := _unit_slip(value / expected)):
        return f"You gave {shown}. That is off by a factor of {slip}: check the units."
    return f"You gave {shown}. The right answer is {direction}."


def _near(value: float, slips: Mapping[float, str]) -> str | None:
    """What to say about the slip nearest to ``value``; None if it is near to none."""
    distances = {abs(value / slip - 1): text for slip, text in slips.items()}
    nearest = min(distances, default=NEAR_A_SLIP)
    return distances[nearest] if nearest < NEAR_A_SLIP else None


def _unit_slip(ratio: float) -> str | None:
    for factor, name in UNIT_SLIPS.items():
        if any(abs(ratio / f - 1) < 0.005 for f in (factor, 1 / factor)):
            return name
    return None


def expect_choice(answer: Any, expected: str, choices: Iterable[str]) -> str | None:
    """None if ``answer`` names the choice ``expected`` (capitals are forgiven), else why not."""
    try:
        chosen = one_of(answer, choices, "choice")
    except InputError as error:
        return f"You gave {quote(answer)}: {error}"
    return None if chosen == expected else f"You chose {quote(chosen)}. It is another one."


# --- functions and experiments -----------------------------------------------------------------


def call(answer: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """What the learner's function returns; a stub that returns nothing is not an attempt.

    Raises:
        NotAttempted: it returned None or ``...``.
        Exception: whatever the learner's function raised.
    """
    value = answer(*arguments, **named)
    if value is None or value is ...:
        name = getattr(answer, "__name__", "your function")
        raise NotAttempted(f"`{name}` returns nothing yet. Let it return the answer.")
    return value


def run_experiment(
    answer: Callable[..., Iterator[Any]], *, world: str = "run", **parameters: Any
) -> Run:
    """The run of the learner's experiment.

    Args:
        answer: a generator function ``answer(device, ...)``.
        world: ``"run"`` measures where there is a GPU and else simulates, ``"measure"`` runs for
            real on this machine (losses, small sizes), ``"simulate"`` never does.
        **parameters: for ``labkit.run``, ``labkit.measure`` or ``labkit.simulate``.

    Raises:
        NotAttempted: it yields ``...`` or None.
        Exception: whatever the experiment raised. Running out of memory is not raised; it is in
            ``Run.oom``.
    """
    import labkit

    execute = getattr(labkit, one_of(world, WORLDS, "world"))
    return execute(_attempted(answer), **parameters)


def _attempted(answer: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """The same experiment, except that a stub's ``yield ...`` is not taken for a loss."""

    @functools.wraps(answer)
    def experiment(*arguments: Any, **named: Any) -> Iterator[Any]:
        with closing(answer(*arguments, **named)) as steps:
            while True:
                try:
                    # No variable may hold the loss here: it would live one step too long.
                    yield _loss(next(steps))
                except StopIteration:
                    return

    # `wraps` is followed by signature() but not by everybody who counts parameters.
    experiment.__signature__ = inspect.signature(answer)
    return experiment


def _loss(loss: Any) -> Any:
    if loss is None or loss is ...:
        raise NotAttempted("Your experiment yields no loss yet. Let it yield the loss per step.")
    return loss


@functools.cache
def reference_run(experiment: Callable[..., Iterator[Any]], **parameters: Any) -> Run:
    """The run of a check's own experiment, whatever ``lab.pretend`` says; kept for the session.

    Raises:
        InputError: it runs out of memory even so. That is not kept.
    """
    with pretend():
        run = run_experiment(experiment, **parameters)
    if run.oom is not None:
        raise InputError(f"the run that it is compared with went {run.oom}")
    return run


def memory_target(run: Run, most_bytes: int) -> str | None:
    """None if the run's peak is at most ``most_bytes`` and it did not run out of memory."""
    if run.oom is not None:
        return _did_not_fit(run)
    if run.peak_bytes <= most_bytes:
        return None
    largest = max(run.by_category, key=run.by_category.get)
    return (
        f"Your peak is {format_bytes(run.peak_bytes)}, the target at most "
        f"{format_bytes(most_bytes)}. The largest part of your peak is {largest}, with "
        f"{format_bytes(run.by_category[largest])}."
    )


def _did_not_fit(run: Run) -> str:
    return f"Your run did not fit. It went {run.oom}."


def same_losses(run: Run, reference: Run, *, rel_tolerance: float = 1e-4) -> str | None:
    """None if both runs have the same losses, step by step, within ``rel_tolerance``.

    Raises:
        InputError: the reference has no losses, so there is nothing to compare with.
    """
    if run.oom is not None:
        return _did_not_fit(run)
    if not reference.losses:
        raise InputError(f"{reference.name!r} has no losses: run it with world='measure'")
    if len(run.losses) != len(reference.losses):
        return f"Your run has {len(run.losses)} losses, {len(reference.losses)} are expected."
    for step, (loss, right) in enumerate(zip(run.losses, reference.losses, strict=True), 1):
        if not abs(loss - right) <= rel_tolerance * abs(right):  # also true of a loss of NaN
            return (
                f"Your loss at step {step} is {loss:.5g}; it should still be {right:.5g}. "
                "The training must stay the same, only its memory may change."
            )
    return None
