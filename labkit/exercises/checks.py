"""Building blocks for the checks of the exercises.

Each comparison returns None for a right answer, else a sentence for the learner, so that a check
reads ``return same_losses(...) or memory_target(...)``.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import labkit as lab
from gpumem.estimation.estimate import Estimate, estimate
from gpumem.estimation.recipe import Recipe
from gpumem.hardware.this_machine import pretend
from gpumem.inputs import InputError, one_of, positive_int, shown
from gpumem.measurement import measure
from gpumem.runs import Run
from gpumem.simulation import simulate
from gpumem.units import GIB, MIB, format_bytes
from labkit.lesson.claims import format_value, plain_value
from labkit.loss_comparison import losses, relative_error

MODES = {"measure": measure, "simulate": simulate}
# An answer that is wrong by one of these factors is probably right in another unit.
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
DID_NOT_FIT = "Your run did not fit. It went {}."


class NotAttempted(Exception):  # noqa: N818 (an outcome, not an error)
    """The learner's function is still the stub. The message says what to do."""


@dataclass(frozen=True)
class Correct:
    """The result of a check that has something to say about a right answer."""

    message: str


# --- values ------------------------------------------------------------------------------------


def expect_number(
    answer: Any,
    expected: float,
    *,
    rel_tolerance: float = 0.02,
    unit: str = "",
    slips: Mapping[float, str] | None = None,
) -> str | None:
    """Return None if ``answer`` is within ``rel_tolerance`` of ``expected``, else why not.

    ``slips`` are numbers that known mistakes give, and a sentence about each; 0 is ignored.
    """
    value = _number(answer)
    if value is None:
        kind = f" of {unit}" if unit else ""
        return f"A number{kind} is asked for; you gave {shown(answer)}."
    if abs(value - expected) <= rel_tolerance * abs(expected):
        return None
    text = format_value(value, unit) if unit else f"{value:g}"
    if slip := nearest_slip(value, slips or {}):
        given = f"{value:,.0f}" if value == int(value) and unit != "bytes" else text
        return f"You gave {given}. {slip}"
    for ratio in (value / expected, expected / value) if value and expected else ():
        if slip := nearest_slip(ratio, UNIT_SLIPS):
            return f"You gave {text}. That is off by a factor of {slip}: check the units."
    return f"You gave {text}. The right answer is {'less' if value > expected else 'more'}."


def _number(answer: Any) -> float | None:
    value, problem = plain_value(answer)
    return None if problem or isinstance(value, bool) else value


def whole_number(answer: Any, what: str, *, most: int = 1 << 31) -> int:
    """Return ``answer`` as a whole number from 1 to ``most``, as 8.0 is, or raise `InputError`."""
    value = _number(answer)
    if value is not None and value != int(value):
        raise InputError(f"{what} must be a whole number, not {value:g}: which way do you round?")
    return positive_int(answer if value is None else int(value), what, most=most)


def expect_results(
    answer: Callable[..., Any],
    solution: Callable[..., float],
    jobs: Iterable[tuple[Any, ...]],
    *,
    slips: Callable[..., Mapping[float, str]],
    rel_tolerance: float = 0.005,
) -> str | None:
    """Return None if ``answer`` gives the solution's number for each job, else why not.

    A job is the arguments of a call; ``slips`` is given them, and returns those of
    ``expect_number``.
    """
    names = inspect.signature(solution).parameters
    for job in jobs:
        given, right = call(answer, *job), solution(*job)
        problem = expect_number(given, right, rel_tolerance=rel_tolerance, slips=slips(*job))
        if problem:
            named = (f"{name}={value!r}" for name, value in zip(names, job, strict=True))
            return f"`{solution.__name__}({', '.join(named)})`: {problem}"
    return None


def nearest_slip(
    value: float, slips: Mapping[float, str], *, rel_tolerance: float = NEAR_A_SLIP
) -> str:
    """Return the sentence about the slip nearest to ``value``; empty if none is near."""
    distances = {abs(value / slip - 1): text for slip, text in slips.items() if slip}
    nearest = min(distances, default=rel_tolerance)
    return distances[nearest] if nearest < rel_tolerance else ""


def settings_of(answer: Any, names: Iterable[str] = ()) -> dict[str, Any]:
    """Return a dictionary given as an answer, with keys spelt as in ``names`` if there are any.

    An `InputError` refuses another key, and what is no dictionary.
    """
    if not isinstance(answer, Mapping):
        raise InputError(f"a dictionary is asked for, not {shown(answer)}")
    return {one_of(key, names, "setting") if names else key: answer[key] for key in answer}


# --- functions and experiments -----------------------------------------------------------------


def call(answer: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return what the learner's function returns; None and ``...`` raise `NotAttempted`."""
    value = answer(*arguments, **named)
    if value is None or value is ...:
        name = getattr(answer, "__name__", "your function")
        raise NotAttempted(f"`{name}` returns nothing yet. Let it return the answer.")
    return value


def run_experiment(answer: Callable[..., Iterator[Any]], *, mode: str, **parameters: Any) -> Run:
    """Run the learner's generator function ``answer(device, ...)`` and raise its errors.

    ``mode`` and ``parameters`` are for ``lab.measure`` (losses, small sizes) or ``lab.simulate``.
    Running out of memory is not raised; it is in ``Run.oom``. A stub, which yields ``...`` or None,
    raises `NotAttempted`.
    """

    @functools.wraps(answer)
    def experiment(*arguments: Any, **named: Any) -> Iterator[Any]:
        # No variable may hold the loss here: it would live one step too long.
        yield from map(_loss, answer(*arguments, **named))

    return MODES[mode](experiment, **parameters)


def _loss(loss: Any) -> Any:
    if loss is None or loss is ...:
        raise NotAttempted("Your experiment yields no loss yet. Let it yield the loss per step.")
    return loss


@functools.cache
def reference_run(experiment: Callable[..., Iterator[Any]], **parameters: Any) -> Run:
    """Return the run of a check's own experiment, executed once per process.

    ``lab.pretend`` does not apply to it; running out of memory even so raises `InputError`.
    """
    with pretend():
        run = run_experiment(experiment, **parameters)
    if run.oom is not None:
        raise InputError(f"the run that it is compared with went {run.oom}")
    return run


def run_both(
    answer: Callable[..., Iterator[Any]], reference: Callable[..., Iterator[Any]], **parameters: Any
) -> tuple[Run, Run]:
    """Return the run of the learner's experiment and that of the check's own."""
    return run_experiment(answer, **parameters), reference_run(reference, **parameters)


reference_losses = functools.cache(losses)  # of a check's own experiment


#: A simulated run, made once per process; ``lab.pretend`` does not apply to it.
simulated = functools.cache(pretend()(simulate))


@functools.cache
@pretend()
def estimated(model: str, gpu: str, recipe: Recipe) -> Estimate:
    """Return an estimate, made once per process; ``lab.pretend`` does not apply to it."""
    return estimate(model, gpu=gpu, recipe=recipe, loops=False)


adamw = functools.partial(torch.optim.AdamW, lr=1e-3)  # the optimizer of most lessons


def train(
    device: Any,
    name: str = "SmolLM2-135M",
    batch_size: int = 8,
    seq_len: int = 128,
    precision: str = "fp32",
    make: Callable[..., torch.optim.Optimizer] = adamw,
    layers: int | None = None,
) -> Iterator[Any]:
    """Train as the first lessons do; ``make`` is given the parameters, ``precision`` is pure."""
    torch.manual_seed(0)
    model = lab.model(name, device=device, dtype=lab.dtype_of(precision), layers=layers)
    rows = lab.batches(device=device, batch_size=batch_size, seq_len=seq_len)
    yield from train_steps(model, make(model.parameters()), rows)


def train_steps(model: Any, optimizer: Any, batches: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Train as most lessons' reference does: a step for each batch."""
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def expect_limit(
    answer: Any,
    what: str,
    run_of: Callable[[int], Run],
    *,
    most: int,
    step: int = 1,
    too_much: str = "",
    too_little: str = "",
) -> str | Correct:
    """Return Correct if ``answer`` is the last number of ``what`` that fits, else why not.

    ``run_of`` simulates a number of them; ``step`` leads to the next one, which must not fit.
    """
    number = whole_number(answer, f"the number of {what}", most=most)
    if number % step:
        return f"{number} is no multiple of {abs(step)}."
    run = run_of(number)
    allocated, room = format_bytes(run.peak_bytes), format_bytes(run.capacity_bytes)
    reserved = format_bytes(max(run.peak_bytes, run.reserved_bytes or 0))
    text = f"{number} {what} take {allocated} allocated, {reserved} reserved; there are {room}"
    if not run.fits:
        return f"{text}. That does not fit. {too_much}".strip()
    if run_of(number + step).fits:
        return f"{text}. But {number + step} {what} fit, too. {too_little}".strip()
    return Correct(f"{text}. {number + step} {what} do not fit.")


def memory_target(run: Run, most_bytes: int) -> str | None:
    """Return None if the run fitted and its peak is at most ``most_bytes``, else why not."""
    if run.oom is not None:
        return DID_NOT_FIT.format(run.oom)
    if run.peak_bytes <= most_bytes:
        return None
    largest = max(run.by_category, key=run.by_category.get)
    return (
        f"Your peak is {format_bytes(run.peak_bytes)}, the target at most "
        f"{format_bytes(most_bytes)}. The largest part of your peak is {largest}, with "
        f"{format_bytes(run.by_category[largest])}."
    )


def arithmetic_limit(run: Run, reference: Run, most_extra: float) -> str | None:
    """Return None if a step does at most the fraction ``most_extra`` more than the reference's.

    Much less arithmetic is another training, and refused, too.
    """
    extra = run.flops / reference.flops - 1
    if extra < -0.02:
        return (
            f"Your step does {-extra:.0%} less arithmetic. The model and the data must stay the "
            "same."
        )
    if extra > most_extra:
        return f"Your step does {extra:.0%} more arithmetic; the limit is {most_extra:.0%}."
    return None


def same_losses(run: Run, reference: Run) -> str | None:
    """Return None if both runs have the same losses, step by step, within 1e-4, else why not."""
    if run.oom is not None:
        return DID_NOT_FIT.format(run.oom)
    if run.mode == "phantom":
        return "A GPU that is not there computes no losses: check this on a CPU or on a real GPU."
    if len(run.losses) != len(reference.losses):
        return f"Your run has {len(run.losses)} losses, {len(reference.losses)} are expected."
    for step, (loss, right) in enumerate(zip(run.losses, reference.losses, strict=True), 1):
        if not abs(loss - right) <= 1e-4 * abs(right):  # also true of a loss of NaN
            first = "Before the first update it is the loss itself that differs."
            later = "The loss before it was right: look at what the update is made of."
            return (
                f"Your loss at step {step} is {loss:.5g}; it should still be {right:.5g}. "
                f"{first if step == 1 else later}"
            )
    return None


def same_start(first: float, right: float, *, rel_tolerance: float = 1e-3) -> str | None:
    """Return None if the first loss is the reference's, else why not."""
    if abs(first - right) <= rel_tolerance * right:
        return None
    return (
        f"Your first loss is {first:.4g}, it should be {right:.4g}. Before the first update "
        "nothing may differ: the same seed, the same model, the same data."
    )


def same_gradients(
    answer: Callable[..., Any],
    reference: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
) -> str | None:
    """Return None if a function has the reference's result and gradients, else where they differ.

    The gradients are those of the floating-point inputs, each within 1e-4 of the norm.
    """
    results = []
    for function in (answer, reference):
        copies = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        result = call(function, *copies)
        if not isinstance(result, torch.Tensor):
            return f"A tensor is asked for; you returned {shown(result)}."
        if not result.requires_grad:
            return "Your result has no gradient: was it computed under no_grad, or detached?"
        result.square().sum().backward()
        if result.numel() == 1:
            result = result.reshape(())
        results.append([result, *(x.grad for x in copies)])
    names = [f"gradient of {name}" for name in inspect.signature(reference).parameters]
    for name, ours, right in zip(("result", *names), *results, strict=False):
        if right is None:  # of labels
            continue
        if ours is None:
            return f"There is no {name}: something detached it."
        if ours.shape != right.shape:
            return f"Your {name} has the shape {tuple(ours.shape)}, not {tuple(right.shape)}."
        error = relative_error(ours, right)
        if not error <= 1e-4:  # also true of NaN
            return f"Your {name} is {error:.1%} off."
    return None
