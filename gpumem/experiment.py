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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from gpumem.inputs import PRECISIONS, InputError, one_of, positive_int
from gpumem.tracker import Tracker

Experiment = Callable[..., Iterator[torch.Tensor]]

# Parameters with these names count something, in any experiment.
COUNTS = ("batch_size", "seq_len", "steps", "layers", "accumulate", "segments", "rank")


def check_arguments(
    experiment: Any, parameters: Mapping[str, Any], *, steps: int | None = None
) -> dict[str, Any]:
    """Return the arguments to call with, or refuse before anything is built.

    An experiment that takes ``steps`` is told how many will be asked of it.
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
    """Return the name of an experiment, for a `functools.partial` that of what it wraps."""
    while isinstance(experiment, functools.partial):
        experiment = experiment.func
    return getattr(experiment, "__name__", repr(experiment))


def plain_parameters(experiment: Experiment, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as plain values, defaults included, for the record of the run."""
    signature = inspect.signature(experiment)
    bound = signature.bind_partial(None, **parameters)
    bound.apply_defaults()
    arguments = dict(list(bound.arguments.items())[1:])
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    for name, value in arguments.items():
        if not isinstance(value, str | int | float | bool | None):
            arguments[name] = getattr(value, "__name__", None) or str(value)
    return arguments


class Steps:
    """The training steps of an experiment, each recorded by the tracker where there is one."""

    def __init__(
        self, experiment: Experiment, device: torch.device, parameters: Mapping[str, Any]
    ) -> None:
        self.generator = experiment(device, **parameters)
        self.done = 0

    def take(self, count: int, tracker: Tracker | None = None) -> Iterator[torch.Tensor]:
        """Yield the loss of up to ``count`` further steps."""
        for _ in range(count):
            try:
                loss = next(self.generator)
            except StopIteration:
                return
            except BaseException:
                if tracker is not None:
                    tracker.end_step(failed=True)
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
                tracker.end_step()
            yield loss

    def close(self) -> None:
        """Free what the experiment holds."""
        self.generator.close()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, cut to 200 characters."""
    return str(error).strip().partition("\n")[0][:200]
