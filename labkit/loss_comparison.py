"""Train on this machine, once per seed, and compare the losses; the loss on held-out text.

Losses differ from seed to seed, so two techniques are compared seed by seed: the same seed is the
same data in the same order.

Limits: seconds and bytes are not measured. A handful of seeds gives a spread, no significance. On a
CPU half precision is computed as ``labkit.half_precision`` says, if the first step has any.
"""

import math
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpumem.experiment import Experiment, Steps, check_arguments, name_of
from gpumem.hardware import cuda, this_machine
from gpumem.inputs import InputError, positive_int, shown
from gpumem.models.text import batches
from labkit.half_precision import half_products

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Difference:
    """Relative difference of last losses from the reference: 0.01 is one percent higher."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


@dataclass(frozen=True)
class Losses:
    """The losses of one experiment on one machine: one curve per seed, all of the same length."""

    name: str
    seeds: tuple[int, ...]
    curves: tuple[tuple[float, ...], ...]
    device: str

    @property
    def finals(self) -> tuple[float, ...]:
        """For each seed, the mean of the last tenth of the steps (at least of the last one)."""
        tail = max(1, len(self.curves[0]) // 10)
        return tuple(sum(curve[-tail:]) / tail for curve in self.curves)

    @property
    def final(self) -> float:
        return sum(self.finals) / len(self.finals)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest of ``finals``; NaN if one of them is."""
        return float(np.min(self.finals)), float(np.max(self.finals))

    @property
    def label(self) -> str:
        """Where the losses come from, for a figure."""
        seeds = f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else f"seed {self.seeds[0]}"
        return f"trained on {self.device}, {seeds}"

    def against(self, reference: "Losses") -> Difference:
        """Return the relative difference of ``finals``, seed by seed; NaN against a loss of 0."""
        if self.seeds != reference.seeds or len(self.curves[0]) != len(reference.curves[0]):
            raise InputError(
                f"{self.name!r} and {reference.name!r} cannot be compared: they were trained with "
                "other seeds or for another number of steps"
            )
        pairs = zip(self.finals, reference.finals, strict=True)
        relative = [ours / theirs - 1 if theirs else math.nan for ours, theirs in pairs]
        mean = sum(relative) / len(relative)
        return Difference(mean, float(np.min(relative)), float(np.max(relative)))  # NaN stays NaN


def losses(
    experiment: Experiment,
    *,
    seeds: Iterable[int] = SEEDS,
    steps: int = 60,
    name: str | None = None,
    **parameters: Any,
) -> Losses:
    """Train on this machine for ``steps`` steps, once for each of ``seeds``; return the losses.

    Args:
        experiment: generator function ``experiment(device, seed=0, ...)`` yielding the loss per
            step, the same for the same seed. It must not end before its last step.
        name: in a figure; by default the experiment's name and parameters.
    """
    steps = positive_int(steps, "steps")
    whole = tuple(seeds) if isinstance(seeds, Iterable) else ()
    if not whole or any(type(seed) is not int for seed in whole):
        raise InputError(f"seeds must be whole numbers, at least one, not {shown(seeds)}")
    if "seed" in parameters:
        raise InputError("name the seeds as seeds=[...]: one training run each")
    curves = []
    for seed in whole:
        checked = check_arguments(experiment, {**parameters, "seed": seed}, steps=steps)
        curves.append(_train(experiment, steps, checked))
    if name is None:
        settings = ", ".join(f"{key}={value}" for key, value in parameters.items())
        name = ": ".join(filter(None, [name_of(experiment), settings]))
    here = this_machine.machine()
    return Losses(name, whole, tuple(curves), "the CPU" if here.phantom else here.name)


def _train(experiment: Experiment, steps: int, parameters: dict[str, Any]) -> tuple[float, ...]:
    cuda.free_memory()
    # A phantom GPU computes no losses.
    device = torch.device("cpu") if this_machine.machine().phantom else this_machine.device()
    run = Steps(experiment, device, parameters)
    curve: list[torch.Tensor] = []
    with half_products(device) as products, closing(run):
        for loss in run.take(steps):
            curve.append(loss.detach().clone())  # read at the end: each read makes a GPU wait
            if products is not None and len(curve) == 1:
                products.leave_unless_needed()
    if len(curve) < steps:
        raise InputError(f"{name_of(experiment)} ended after {len(curve)} of {steps} steps")
    return tuple(torch.stack([loss.float().reshape(()) for loss in curve]).tolist())


def held_out_loss(
    model: Any,
    *,
    tokenizer: Any = None,
    rows: int = 16,
    seq_len: int = 256,
    seed: int = 0,
) -> float:
    """Return the mean loss per token on the test split, in nats; its exponential is the perplexity.

    ``model`` is a transformers causal language model (adapters and quantized layers included),
    evaluated without dropout and gradients, and left in the mode it was in. ``tokenizer``,
    ``rows``, ``seq_len`` and ``seed`` are as for ``batches``.
    """
    rows = positive_int(rows, "rows")
    if positive_int(seq_len, "seq_len") < 2:
        raise InputError("seq_len must be at least 2: each token is predicted from those before it")
    device = next(model.parameters()).device
    text = {"seq_len": seq_len, "seed": seed, "split": "test", "tokenizer": tokenizer}
    [ids] = batches(device=device, batch_size=rows, steps=1, **text)
    modes = {module: module.training for module in model.modules()}  # a part may be frozen
    model.eval()
    total = 0.0
    try:
        with torch.no_grad(), half_products(device):
            for part in ids.split(4):
                total += float(model(input_ids=part, labels=part).loss) * len(part)
    finally:
        for module, training in modes.items():
            module.training = training
    return total / rows


def relative_error(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    reference: torch.Tensor | Iterable[torch.Tensor],
) -> float:
    """Return the norm of the difference over the norm of the reference, summed in float64.

    Several tensors (a model's gradients) are taken as one long vector. An `InputError` says that
    their numbers or shapes differ, or that the reference is zero throughout.
    """
    ours, theirs = ([x] if isinstance(x, torch.Tensor) else [*x] for x in (tensors, reference))
    shapes = [[tuple(tensor.shape) for tensor in each] for each in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise InputError(f"shapes {shown(shapes[0])} cannot be compared with {shown(shapes[1])}")
    difference = size = 0.0
    for tensor, right in zip(ours, theirs, strict=True):
        right = right.detach().double()
        difference += float((tensor.detach().double() - right).square().sum())
        size += float(right.square().sum())
    if size == 0:
        raise InputError("the reference is zero throughout: nothing is relative to it")
    return math.sqrt(difference / size)
