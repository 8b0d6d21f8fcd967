"""Advice for an experiment of the user's own: which of its arguments make it fit.

An argument is tried if the experiment takes it under the name that `Recipe` gives it: each
``precision`` that the GPU computes in, the switches of ``TRIED`` off and on, and of ``batch_size``
powers of two up to the largest that fits.

Limits: what an argument does is the experiment's affair: a precision may change the training. The
bound is that of the roofline model, at the rate of the precision, or of the GPU's 16-bit formats
where the experiment takes none.
"""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.experiment import first_line, name_of
from labkit.hardware.bound import least_seconds
from labkit.hardware.catalogue import Gpu
from labkit.plan.estimate import Estimate, estimate
from labkit.plan.search import Room, bound_text, next_batch
from labkit.values import PRECISIONS, InputError, as_printed, format_bytes, table_lines

TRIED = ("batch_size", "precision", "checkpointing", "chunked_loss", "optimizer_in_backward")


@dataclass(frozen=True)
class OwnAdvice:
    """What `advise` found for an experiment.

    Attributes:
        room: what the experiment may take of ``gpu``.
        tried, left: the arguments that were tried, and the others, which had their defaults.
        options: what was simulated; what fits first, the lowest bound first.
        refused: why arguments could not be simulated, a sentence each.
    """

    gpu: Gpu
    room: Room
    tried: list[str]
    left: list[str]
    options: list[Estimate]
    refused: list[str]

    @property
    def fitting(self) -> list[Estimate]:
        """The options that fit, the lowest bound first."""
        return [each for each in self.options if _fits(each, self.room)]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        return {
            "gpu": self.gpu.key,
            "room_bytes": self.room.gpu_bytes,
            "host_room_bytes": self.room.host_bytes,
            "tried": self.tried,
            "left": self.left,
            "options": [
                each.to_dict() | {"fits": _fits(each, self.room), "seconds": _seconds(each)}
                for each in self.options
            ],
            "refused": self.refused,
        }

    _repr_pretty_ = as_printed

    def __str__(self) -> str:
        """Write everything that was simulated as a table."""
        count = len(self.fitting) or "none"
        room = format_bytes(self.room.gpu_bytes)
        if self.room.host_bytes is not None:
            room += f", and {format_bytes(self.room.host_bytes)} of the host's memory"
        rows = []
        for each in self.options:
            fits = "yes" if _fits(each, self.room) else "no"
            memory, host = map(format_bytes, (each.peak_reserved_bytes, each.run.host_bytes))
            given = ", ".join(f"{name} {each.run.parameters[name]}" for name in self.tried)
            rows.append([fits, memory, host, bound_text(_seconds(each)), given])
        unit = "sequences" if "batch_size" in self.tried else "steps"
        lines = [
            f"{self.options[0].model} on {self.gpu.name}: {count} of {len(self.options)} fit",
            f"  It may take {room}.",
            "",
            *table_lines(("fits", "memory", "host", "bound", "arguments"), rows),
            "",
            f"  A bound is the least time per 1000 {unit}; real ones take longer.",
        ]
        if self.left:
            lines.append(f"  Not tried, for advice does not know them: {', '.join(self.left)}.")
        return "\n".join([*lines, *(f"  Not tried: {sentence}" for sentence in self.refused)])


def advise_own(experiment: Callable, gpu: Gpu, room: Room) -> OwnAdvice:
    """Return which arguments of ``experiment`` make it fit. Errors as for `advise`."""
    taken = list(inspect.signature(experiment).parameters)[1:]  # the first is the device
    tried = [name for name in TRIED if name in taken]
    if not tried:
        raise InputError(
            f"{name_of(experiment)} takes no argument that advice knows how to try: give it one of "
            f"{', '.join(TRIED)}, or ask `labkit estimate` what it takes as it is"
        )
    choices = {name: [False, True] for name in tried if name not in ("batch_size", "precision")}
    if "precision" in tried:
        choices["precision"] = [p for p in PRECISIONS if gpu.bf16_native or "bf16" not in p]
    options: list[Estimate] = []
    refused: list[str] = []
    for values in itertools.product(*choices.values()):
        arguments = dict(zip(choices, values, strict=True))
        try:
            if "batch_size" in tried:
                options += _largest_batch(experiment, gpu, room, arguments)
            else:
                options.append(estimate(experiment, gpu=gpu, parameters=arguments))
        except Exception as error:  # the user's code may raise anything
            what = ", ".join(f"{name} {value}" for name, value in arguments.items())
            refused.append(f"{what or 'batch_size 1'}: {type(error).__name__}: {first_line(error)}")
    if not options:
        raise InputError(f"{name_of(experiment)} cannot be simulated: {refused[0]}")
    options.sort(key=lambda each: (not _fits(each, room), _seconds(each)))
    left = [name for name in taken if name not in tried]
    return OwnAdvice(gpu, room, tried, left, options, refused)


def _largest_batch(
    experiment: Callable, gpu: Gpu, room: Room, arguments: dict[str, Any]
) -> list[Estimate]:
    """Return the estimates on the way to the largest batch that fits."""
    found: dict[int, Estimate] = {}
    batch: int | None = 1
    while batch is not None:
        parameters = {"batch_size": batch, **arguments}
        found[batch] = estimate(experiment, gpu=gpu, parameters=parameters)
        needed = {b: room.taken(e.peak_reserved_bytes, e.run.host_bytes) for b, e in found.items()}
        batch = next_batch(needed, room.gpu_bytes, 0)
    return list(found.values())


def _fits(found: Estimate, room: Room) -> bool:
    return room.taken(found.peak_reserved_bytes, found.run.host_bytes) <= room.gpu_bytes


def _seconds(found: Estimate) -> float:
    """Return the least seconds of a step, or of a sequence if the batch is known."""
    run, parameters = found.run, found.run.parameters
    precision = str(parameters.get("precision", "bf16"))
    seconds = least_seconds(found.gpu, {precision: run.flops}, run.moved_bytes)
    return seconds / parameters.get("batch_size", 1)
