"""Training for real, once per seed: losses(), and what two of its records differ by.

Whether a technique costs accuracy shows in losses, which only real training has, and which differ
from seed to seed. So an experiment is trained on this machine with several seeds, and two
techniques are compared seed by seed: the same seed is the same data in the same order.

    adam = lab.losses(train, steps=60)
    sgd = lab.losses(train, steps=60, optimizer="sgd")
    sgd.against(adam)          # relative difference of the last losses: mean, lowest, highest

Limits: seconds and bytes are not measured here. A handful of seeds gives a spread, no
significance. On a CPU half precision is computed as ``labkit/half_products.py`` says, if the first
step has any.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from labkit import hardware
from labkit.experiment import Experiment, Steps, check_arguments, name_of
from labkit.half_products import half_products
from labkit.memory import InputError, positive_int

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Difference:
    """By how much last losses differ, relative to the reference: 0.01 is one percent higher."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


@dataclass(frozen=True)
class Losses:
    """The losses of one way to train, for several seeds.

    Attributes:
        name: what to call it in a figure.
        seeds: one per curve.
        curves: the loss at each step, one curve per seed, all of the same length.
        device: the machine's name.
    """

    name: str
    seeds: tuple[int, ...]
    curves: tuple[tuple[float, ...], ...]
    device: str

    @property
    def finals(self) -> tuple[float, ...]:
        """Per seed, the mean of the last tenth of the steps (of the last one at least)."""
        tail = max(1, len(self.curves[0]) // 10)
        return tuple(sum(curve[-tail:]) / tail for curve in self.curves)

    @property
    def final(self) -> float:
        """The mean of ``finals``."""
        return sum(self.finals) / len(self.finals)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest of ``finals``; NaN if one of them is."""
        if any(map(math.isnan, self.finals)):
            return math.nan, math.nan
        return min(self.finals), max(self.finals)

    @property
    def label(self) -> str:
        """Where the losses come from, for a figure."""
        seeds = f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else f"seed {self.seeds[0]}"
        return f"trained on {self.device}, {seeds}"

    def against(self, reference: "Losses") -> Difference:
        """The relative difference of the finals, each seed against the same seed; NaN against 0.

        Raises:
            InputError: the reference has other seeds or another number of steps.
        """
        if self.seeds != reference.seeds or len(self.curves[0]) != len(reference.curves[0]):
            raise InputError(
                f"{self.name!r} and {reference.name!r} cannot be compared: they were trained with "
                "other seeds or for another number of steps"
            )
        pairs = zip(self.finals, reference.finals, strict=True)
        shares = [ours / theirs - 1 if theirs else math.nan for ours, theirs in pairs]
        if any(map(math.isnan, shares)):
            return Difference(math.nan, math.nan, math.nan)
        return Difference(sum(shares) / len(shares), min(shares), max(shares))


def losses(
    experiment: Experiment,
    *,
    seeds: Iterable[int] = SEEDS,
    steps: int = 60,
    name: str | None = None,
    **parameters: Any,
) -> Losses:
    """Train on this machine, once per seed, and keep the losses.

    Args:
        experiment: generator function ``experiment(device, seed=0, ...)`` yielding the loss per
            step. It must give the same losses for the same seed.
        seeds: one training run each.
        steps: training steps of each run.
        name: what to call it; the experiment's name and parameters if None.
        **parameters: the experiment's own arguments.

    Raises:
        InputError: a bad argument, no seeds, an experiment without a ``seed`` or one that ends
            before its last step.
    """
    steps = positive_int(steps, "steps")
    several = isinstance(seeds, Iterable) and not isinstance(seeds, str)
    if not several or not (seeds := tuple(seeds)) or not all(map(_is_whole, seeds)):
        raise InputError(f"seeds must be whole numbers, at least one, not {seeds!r}")
    if "seed" in parameters:
        raise InputError("name the seeds as seeds=[...]: one training run each")
    seeds = tuple(map(int, seeds))
    curves = []
    for seed in seeds:
        checked = check_arguments(experiment, {**parameters, "seed": seed}, steps=steps)
        curves.append(_train(experiment, steps, checked))
    settings = ", ".join(f"{key}={value}" for key, value in parameters.items())
    name = name or f"{name_of(experiment)}{': ' if settings else ''}{settings}"
    return Losses(name, seeds, tuple(curves), hardware.machine().name)


def _is_whole(seed: Any) -> bool:
    return isinstance(seed, Integral) and not isinstance(seed, bool)


def _train(experiment: Experiment, steps: int, parameters: dict[str, Any]) -> tuple[float, ...]:
    hardware.free_memory()
    device = hardware.device()
    run = Steps(experiment, device, parameters)
    curve: list[torch.Tensor] = []
    with half_products(device) as products, run.closing():
        for loss in run.take(steps):
            curve.append(loss.detach().clone())  # read at the end: each read makes a GPU wait
            if products is not None and len(curve) == 1:
                products.leave_unless_needed()
    if len(curve) < steps:
        raise InputError(f"{name_of(experiment)} ended after {len(curve)} of {steps} steps")
    return tuple(torch.stack([loss.float().reshape(()) for loss in curve]).tolist())
