"""What a technique takes on the job that all are compared on, simulated.

Limits: a bound is no time: it counts neither kernels' launches nor the CPU's work on an offloaded
optimizer.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from labkit import catalogue
from labkit.catalogue import Gpu
from labkit.estimates import estimate
from labkit.memory import Category, InputError, Run
from labkit.recipes import Recipe
from labkit.sheet_findings import Pair
from labkit.sheet_techniques import Technique

#: Share of the plain job's peak below which a change counts as none.
LEAST_SAVED = 0.005


@dataclass(frozen=True, kw_only=True)
class CommonJob:
    """The job on which techniques are compared: plain training with AdamW."""

    model: str = "Llama-3.2-1B"
    gpu: str = "rtx-4090"
    batch_size: int = 4
    seq_len: int = 1024
    precision: str = "fp32"
    attention: str = "eager"

    @property
    def recipe(self) -> Recipe:
        """The plain training."""
        return Recipe(batch_size=self.batch_size, seq_len=self.seq_len, precision=self.precision,
                      attention=self.attention)  # fmt: skip

    @property
    def card(self) -> Gpu:
        """The card that is simulated."""
        return catalogue.gpu(self.gpu)

    def __str__(self) -> str:
        return f"{self.model}, {self.recipe}, {self.attention} attention, on {self.card.name}"


@dataclass(frozen=True)
class Figures:
    """What one recipe takes, simulated.

    Attributes:
        recipe: how it trains.
        run: what it would take of a card that is large enough, without its trace.
        fits: whether the named card is large enough.
        seconds: the bound on a step; None where GPUs exchange what no catalogue says.
    """

    recipe: Recipe
    run: Run
    fits: bool
    seconds: float | None

    @property
    def peak_bytes(self) -> int:
        """Most bytes allocated on the card."""
        return self.run.peak_bytes

    @property
    def by_category(self) -> Mapping[Category, int]:
        """What they are; sums to the peak."""
        return self.run.by_category


def simulated(model: str, gpu: str, recipe: Recipe) -> Figures:
    """The figures of ``recipe``; nothing is simulated twice.

    Raises:
        InputError: as `estimate`.
    """
    if (model, gpu, recipe) not in _known:
        _known[model, gpu, recipe] = _simulate(model, gpu, recipe)
    return _known[model, gpu, recipe]


_known: dict[tuple[str, str, Recipe], Figures] = {}


def _simulate(model: str, gpu: str, recipe: Recipe) -> Figures:
    found = estimate(model, gpu=gpu, recipe=recipe)
    run = replace(found.run, trace=None, oom=None)
    return Figures(recipe, run, found.fits, _seconds(found, model))


def _seconds(found, model: str) -> float | None:
    from labkit.candidates import link_bytes
    from labkit.recipe_search import bytes_to_host, least_seconds

    if found.recipe.ranks > 1:
        return None
    crossing = link_bytes(found.recipe, _sizes(model), bytes_to_host(found))
    card = catalogue.gpu(found.gpu)
    return least_seconds(card, found.recipe.precision, found.flops, found.moved_bytes, crossing)


@functools.cache
def _sizes(model: str):
    from labkit.candidates import sizes_of
    from labkit.model_source import find_config

    return sizes_of(find_config(model)[1])


@dataclass(frozen=True)
class Row:
    """One technique on the common job.

    Attributes:
        technique: which.
        before: the plain job.
        after: with this technique alone; None where no recipe can say it, or ``refused``.
        refused: why the card or the recipe cannot do it, in a sentence.
        recorded: pairs of runs on GPUs that differ by this technique.
    """

    technique: Technique
    before: Figures
    after: Figures | None = None
    refused: str = ""
    recorded: tuple["Pair", ...] = ()

    @property
    def saved_share(self) -> float | None:
        """Of the plain job's peak; negative where it grows."""
        return 1 - self.after.peak_bytes / self.before.peak_bytes if self.after else None

    @property
    def part(self) -> tuple[Category, int] | None:
        """The category whose bytes at the peak fall most, and by how many; None if none falls."""
        if self.after is None:
            return None
        fall, category = max(
            (self.before.by_category.get(c, 0) - self.after.by_category.get(c, 0), c)
            for c in Category
        )
        return (category, fall) if fall > LEAST_SAVED * self.before.peak_bytes else None

    @property
    def slower_share(self) -> float | None:
        """By which share of itself the bound on a step grows."""
        if self.after is None or self.after.seconds is None:
            return None
        return self.after.seconds / self.before.seconds - 1


def row(technique: Technique, job: CommonJob, pairs: Iterable["Pair"] = ()) -> Row:
    """The row of ``technique`` on ``job``.

    Raises:
        InputError: the plain job itself cannot be simulated.
    """
    before, recorded = simulated(job.model, job.card.key, job.recipe), tuple(pairs)
    if technique.change is None:
        return Row(technique, before, recorded=recorded)
    try:
        recipe = technique.change(job.recipe, job.card)
        if recipe == job.recipe:
            return Row(technique, before, refused="the job has it already", recorded=recorded)
        after = simulated(job.model, job.card.key, recipe)
    except InputError as error:
        return Row(technique, before, refused=str(error), recorded=recorded)
    return Row(technique, before, after, recorded=recorded)
