"""What lesson 24 shows beside the cheat sheet: where a job fits, every claim, one saving for real.

    first_that_fits(job, order, {"optimizer": "adamw8bit"})
    reserved_bars({"plain": sheet.plain}, job, "It does not fit")

Limits: those of the cheat sheet. What is drawn is reserved memory, which decides what fits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from markupsafe import Markup

from gpumem.estimation.advice import MARGIN
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.training import training
from gpumem.figures.bars import stacked_bars
from gpumem.figures.drawing import Picture
from gpumem.figures.html_pages import MISSING, Rich
from gpumem.hardware.this_machine import machine
from gpumem.measurement import measure
from gpumem.runs import Run
from gpumem.simulation import simulate
from gpumem.trace import Category
from labkit.cheat_sheet import (
    OPEN,
    CommonJob,
    Figures,
    Move,
    Table,
    Trial,
    fits_with_room,
    simulated,
)
from labkit.lesson.claims import Verdict, all_claims


def first_that_fits(
    job: CommonJob, order: Sequence[Move], change: Mapping[str, Any]
) -> tuple[str, Figures]:
    """Return the moves of the same training up to the first stage that fits, and that stage.

    Every stage has ``change``, fields of a recipe, too, and must leave ``MARGIN`` of the GPU free.
    The last stage is returned where none fits.
    """
    names = []
    stages = {"plain": job.recipe}
    stages |= {move.name: move.after.recipe for move in order if not move.changed}
    for name, recipe in stages.items():
        names.append(name)
        stage = simulated(job, recipe.but(**change))
        if fits_with_room(job, stage):
            break
    return " + ".join(names), stage


def tried_here(gpu: str, *, steps: int) -> tuple[list[Run], float, float]:
    """Train without and with checkpointing on this machine; return both runs, and the share of the
    peak that it saves here and simulated.

    On a GPU the model is SmolLM2-135M, simulated for ``gpu``; on a CPU three layers of
    SmolLM2-tiny. Steps are so small there that threads would wait for each other: one is used.
    """
    on_gpu = machine().can_measure
    if not on_gpu:
        torch.set_num_threads(1)
    layers = None if on_gpu else 3
    small = Recipe(batch_size=4, seq_len=256, attention="eager")
    real, told = [], []
    for recipe in (small, small.but(checkpointing=True)):
        experiment = training("SmolLM2-135M" if on_gpu else "SmolLM2-tiny", recipe)
        real.append(measure(experiment, steps=steps, layers=layers).named(str(recipe)))
        told.append(simulate(experiment, gpu=gpu if on_gpu else None, layers=layers))
    shares = (1 - after.peak_bytes / before.peak_bytes for before, after in (real, told))
    return real, *shares


def gpus_table(trial: Trial) -> Table:
    """Return the claims on which GPUs disagree, with what each found."""
    rows = []
    for id, claim in all_claims().items():
        found = {each.machine: f"{each.verdict}: {each.found}" for each in trial.findings[id]}
        if len({each.verdict for each in trial.findings[id]}) > 1:
            rows.append((claim.says, *(found.get(name, MISSING) for name in trial.machines)))
    return Table("GPUs", "It depends on the GPU:", ("claim", *trial.machines), tuple(rows))


def claim_lists(trial: Trial) -> Rich:
    """Return every claim, in a list for each verdict that a click opens."""
    columns, lists, texts = ("lesson", "article", "claim", "found on the first GPU"), [], []
    claims = all_claims()
    for verdict in Verdict:
        rows = []
        for id in [id for id in claims if trial.verdict(id) == verdict]:
            found = [each.found for each in trial.findings[id]] or [MISSING]
            rows.append(
                (claims[id].lesson, ", ".join(claims[id].sources), claims[id].says, found[0])
            )
        name = OPEN if verdict is Verdict.NOT_TESTABLE else str(verdict)
        table = Table(name, "", columns, tuple(rows))
        opened = Markup("<details><summary>{} claims: {}</summary>{}</details>")
        lists.append(opened.format(len(rows), name, Markup(table._repr_html_())))
        texts.append(str(table))
    return Rich(str(Markup("").join(lists)), "\n\n".join(texts))


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
    limit = f"{gpu.name} less {MARGIN:.0%}", int((1 - MARGIN) * gpu.budget_bytes)
    return stacked_bars(bars, title=title, source=source, limit=limit)
