"""The cheat sheet: what each technique takes on one job, in which order to adopt them, and how many
of the articles' claims survived.

Everything is simulated; bounds, links and changes of the training are those of `labkit advise`. The
verdicts are those that GPUs recorded.

Limits: one model, GPU and batch at a time, and techniques rank differently on others. A bound is
not a time: it counts neither kernel launches nor the CPU's work on an offloaded optimizer. The
greedy order looks one move ahead, or two where nothing is free and neither saves anything alone.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpumem.estimation.advice import MARGIN
from gpumem.estimation.estimate import estimate
from gpumem.estimation.known_techniques import KNOWN, Technique
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.recipes_to_try import changes
from gpumem.estimation.search import link_and_bound
from gpumem.estimation.weight_shapes import shapes_of
from gpumem.figures.bars import stacked_bars
from gpumem.figures.drawing import Picture
from gpumem.figures.html_pages import MISSING
from gpumem.figures.tables import change_text, seconds_text
from gpumem.hardware import catalogue
from gpumem.hardware.catalogue import Gpu
from gpumem.hardware.this_machine import machine
from gpumem.inputs import InputError
from gpumem.models.config import find_config
from gpumem.runs import Run
from gpumem.trace import Category
from gpumem.units import format_bytes
from labkit.lesson.claims import format_value
from labkit.lesson.results import versions_text
from labkit.trial import Table, Trial, gather, verdict_table

#: Fraction of the plain job's peak below which a change counts as none; late moves have little left
#: to save, so it is smaller than that of `labkit phantom --fix`.
LEAST_SAVED = 0.005
#: Fraction of the plain job's bound below which a move costs nothing.
LEAST_SLOWER = 0.001
PLAIN = Recipe(batch_size=4, seq_len=1024, attention="eager")
#: Those that lessons teach.
TECHNIQUES = tuple(technique for technique in KNOWN.values() if technique.lesson)


# --- the job --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CommonJob:
    """The job on which techniques are compared: a model, a GPU, and plain training with AdamW."""

    model: str = "Llama-3.2-1B"
    gpu: str = "rtx-4090"
    recipe: Recipe = PLAIN

    @property
    def simulated_gpu(self) -> Gpu:
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
    found = estimate(job.model, gpu=job.gpu, recipe=recipe, loops=False)
    _, seconds = link_and_bound(found, shapes_of(find_config(job.model)[1]))
    return Figures(recipe, replace(found.run, trace=None, oom=None), found.fits, seconds)


def fits_with_room(job: CommonJob, stage: Figures) -> bool:
    """Return whether what is reserved leaves as much of the job's GPU free as `advise` does."""
    return stage.run.reserved_bytes <= (1 - MARGIN) * job.simulated_gpu.budget_bytes


def room(gpu: Gpu) -> tuple[str, int]:
    """Return what a figure calls ``gpu`` without its margin, and how many bytes that can hold."""
    return f"{gpu.name} less {MARGIN:.0%}", int((1 - MARGIN) * gpu.budget_bytes)


def with_room(job: CommonJob, run: Run) -> Run:
    """Return ``run`` as one on the job's GPU less its margin: its figures draw the limit there."""
    device, capacity_bytes = room(job.simulated_gpu)
    return replace(run, device=device, capacity_bytes=capacity_bytes)


# --- each technique alone -------------------------------------------------------------------------


@dataclass(frozen=True)
class TechniqueRow:
    """One technique on the common job: ``before``, and ``after`` with it alone.

    ``after`` is None where ``refused`` says why it cannot be had.
    """

    technique: Technique
    before: Figures
    after: Figures | None = None
    refused: str = ""

    @property
    def part(self) -> tuple[Category, int] | None:
        """The category whose bytes at the peak fall most, and by how many; None if none falls."""
        before, after = self.before.run, self.after.run
        fall = {c: before.bytes_of(c) - after.bytes_of(c) for c in Category}
        category = max(fall, key=lambda c: (fall[c], c))
        if fall[category] <= LEAST_SAVED * before.peak_bytes:
            return None
        return category, fall[category]


def row(technique: Technique, job: CommonJob) -> TechniqueRow:
    """Return the row of ``technique`` on ``job``, which itself can be simulated."""
    plain = simulated(job, job.recipe)
    try:
        recipe = technique.added(job.recipe, job.simulated_gpu)
        if recipe == job.recipe:
            raise InputError("the job has it already")
        return TechniqueRow(technique, plain, simulated(job, recipe))
    except InputError as error:
        return TechniqueRow(technique, plain, refused=str(error))


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
        return " + ".join(technique.name for technique in self.techniques)

    @property
    def saved_bytes(self) -> int:
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
    left = [technique for technique in techniques if technique.recipe]
    order: list[Move] = []
    for changed in (False, True):
        while saving := _saving(job, now, left, changed):
            best = max(saving, key=lambda move: move.worth)
            order.append(best)
            left = [technique for technique in left if technique not in best.techniques]
            now = best.after
    return tuple(order)


def _saving(job: CommonJob, now: Figures, left: Sequence[Technique], changed: bool) -> list[Move]:
    """Return the moves from ``now`` that save something of the peak."""
    least_bytes = LEAST_SAVED * simulated(job, job.recipe).run.peak_bytes
    tried = _moves(job, now, itertools.combinations(left, 1), changed)
    saving = [move for move in tried if move.saved_bytes >= least_bytes]
    if changed or any(move.is_free for move in saving):
        return saving
    silent = [move.techniques[0] for move in tried if move.saved_bytes < least_bytes]
    pairs = _moves(job, now, itertools.combinations(silent, 2), changed)
    return saving + [move for move in pairs if move.saved_bytes >= least_bytes]


def _moves(
    job: CommonJob,
    now: Figures,
    choices: Iterable[tuple[Technique, ...]],
    changed: bool,
) -> list[Move]:
    """Return those of ``choices`` that are possible from ``now`` on and are of this kind."""
    moves = []
    for techniques in choices:
        recipe = now.recipe
        try:
            for technique in techniques:
                recipe = technique.added(recipe, job.simulated_gpu)
            changes_more = bool(set(changes(recipe)) - set(changes(now.recipe)))
            if recipe == now.recipe or recipe.ranks > 1 or changes_more != changed:
                continue
            after = simulated(job, recipe)
        except InputError:  # an earlier move excludes it, or the GPU cannot do it
            continue
        moves.append(Move(techniques, now, after, changed))
    return moves


def first_that_fits(
    job: CommonJob, order: Sequence[Move], change: Mapping[str, Any]
) -> tuple[tuple[str, ...], Figures]:
    """Return the moves of the same training up to the first stage that fits, and that stage.

    Every stage has ``change``, fields of a recipe, too, and must leave ``MARGIN`` of the GPU free.
    The last stage is returned where none fits.
    """
    stage, names = simulated(job, job.recipe.but(**change)), []
    for move in order:
        if fits_with_room(job, stage):
            break
        if not move.changed:
            names.append(move.name)
            stage = simulated(job, move.after.recipe.but(**change))
    return tuple(names), stage


# --- the sheet ------------------------------------------------------------------------------------


@dataclass(frozen=True)
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

    ``trial`` are the verdicts, what `gather` finds if None; ``report`` is called with the name of
    each technique that is simulated next.
    """
    job = job or CommonJob()
    rows = []
    for technique in techniques:
        report(technique.name)
        rows.append(row(technique, job))
    report("the order of adoption")
    order = order_of_adoption(job, techniques)
    versions = versions_text(machine())
    return Sheet(job, simulated(job, job.recipe), tuple(rows), order, trial or gather(), versions)


# --- tables ---------------------------------------------------------------------------------------


def sections(sheet: Sheet) -> tuple[Table, ...]:
    """Return everything that the sheet says, in order."""
    return technique_table(sheet), order_table(sheet), verdict_table(sheet.trial)


def technique_table(sheet: Sheet) -> Table:
    """Return a row for each technique: figures alone, effort, when not to."""
    columns = ("technique", "peak", "change", "what falls most", "bound on a step", "to write")
    columns += ("when not to",)
    rows = tuple(
        (*_technique_cells(each), each.technique.effort, each.technique.not_when)
        for each in sheet.rows
    )
    job, plain = sheet.job, sheet.plain
    fits = "fits" if plain.fits else "does not fit"
    note = (
        f"Peaks and bounds are simulated for {job.simulated_gpu.name}, on one job: {job.model}, "
        f"{job.recipe}. Without any of them it takes {format_bytes(plain.run.peak_bytes)}, which "
        f"{fits} that GPU, and at least {seconds_text(plain.seconds)} a step. A bound is the least "
        "time that the GPU's arithmetic, memory and links allow; it is not a measured time. "
        f"Simulated with {sheet.versions}."
    )
    return Table("Techniques, each alone", note, columns, rows)


def _technique_cells(row: TechniqueRow) -> tuple[str, ...]:
    name = f"{row.technique.lesson} {row.technique.name}"
    if row.after is None:
        return name, MISSING, MISSING, row.refused, MISSING
    part = "nothing"
    if row.part:
        category, fallen_bytes = row.part
        part = f"{category} −{format_bytes(fallen_bytes)}"
    before_bytes, after_bytes = row.before.run.peak_bytes, row.after.run.peak_bytes
    slower = change_text(row.after.seconds, row.before.seconds)
    bound = f"{seconds_text(row.after.seconds)} ({slower})"
    return name, format_bytes(after_bytes), change_text(after_bytes, before_bytes), part, bound


def order_table(sheet: Sheet) -> Table:
    columns = ("move", "peak after it", "saved", "bound on a step", "saved per added second")
    columns += ("reserved", "fits with room", "training")
    plain = sheet.plain
    peak, seconds = format_bytes(plain.run.peak_bytes), seconds_text(plain.seconds)
    first = ("plain", peak, MISSING, seconds, MISSING, *_room_cells(sheet.job, plain), "the same")
    rows = [_move_cells(sheet.job, number, move) for number, move in enumerate(sheet.order, 1)]
    note = (
        "From the plain job on, always the move that saves most bytes of the peak per second that "
        "it adds to the bound; first what trains the same, then what changes the training, "
        f"until nothing that these allow saves. Simulated for {sheet.job.simulated_gpu.name}, "
        f"{sheet.job.model}, {sheet.job.recipe}. Stop at the first that fits with room: what is "
        f"reserved must leave {MARGIN:.0%} of the GPU free."
    )
    return Table("Order of adoption", note, columns, (first, *rows))


def _room_cells(job: CommonJob, stage: Figures) -> tuple[str, str]:
    reserved = format_bytes(stage.run.reserved_bytes)
    return reserved, format_value(fits_with_room(job, stage), "yes_no")


def _move_cells(job: CommonJob, number: int, move: Move) -> tuple[str, ...]:
    worth = "free"
    if not move.is_free:
        worth = f"{format_bytes(round(move.saved_bytes / move.added_seconds))} per s"
    change = change_text(move.after.seconds, move.before.seconds)
    return (
        f"{number}. {move.name}",
        format_bytes(move.after.run.peak_bytes),
        format_bytes(move.saved_bytes),
        f"{seconds_text(move.after.seconds)} ({change})",
        worth,
        *_room_cells(job, move.after),
        "changed" if move.changed else "the same",
    )


def reserved_bars(stages: Mapping[str, Figures], job: CommonJob, title: str) -> Picture:
    """Show what each stage reserves; what the allocator keeps is the last part of its bar."""
    bars = {}
    for name, stage in stages.items():
        run = stage.run
        kept_bytes = max(0, (run.reserved_bytes or 0) - run.peak_bytes)
        bars[name] = {part: run.bytes_of(part) for part in Category}  # one order in all bars
        bars[name]["kept by the allocator"] = kept_bytes
    gpu = job.simulated_gpu
    source = f"what a step reserves, simulated for {gpu.name}"
    return stacked_bars(bars, title=title, source=source, limit=room(gpu))
