"""What measuring and simulating share: checking an experiment's arguments, and stepping it.

An experiment is a generator function. Its first parameter is the device; it builds everything it
needs and yields the loss once per training step:

    def experiment(device, batch_size=8, precision="fp32"):
        model = ...
        for batch in batches:
            ...
            yield loss

Because every tensor is local to the generator, closing it frees them all.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import torch

from labkit.memory import InputError, Mark, OutOfMemory, Phase, Trace, one_of, positive_int
from labkit.tracker import SimulatedOutOfMemory, Tracker

Experiment = Callable[..., Iterator[torch.Tensor]]

# Parameters with these names count something, in any experiment.
COUNTS = ("batch_size", "seq_len", "steps", "layers", "accumulate", "segments", "rank")
PRECISIONS = ("fp32", "amp-fp16", "amp-bf16", "bf16")


def check_arguments(
    experiment: Any, parameters: Mapping[str, Any], *, steps: int | None = None
) -> dict[str, Any]:
    """The arguments to call with, or a refusal before anything is built.

    An experiment that takes ``steps`` is told how many will be asked of it.

    Raises:
        InputError: not a generator function, an argument it does not take, a count that is not a
            positive whole number, or an unknown precision.
    """
    if not inspect.isgeneratorfunction(experiment):
        raise InputError(
            f"an experiment is a generator function that yields the loss once per step; "
            f"{name_of(experiment)!r} is not one"
        )
    accepted = inspect.signature(experiment).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    names = list(accepted)[1:]
    checked = {"steps": steps} if steps is not None and "steps" in names else {}
    for name, value in parameters.items():
        if not anything:
            name = one_of(name, names, f"argument of {name_of(experiment)}")
        if name in COUNTS and value is not None:
            value = positive_int(value, name)
        if name == "precision":
            value = one_of(value, PRECISIONS, "precision")
        checked[name] = value
    try:
        inspect.signature(experiment).bind(None, **checked)
    except TypeError as error:
        raise InputError(
            f"{name_of(experiment)} cannot be called with a device and "
            f"{', '.join(checked) or 'no arguments'}: {error}"
        ) from None
    return checked


def name_of(experiment: Any) -> str:
    """What to call an experiment; a `functools.partial` has the name of what it wraps."""
    while isinstance(experiment, functools.partial):
        experiment = experiment.func
    return getattr(experiment, "__name__", repr(experiment))


def plain_parameters(experiment: Experiment, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as plain values, defaults included, for the record of the run."""
    signature = inspect.signature(experiment)
    bound = signature.bind_partial(None, **parameters)
    bound.apply_defaults()
    arguments = dict(list(bound.arguments.items())[1:])
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    plain = {}
    for name, value in arguments.items():
        if isinstance(value, str | int | float | bool | None):
            plain[name] = value
        else:
            plain[name] = getattr(value, "__name__", None) or str(value)
    return plain


class Steps:
    """Steps an experiment, marks the tracker at each boundary, and counts its work per step."""

    def __init__(
        self, experiment: Experiment, device: torch.device, parameters: Mapping[str, Any]
    ) -> None:
        self.generator = experiment(device, **parameters)
        self.done = 0
        self.bounds: list[int] = []  # event index at the end of each tracked step
        self.failed = False  # in the middle of a step, which then counts as one
        self.work = [(0, 0, 0)]  # flops, bytes moved and bytes sent so far, likewise

    def take(self, count: int, tracker: Tracker | None = None) -> Iterator[torch.Tensor]:
        """Up to ``count`` further steps.

        Raises:
            InputError: the experiment yielded something that is not a loss.
        """
        for _ in range(count):
            try:
                loss = next(self.generator)
            except StopIteration:
                return
            except BaseException:
                self.failed = True
                raise
            if isinstance(loss, (int, float)):
                loss = torch.tensor(float(loss), device="cpu")
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise InputError(
                    "an experiment yields the loss, a tensor with one element, once per step; "
                    f"this one yielded {type(loss).__name__}"
                )
            self.done += 1
            if tracker is not None:
                self.bounds.append(tracker.events)
                self.work.append(tracker.work_done())
            yield loss

    def closing(self) -> Any:
        """A context that frees what the experiment holds."""
        return closing(self.generator)

    def trace(self, tracker: Tracker) -> Trace:
        """The trace with a mark where each step begins: the first where setting up ended."""
        trace = tracker.trace()
        first = next(
            (i for i, event in enumerate(trace.events) if event.phase is not Phase.SETUP), 0
        )
        ends = self.bounds if self.failed else self.bounds[:-1]
        starts = [first, *ends] if self.bounds or (self.failed and first) else []
        marks = tuple(Mark(at, f"step {n}") for n, at in enumerate(starts, start=1))
        return Trace(trace.device, trace.storages, trace.events, marks, trace.work)

    def work_per_step(self) -> tuple[int | None, int | None, int]:
        """Floating-point operations, bytes moved and bytes sent by the last tracked step."""
        if len(self.work) < 2 or not any(self.work[-1]):
            return None, None, 0
        before, after = self.work[-2:]
        flops, moved, sent = (b - a for a, b in zip(before, after, strict=True))
        return flops, moved, sent


def describe_oom(
    error: BaseException, tracker: Tracker | None, *, step: int, capacity_bytes: int | None,
    live_bytes: int | None = None,
) -> OutOfMemory:  # fmt: skip
    """The record of an out-of-memory error, as precise as what was watching allows.

    ``live_bytes`` is the allocator's figure where there is one; what the tracker does not know
    of it is unattributed.
    """
    failure = tracker.failure if tracker is not None else None
    categories = dict(failure.by_category) if failure else {}
    tracked_bytes = sum(categories.values())
    live_bytes = max(tracked_bytes, live_bytes or 0)
    if live_bytes > tracked_bytes:
        categories["unattributed"] = live_bytes - tracked_bytes
    return OutOfMemory(
        requested_bytes=requested_bytes(error),
        live_bytes=live_bytes,
        capacity_bytes=capacity_bytes,
        by_category={str(key): value for key, value in categories.items()},
        step=step,
        phase=str(failure.phase) if failure else "",
        module=failure.module if failure else "",
        operator=failure.operator if failure else "",
    )


def requested_bytes(error: BaseException) -> int:
    """What the failed request asked for, 0 where the message does not say."""
    if isinstance(error, SimulatedOutOfMemory):
        return error.requested_bytes
    return _stated_bytes(error, r"ried to allocate (\S+) (\w+)")


def allocated_bytes(error: BaseException) -> int:
    """What PyTorch says it held when a CUDA request failed, 0 where the message does not say."""
    return _stated_bytes(error, r"(\S+) (\w+) is allocated by PyTorch")


def _stated_bytes(error: BaseException, pattern: str) -> int:
    units = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
    found = re.search(pattern, str(error))
    if found is None or found[2] not in units:
        return 0  # another wording: the caller shows no number
    try:
        return int(float(found[1]) * units[found[2]])
    except ValueError:
        return 0


def first_line(error: BaseException) -> str:
    """The first line of an error's text, cut to a sentence's length."""
    return str(error).strip().partition("\n")[0][:200]
