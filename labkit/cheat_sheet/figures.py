"""What each technique takes on the job that all are compared on, and in which order to adopt them.

Everything is simulated; bounds, links and changes of the training are those of `labkit advise`.

Limits: one model, GPU and batch at a time, and techniques rank differently on others. A bound is
not a time: it counts neither kernel launches nor the CPU's work on an offloaded optimizer. The
greedy order looks one move ahead, or two where nothing is free and neither saves anything alone.
"""

import functools
import itertools
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpumem.estimation.estimate import estimate
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.recipes_to_try import changes
from gpumem.estimation.search import link_and_bound
from gpumem.estimation.weight_shapes import shapes_of
from gpumem.hardware import catalogue
from gpumem.hardware.catalogue import Gpu
from gpumem.hardware.this_machine import machine
from gpumem.inputs import InputError
from gpumem.models.config import find_config
from gpumem.runs import Run
from gpumem.trace import Category
from labkit.cheat_sheet.findings import Trial, gather
from labkit.lesson.results import versions_text

#: Fraction of the plain job's peak below which a change counts as none.
LEAST_SAVED = 0.005
#: Fraction of the plain job's bound below which a move costs nothing.
LEAST_SLOWER = 0.001
PLAIN = Recipe(batch_size=4, seq_len=1024, attention="eager")


# --- techniques -----------------------------------------------------------------------------------

Change = Callable[[Recipe, Gpu], Recipe]


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One technique: the ``effort`` to write it, when not to use it.

    ``change`` makes a recipe with it of one without; None where no recipe can express it.
    """

    name: str
    lesson: str
    effort: str
    not_when: str
    change: Change | None = None


def _mixed_precision(recipe: Recipe, gpu: Gpu) -> Recipe:
    if recipe.precision != "fp32":  # it is in half precision already
        return recipe
    return recipe.but(precision="amp-bf16" if gpu.bf16_native else "amp-fp16")


def _two_halves(recipe: Recipe, gpu: Gpu) -> Recipe:
    if recipe.accumulate > 1:
        return recipe
    if recipe.batch_size % 2:
        raise InputError(f"a batch of {recipe.batch_size} has no halves")
    return recipe.but(batch_size=recipe.batch_size // 2, accumulate=2)


_COMPUTED = {
    "mixed precision": _mixed_precision,
    "accumulation of two halves": _two_halves,
}


def _read(name: str, recipe: Mapping[str, Any] | None = None, **entry: Any) -> Technique:
    change = _COMPUTED.get(name)
    if recipe is not None:

        def change(plain: Recipe, gpu: Gpu) -> Recipe:
            return plain.but(**recipe)

    return Technique(name=name, change=change, **entry)


_FILE = Path(__file__).with_name("techniques.toml")
TECHNIQUES = tuple(_read(**each) for each in tomllib.loads(_FILE.read_text("utf-8"))["technique"])


# --- the job --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CommonJob:
    """The job on which techniques are compared: a model, a GPU, and plain training with AdamW."""

    model: str = "Llama-3.2-1B"
    gpu: str = "rtx-4090"
    recipe: Recipe = PLAIN

    @property
    def simulated_gpu(self) -> Gpu:
        """Return the GPU that is simulated."""
        return catalogue.gpu(self.gpu)


@dataclass(frozen=True)
class Figures:
    """What one recipe takes, simulated: whether the GPU is large enough, a step's least seconds."""

    recipe: Recipe
    run: Run
    fits: bool
    seconds: float


@functools.cache
def simulated(job: CommonJob, recipe: Recipe) -> Figures:
    """Return the figures of ``recipe`` for the job's model and GPU; nothing is simulated twice."""
    found = estimate(job.model, gpu=job.gpu, recipe=recipe)
    _, seconds = link_and_bound(found, shapes_of(find_config(job.model)[1]))
    return Figures(recipe, replace(found.run, trace=None, oom=None), found.fits, seconds)


# --- each technique alone -------------------------------------------------------------------------


@dataclass(frozen=True)
class TechniqueRow:
    """One technique on the common job: ``before``, and ``after`` with it alone.

    ``after`` is None where no recipe can express it, or where ``refused`` says why it cannot be.
    """

    technique: Technique
    before: Figures
    after: Figures | None = None
    refused: str = ""

    @property
    def part(self) -> tuple[Category, int] | None:
        """The category whose bytes at the peak fall most, and by how many; None if none falls."""
        if self.after is None:
            return None
        before, after = self.before.run, self.after.run
        fall = {c: before.bytes_of(c) - after.bytes_of(c) for c in Category}
        category = max(fall, key=lambda c: (fall[c], c))
        if fall[category] <= LEAST_SAVED * before.peak_bytes:
            return None
        return category, fall[category]


def row(technique: Technique, job: CommonJob) -> TechniqueRow:
    """Return the row of ``technique`` on ``job``, which itself can be simulated."""
    plain = TechniqueRow(technique, simulated(job, job.recipe))
    if technique.change is None:
        return plain
    try:
        recipe = technique.change(job.recipe, job.simulated_gpu)
        if recipe == job.recipe:
            return replace(plain, refused="the job has it already")
        return replace(plain, after=simulated(job, recipe))
    except InputError as error:
        return replace(plain, refused=str(error))


# --- in which order to adopt techniques -----------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """One step of the order of adoption: a technique, or two of which neither saves alone.

    ``before`` and ``after`` are on top of all earlier moves; ``changed``: it changes the training.
    """

    techniques: tuple[Technique, ...]
    before: Figures
    after: Figures
    changed: bool

    @property
    def name(self) -> str:
        """Its techniques as text."""
        return " + ".join(technique.name for technique in self.techniques)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the peak."""
        return self.before.run.peak_bytes - self.after.run.peak_bytes

    @property
    def added_seconds(self) -> float:
        """Seconds of the bound on a step; negative where it falls."""
        return self.after.seconds - self.before.seconds

    @property
    def is_free(self) -> bool:
        """Whether the bound does not grow."""
        return self.added_seconds <= LEAST_SLOWER * self.before.seconds

    @property
    def worth(self) -> tuple[bool, float]:
        """Sort key, the best last: free moves by bytes, the others by bytes per second."""
        return self.is_free, self.saved_bytes / (1 if self.is_free else self.added_seconds)


def order_of_adoption(
    job: CommonJob, techniques: Sequence[Technique] = TECHNIQUES
) -> tuple[Move, ...]:
    """Adopt greedily, from the plain job on, what saves most bytes of the peak per added second.

    First all that leaves the training as it is, until nothing of it saves; then, on top of that,
    what changes the training. Where nothing is free, those that save nothing alone are tried in
    pairs.
    """
    now = simulated(job, job.recipe)
    least_bytes = LEAST_SAVED * now.run.peak_bytes
    left = [technique for technique in techniques if technique.change]
    order: list[Move] = []
    for changed in (False, True):
        while saving := _saving(job, now, left, changed, least_bytes):
            best = max(saving, key=lambda move: move.worth)
            order.append(best)
            left = [technique for technique in left if technique not in best.techniques]
            now = best.after
    return tuple(order)


def _saving(
    job: CommonJob, now: Figures, left: Sequence[Technique], changed: bool, least_bytes: float
) -> list[Move]:
    """Return the moves from ``now`` that save at least ``least_bytes`` of the peak."""
    tried = _moves(job, now, itertools.combinations(left, 1), changed)
    saving = [move for move in tried if move.saved_bytes >= least_bytes]
    if changed or any(move.is_free for move in saving):
        return saving
    silent = [move.techniques[0] for move in tried if move.saved_bytes < least_bytes]
    pairs = _moves(job, now, itertools.combinations(silent, 2), changed)
    return saving + [move for move in pairs if move.saved_bytes >= least_bytes]


def _moves(
    job: CommonJob, now: Figures, choices: Iterable[tuple[Technique, ...]], changed: bool
) -> list[Move]:
    """Return those of ``choices`` that are possible from ``now`` on and are of this kind."""
    moves = []
    for techniques in choices:
        recipe = now.recipe
        try:
            for technique in techniques:
                recipe = technique.change(recipe, job.simulated_gpu)
            changes_more = bool(set(changes(recipe)) - set(changes(now.recipe)))
            if recipe == now.recipe or recipe.ranks > 1 or changes_more != changed:
                continue
            after = simulated(job, recipe)
        except InputError:  # an earlier move excludes it, or the GPU cannot do it
            continue
        moves.append(Move(techniques, now, after, changed))
    return moves


# --- the sheet ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Everything the cheat sheet says; ``plain`` are the job's own figures."""

    job: CommonJob
    plain: Figures
    rows: tuple[TechniqueRow, ...]
    order: tuple[Move, ...]
    trial: Trial
    versions: str


def build(
    job: CommonJob | None = None,
    *,
    trial: Trial | None = None,
    techniques: Sequence[Technique] = TECHNIQUES,
    report: Callable[[str], object] = lambda name: None,
) -> Sheet:
    """Simulate the techniques, each alone and in their order of adoption.

    Args:
        job: what they are compared on; `CommonJob()` if None.
        trial: the verdicts; what `gather` finds if None.
        techniques: those that are simulated.
        report: called with the name of each technique that is simulated next.
    """
    job = job or CommonJob()
    rows = []
    for technique in techniques:
        report(technique.name)
        rows.append(row(technique, job))
    report("the order of adoption")
    return Sheet(
        job=job,
        plain=simulated(job, job.recipe),
        rows=tuple(rows),
        order=order_of_adoption(job, techniques),
        trial=gather() if trial is None else trial,
        versions=versions_text({"versions": machine().versions}),
    )
