"""What each technique takes on the job that all are compared on, and in which order to adopt them.

Everything is simulated.

Limits: a bound is not a time: it counts neither kernel launches nor the CPU's work on an offloaded
optimizer. The greedy order looks one move ahead, or two where nothing is free and neither saves
anything alone.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from labkit.cheat_sheet.techniques import TECHNIQUES, Technique
from labkit.hardware import catalogue
from labkit.hardware.bound import least_seconds
from labkit.hardware.catalogue import Gpu
from labkit.models.config import find_config
from labkit.plan.candidates import changes, link_bytes
from labkit.plan.estimate import Estimate, estimate
from labkit.plan.recipe import Recipe
from labkit.plan.search import bytes_to_host
from labkit.plan.shapes import Shapes, shapes_of
from labkit.runs import Run
from labkit.trace import Category
from labkit.values import InputError

#: Fraction of the plain job's peak below which a change counts as none.
LEAST_SAVED = 0.005
#: Fraction of the plain job's bound below which a move costs nothing.
LEAST_SLOWER = 0.001
PLAIN = Recipe(batch_size=4, seq_len=1024, attention="eager")


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
    run = replace(found.run, trace=None, oom=None)
    return Figures(recipe, run, found.fits, _seconds(found, job.model))


def _seconds(found: Estimate, model: str) -> float:
    run = found.run
    crossing_bytes = link_bytes(found.recipe, _shapes(model), bytes_to_host(run.trace))
    flops = {found.recipe.precision: run.flops}
    return least_seconds(found.gpu, flops, run.moved_bytes, crossing_bytes, run.sent_bytes)


@functools.cache
def _shapes(model: str) -> Shapes:
    return shapes_of(find_config(model)[1])


@dataclass(frozen=True)
class Row:
    """One technique on the common job: ``before``, and ``after`` with it alone.

    ``after`` is None where no recipe can express it, or where ``refused`` says why it cannot be.
    """

    technique: Technique
    before: Figures
    after: Figures | None = None
    refused: str = ""

    @property
    def saved_share(self) -> float | None:
        """Fraction of the plain job's peak; negative where it grows."""
        if self.after is None:
            return None
        return 1 - self.after.run.peak_bytes / self.before.run.peak_bytes

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

    @property
    def changes_training(self) -> bool:
        """Whether it trains otherwise than the plain job."""
        before = changes(self.before.recipe)
        return bool(self.after and set(changes(self.after.recipe)) - set(before))

    @property
    def slower_share(self) -> float:
        """By which fraction of itself the bound on a step grows; there must be an ``after``."""
        return self.after.seconds / self.before.seconds - 1


def row(technique: Technique, job: CommonJob) -> Row:
    """Return the row of ``technique`` on ``job``, which itself can be simulated."""
    plain = Row(technique, simulated(job, job.recipe))
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
    changed: bool = False

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
    adopted: list[Move] = []
    for changed in (False, True):
        while move := _best_move(job, techniques, adopted, changed):
            adopted.append(move)
    return tuple(adopted)


def _best_move(
    job: CommonJob, techniques: Sequence[Technique], adopted: Sequence[Move], changed: bool
) -> Move | None:
    plain = simulated(job, job.recipe)
    used = {technique.name for move in adopted for technique in move.techniques}
    left = [(t,) for t in techniques if t.change and t.name not in used]
    moves = _moves(job, left, adopted, changed)
    least = LEAST_SAVED * plain.run.peak_bytes
    saving = [move for move in moves if move.saved_bytes >= least]
    if not changed and not any(move.is_free for move in saving):
        silent = [move.techniques[0] for move in moves if move.saved_bytes < least]
        pairs = _moves(job, list(itertools.combinations(silent, 2)), adopted, changed)
        saving += [move for move in pairs if move.saved_bytes >= least]
    return max(saving, key=lambda move: move.worth, default=None)


def _moves(
    job: CommonJob,
    choices: Sequence[tuple[Technique, ...]],
    adopted: Sequence[Move],
    changed: bool,
) -> list[Move]:
    """Return those of ``choices`` that are possible after ``adopted`` and are of this kind."""
    before = adopted[-1].after if adopted else simulated(job, job.recipe)
    moves = []
    for techniques in choices:
        recipe = before.recipe
        try:
            for technique in techniques:
                recipe = technique.change(recipe, job.simulated_gpu)
            changes_more = bool(set(changes(recipe)) - set(changes(before.recipe)))
            if recipe == before.recipe or recipe.ranks > 1 or changes_more != changed:
                continue
            after = simulated(job, recipe)
        except InputError:  # an earlier move excludes it, or the GPU cannot do it
            continue
        moves.append(Move(techniques, before, after, changed))
    return moves
