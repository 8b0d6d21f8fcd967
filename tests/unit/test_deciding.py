"""What lesson 24 shows beside the cheat sheet."""

import pytest
from lesson_files import run

from gpumem.estimation.recipe import Recipe
from gpumem.units import GIB
from labkit import deciding
from labkit.cheat_sheet import CommonJob, Figures, Move, gather
from labkit.lesson.claims import all_claims

JOB = CommonJob(model="made up", gpu="rtx-4090")


def stage(peak_gib, reserved_gib, recipe=JOB.recipe):
    peak_bytes = peak_gib * GIB
    made = run(
        peak_bytes=peak_bytes,
        by_category={"weights": peak_bytes},
        reserved_bytes=int(reserved_gib * GIB),
    )
    return Figures(recipe, made, True, 1.0)


@pytest.mark.parametrize(("freed_gib", "moves"), [(0, "plain + a + b"), (5, "plain + a")])
def test_moves_are_made_until_reserved_memory_leaves_room(monkeypatch, freed_gib, moves):
    needs = {JOB.recipe: 40, Recipe(checkpointing=True): 22.5, Recipe(chunked_loss=True): 10}

    def simulated(job, recipe):
        changed = recipe.optimizer == "adamw8bit"
        return stage(8, needs[recipe.but(optimizer="adamw")] - freed_gib * changed)

    monkeypatch.setattr(deciding, "simulated", simulated)

    class Named(Move):
        name = property(lambda self: self.techniques[0])

    after = [stage(8, needs[recipe], recipe) for recipe in needs]
    order = [Named((name,), after[i], after[i + 1], False) for i, name in enumerate("ab")]
    change = {"optimizer": "adamw8bit"} if freed_gib else {}
    assert deciding.first_that_fits(JOB, order, change)[0] == moves


def test_a_bar_is_as_long_as_what_is_reserved(monkeypatch):
    monkeypatch.setattr("gpumem.figures.drawing.Picture.show", lambda self: self)
    figure = deciding.reserved_bars({"plain": stage(2, 3)}, JOB, "It fits")
    assert "kept by the allocator 1.00 GiB, together 3.00 GiB" in figure.alt


def test_the_lists_hold_every_claim_once():
    text = deciding.claim_lists(gather()).text
    assert text.count("\n| ") - 2 * text.count("## ") == len(all_claims())
