"""What training on rows of varied length reserves, step after step, without the GPU.

    print(over_lengths("Qwen2.5-0.5B", gpu="t4", lengths=drawn_lengths("60-768", steps=300)))

Tensors come and go with the length of the rows, and PyTorch's allocator keeps blocks of sizes that
the next step cannot use. One step is traced for each length, and one replay goes over all of them:
with ordinary segments, with the longest rows first, and with expandable segments.

Limits: those of `estimate`. A batch is padded to its longest row.
"""

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.allocator.replay import Replay, replay
from labkit.allocator.workspaces import with_workspaces
from labkit.fake.repeated_steps import continued
from labkit.hardware import catalogue
from labkit.hardware.catalogue import Gpu
from labkit.models.config import find_config
from labkit.plan.estimate import assumed_gpu, recipe_log
from labkit.plan.recipe import MOST_SEQUENCE, Recipe
from labkit.values import InputError, as_printed, format_bytes, positive_int, shown

MOST_STEPS = 10_000
SIGMA = 0.5  # of the logarithm, where only the mean is given
SHOWN_STEPS = (1, 3, 10, 30, 100, 300, 1000, 3000)


@dataclass(frozen=True)
class OverLengths:
    """What a recipe takes where each step has another length; ``ways`` by name, see the module.

    What follows the first request that fails is served without limit.
    """

    model: str
    gpu: Gpu
    recipe: Recipe
    lengths: tuple[int, ...]
    ways: Mapping[str, Replay]
    assumed: str | None = None

    @property
    def fits(self) -> bool:
        """Whether ordinary segments serve every step."""
        return self.ways["ordinary"].failure is None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        return {
            "model": self.model,
            "gpu": self.gpu.key,
            "gpu_assumed": self.assumed,
            "recipe": self.recipe.to_dict(),
            "lengths": list(self.lengths),
            "capacity_bytes": self.gpu.budget_bytes,
            "fits": self.fits,
            "ways": {
                name: {
                    "peak_allocated_bytes": way.peak_allocated_bytes,
                    "peak_reserved_bytes": way.peak_reserved_bytes,
                    "after_step_bytes": way.after_step_bytes(),
                    "flushes": way.flushes,
                    "failure": str(way.failure) if way.failure else None,
                }
                for name, way in self.ways.items()
            },
        }

    _repr_pretty_ = as_printed

    def __str__(self) -> str:
        """Write the verdict first, then a column for each way."""
        ways, steps = self.ways, len(self.lengths)
        spare_bytes = self.gpu.budget_bytes - ways["ordinary"].peak_reserved_bytes
        verdict = "does not fit with ordinary segments"
        if self.fits:
            verdict = f"fits, with {format_bytes(spare_bytes)} to spare"
        elif others := [name for name, way in ways.items() if way.failure is None]:
            verdict += f", but does with {' and with '.join(others)}"
        words = "step" if steps == 1 else "steps"
        what = f"{self.recipe}; rows of {min(self.lengths)} to {max(self.lengths)} tokens"
        lines = [f"{self.model} on {self.gpu.name}: {verdict}", f"  {what}, {steps} {words}"]
        lines += [f"  {self.assumed}"] if self.assumed else []
        lines += ["", f"  {'':<26}" + "".join(f"{name:>22}" for name in ways)]

        def row(label: str, cells: Iterable[str]) -> str:
            return f"  {label:<26}" + "".join(f"{cell:>22}" for cell in cells)

        allocated = [format_bytes(way.peak_allocated_bytes) for way in ways.values()]
        lines.append(row("allocated, at most", allocated))
        after = [way.after_step_bytes() for way in ways.values()]
        for step in [*(n for n in SHOWN_STEPS if n < steps), steps]:
            reserved = [format_bytes(each[step - 1]) for each in after]
            lines.append(row(f"reserved after step {step}", reserved))
        reserved = [format_bytes(way.peak_reserved_bytes) for way in ways.values()]
        lines.append(row("reserved, at most", reserved))
        lines.append(row("failed cudaMallocs", [str(way.flushes) for way in ways.values()]))
        failures = {name: way.failure for name, way in ways.items() if way.failure}
        lines += [""] * bool(failures) + [f"  {name}: {why}" for name, why in failures.items()]
        lines += [
            "",
            "  After a failed cudaMalloc PyTorch gives back all that is cached and asks again.",
        ]
        return "\n".join(lines)


def over_lengths(
    model: Any,
    *,
    lengths: Sequence[int],
    gpu: str | Gpu | None = None,
    recipe: Recipe | None = None,
    report: Callable[[], None] | None = None,
    **fields: Any,
) -> OverLengths:
    """Return what training ``model`` reserves on ``gpu`` if step by step rows have ``lengths``.

    Args:
        model: a model of the table, a folder with a ``config.json``, a hub id when online, or a
            transformers config.
        lengths: tokens per row of each step, padding included.
        gpu: a name from the catalogue; by default as for `estimate`.
        recipe: how it is trained; ``seq_len`` becomes the longest.
        report: called after each length that is traced.
        **fields: fields of the recipe to change, ``precision="bf16"``.

    Raises:
        InputError: as for `estimate`; no length, or one out of range; accumulated batches.
    """
    recipe = (recipe or Recipe()).but(**fields)
    if recipe.accumulate > 1:
        raise InputError("lengths are those of steps of one batch each: leave out accumulate")
    if not lengths:
        raise InputError("there is no length")
    lengths = tuple(positive_int(length, "a length", most=MOST_SEQUENCE) for length in lengths)
    recipe = recipe.but(seq_len=max(lengths))
    assumed = None
    if gpu is None:
        gpu, assumed = assumed_gpu(recipe)
    gpu = catalogue.gpu(gpu)
    recipe.check(gpu)
    name, config = find_config(model)
    traces = {}
    for length in sorted(set(lengths)):
        log = recipe_log(config, recipe.but(seq_len=length), gpu).log
        traces[length] = with_workspaces(log.trace, gpu)
        if report is not None:
            report()
    trace = continued(traces, lengths)
    longest_first = continued(traces, sorted(lengths, reverse=True))
    memory = {"budget_bytes": gpu.budget_bytes, "device_bytes": gpu.usable_bytes}
    ways = {
        "ordinary": replay(trace, **memory),
        "longest first": replay(longest_first, **memory),
        "expandable segments": replay(trace, **memory, expandable_segments=True),
    }
    return OverLengths(name, gpu, recipe, lengths, ways, assumed)


def drawn_lengths(
    text: str, *, steps: int | None = None, batch_size: int = 1, seed: int = 0
) -> tuple[int, ...]:
    """Return the length of each step's batch, that of the longest of its ``batch_size`` rows.

    Args:
        text: ``"60-768"``, from which rows are drawn, each length as likely as the others;
            ``"400"``, the mean of a log-normal distribution with sigma 0.5, cut at four times the
            mean; or a file of whole numbers, the rows in their order, again from the start where
            they do not suffice.
        steps: how many batches; by default 300, or what the file has.
        batch_size: rows in a batch.
        seed: of the draw.

    Raises:
        InputError: no such range or file, or one without lengths.
    """
    steps = None if steps is None else positive_int(steps, "steps", most=MOST_STEPS)
    choose = random.Random(seed)
    if found := re.fullmatch(r"(\d{1,9})-(\d{1,9})", text):
        shortest, longest = (_length(number) for number in found.groups())
        if shortest > longest:
            raise InputError(f"lengths go from the shorter to the longer: {longest}-{shortest}")
        rows = [choose.randint(shortest, longest) for _ in range((steps or 300) * batch_size)]
    elif re.fullmatch(r"\d{1,9}", text):
        mean = _length(text)
        rows = []
        while len(rows) < (steps or 300) * batch_size:
            # The mean of a log-normal distribution is exp(mu + sigma² / 2).
            row = round(mean * choose.lognormvariate(-(SIGMA**2) / 2, SIGMA))
            rows += [row] if 1 <= row <= 4 * mean else []
    else:
        rows = _rows_of(Path(text))
        steps = steps or -(-len(rows) // batch_size)
        rows = [rows[index % len(rows)] for index in range(steps * batch_size)]
    return tuple(max(rows[at : at + batch_size]) for at in range(0, len(rows), batch_size))


def _length(text: str) -> int:
    return positive_int(int(text), "a length", most=MOST_SEQUENCE)


def _rows_of(path: Path) -> list[int]:
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"lengths are a range (60-768), a mean (400) or a file of whole numbers; {str(path)!r} "
            f"cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}"
        ) from error
    wrong = [word for word in words if not re.fullmatch(r"\d{1,9}", word)]
    if wrong or not words:
        what = f"holds {shown(wrong[0])}" if wrong else "is empty"
        raise InputError(f"{path} must hold whole numbers, one for each row, and {what}")
    return [_length(word) for word in words]
