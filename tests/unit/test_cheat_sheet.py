"""The cheat sheet: its figures, the order of adoption, where it fits, and what it writes."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from lesson_files import run

from gpumem.estimation.estimate import estimate
from gpumem.estimation.known_techniques import Technique
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.weight_shapes import shapes_of
from gpumem.inputs import InputError
from gpumem.models.config import find_config
from gpumem.trace import Category
from gpumem.units import GIB
from labkit import cheat_sheet
from labkit.cheat_sheet import (
    TECHNIQUES,
    CommonJob,
    Figures,
    Move,
    build,
    order_of_adoption,
    row,
)
from labkit.cli import main
from labkit.lesson.claims import all_claims
from labkit.trial import Trial

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "CHEAT_SHEET.md"  # holds the tables that the command prints
TINY = CommonJob(model="SmolLM2-tiny", recipe=cheat_sheet.PLAIN.but(seq_len=256))


@pytest.fixture(scope="module")
def sheet():
    """Of a tiny model, with a few techniques, on which nothing is judged."""
    few = ("gradient checkpointing", "fused attention", "SGD", "optimizer on the host")
    techniques = [t for t in TECHNIQUES if t.name in (*few, "sharding over 8 GPUs")]
    return build(TINY, trial=Trial(dict.fromkeys(all_claims(), ())), techniques=techniques)


def row_of(sheet, name):
    return next(row for row in sheet.rows if row.technique.name == name)


# --- techniques -----------------------------------------------------------------------------------


def test_each_lesson_on_a_technique_has_a_row():
    assert all(technique.not_when.endswith(".") for technique in TECHNIQUES)
    assert len({technique.name for technique in TECHNIQUES}) == len(TECHNIQUES)
    assert {t.lesson for t in TECHNIQUES} == {"02", *(f"{n:02}" for n in range(4, 22))}


def test_a_row_says_what_falls_and_by_how_much(sheet):
    sgd = row_of(sheet, "SGD")
    before, after = sgd.before.run, sgd.after.run
    category, fallen_bytes = sgd.part
    assert category is Category.OPTIMIZER
    assert fallen_bytes == before.bytes_of(category) - after.bytes_of(category)
    assert after.peak_bytes < before.peak_bytes
    assert sum(after.by_category.values()) == after.peak_bytes
    assert row_of(sheet, "gradient checkpointing").part[0] is Category.ACTIVATIONS


def test_figures_are_those_of_an_estimate(sheet):
    recipe = TINY.recipe.but(checkpointing=True)
    found = estimate(TINY.model, gpu=TINY.gpu, recipe=recipe)
    after = row_of(sheet, "gradient checkpointing").after
    assert after.recipe == recipe
    assert after.run.peak_bytes == found.run.peak_bytes
    assert after.fits == found.fits


def test_the_bound_is_arithmetic_or_traffic_and_the_link(sheet):
    plain, gpu = sheet.plain, TINY.simulated_gpu
    arithmetic = plain.run.flops / (gpu.fp32_tflops * 1e12)
    traffic = plain.run.moved_bytes / (gpu.bandwidth_gb_per_s * 1e9)
    assert plain.seconds == pytest.approx(max(arithmetic, traffic))
    crossing = 2 * 4 * shapes_of(find_config(TINY.model)[1]).parameters / 31.5e9
    assert row_of(sheet, "optimizer on the host").after.seconds > crossing
    few_tokens = replace(TINY, recipe=TINY.recipe.but(batch_size=1, seq_len=64))
    shared = row(row_of(sheet, "sharding over 8 GPUs").technique, few_tokens).after
    assert shared.seconds == pytest.approx(shared.run.sent_bytes / 31.5e9)


def test_what_a_gpu_or_a_job_cannot_do_is_said():
    by_name = {technique.name: technique for technique in TECHNIQUES}
    old = row(by_name["BF16 throughout"], replace(TINY, gpu="t4"))
    assert old.after is None
    assert "no bfloat16" in old.refused
    mixed = row(by_name["mixed precision"], replace(TINY, gpu="t4"))
    assert mixed.after.recipe.precision == "amp-fp16"
    single = row(
        by_name["accumulation of two halves"], replace(TINY, recipe=TINY.recipe.but(batch_size=1))
    )
    assert "no halves" in single.refused
    has = row(by_name["fused attention"], replace(TINY, recipe=TINY.recipe.but(attention="sdpa")))
    assert has.refused == "the job has it already"
    assert row(by_name["TorchScript"], TINY).after is None
    with pytest.raises(InputError, match="unknown GPU"):
        row(by_name["SGD"], replace(TINY, gpu="nothing"))


# --- the order ------------------------------------------------------------------------------------

_FIELDS = {
    "a": {"checkpointing": True},
    "b": {"chunked_loss": True},
    "c": {"attention": "sdpa"},
    "d": {"precision": "amp-bf16"},
    "e": {"optimizer": "sgd"},
}


def made_up(monkeypatch, measure):
    """Simulations that ``measure`` makes of the names that are on: peak in GiB, seconds."""

    def simulated(job, recipe):
        on = {n for n, change in _FIELDS.items() if recipe == recipe.but(**change)}
        peak, seconds = measure(on)
        return Figures(recipe, run_of(peak * GIB), True, seconds)

    monkeypatch.setattr(cheat_sheet, "simulated", simulated)
    techniques = [Technique(name=name, recipe=fields) for name, fields in _FIELDS.items()]
    return order_of_adoption(CommonJob(model="made up"), techniques)


def free_first(on):
    saved, added = {"a": 10, "b": 6, "c": 1, "d": 2}, {"a": 0.4, "b": 0.1, "c": -0.1, "d": 0}
    return 40 - sum(saved.get(n, 0) for n in on), 1 + sum(added.get(n, 0) for n in on)


def only_together(on):
    return 40 - 15 * ({"c", "d"} <= on), 1 - 0.1 * len(on)


def changes_last(on):
    return 40 - ("a" in on) - 20 * ("e" in on), 1 + len(on)


def nothing_saves(on):
    return 40, 1


@pytest.mark.parametrize(
    ("measure", "names", "free"),
    [
        (free_first, ["d", "c", "b", "a"], [True, True, False, False]),
        (only_together, ["c + d"], [True]),
        (changes_last, ["a", "e"], [False, False]),  # e is an optimizer
        (nothing_saves, [], []),
    ],
)
def test_the_order_is_by_bytes_of_free_moves_then_by_bytes_per_second(
    monkeypatch, measure, names, free
):
    order = made_up(monkeypatch, measure)
    assert [move.name for move in order] == names
    assert [move.is_free for move in order] == free
    assert [move.changed for move in order] == [name == "e" for name in names]
    for earlier, later in itertools.pairwise(order):
        assert earlier.after == later.before


def test_each_move_of_a_real_order_saves(sheet):
    assert sheet.order
    for move in sheet.order:
        assert move.saved_bytes > 0
        assert move.after.recipe.tokens == TINY.recipe.tokens
    changed = [move.changed for move in sheet.order]
    assert changed == sorted(changed)
    peaks = [figures.run.peak_bytes for figures in (sheet.plain, *(m.after for m in sheet.order))]
    assert peaks == sorted(peaks, reverse=True)


def run_of(peak_bytes, **changes):
    return run(peak_bytes=peak_bytes, by_category={"weights": peak_bytes}, **changes)


# --- where it fits --------------------------------------------------------------------------------


def stage(peak_gib, reserved_gib, recipe=CommonJob.recipe):
    made = run_of(peak_gib * GIB, reserved_bytes=int(reserved_gib * GIB))
    return Figures(recipe, made, True, 1.0)


@pytest.mark.parametrize(("freed_gib", "moves"), [(0, ("a", "b")), (5, ("a",))])
def test_moves_are_made_until_reserved_memory_leaves_room(monkeypatch, freed_gib, moves):
    job = CommonJob(model="made up")
    needs = {job.recipe: 40, Recipe(checkpointing=True): 22.5, Recipe(chunked_loss=True): 10}

    def simulated(job, recipe):
        changed = recipe.optimizer == "adamw8bit"
        return stage(8, needs[recipe.but(optimizer="adamw")] - freed_gib * changed)

    monkeypatch.setattr(cheat_sheet, "simulated", simulated)

    class Named(Move):
        name = property(lambda self: self.techniques[0])

    after = [stage(8, needs[recipe], recipe) for recipe in needs]
    order = [Named((name,), after[i], after[i + 1], False) for i, name in enumerate("ab")]
    change = {"optimizer": "adamw8bit"} if freed_gib else {}
    assert cheat_sheet.first_that_fits(job, order, change)[0] == moves


@pytest.mark.parametrize(("reserved_gib", "fits"), [(21.5, True), (22.5, False)])
def test_a_run_with_room_is_held_to_the_limit_of_the_bars(reserved_gib, fits):
    made = stage(8, reserved_gib)
    held = cheat_sheet.with_room(CommonJob(), made.run)
    assert cheat_sheet.fits_with_room(CommonJob(), made) is held.fits is fits
    assert (held.device, held.capacity_bytes) == cheat_sheet.room(CommonJob().simulated_gpu)


def test_a_bar_is_as_long_as_what_is_reserved(monkeypatch):
    monkeypatch.setattr("gpumem.figures.drawing.Picture.show", lambda self: self)
    figure = cheat_sheet.reserved_bars({"plain": stage(2, 3)}, CommonJob(), "It fits")
    assert "kept by the allocator 1.00 GiB, together 3.00 GiB" in figure.alt


# --- what it writes -------------------------------------------------------------------------------


@pytest.mark.lessons
def test_the_page_holds_the_tables_that_are_made():
    """As `labkit cheat-sheet` prints them, with the versions that the page names."""
    page = PAGE.read_text(encoding="utf-8")
    versions = re.search(r"Simulated with (torch [^\n]*?)\.\n", page)
    made = build()
    if made.versions != versions[1]:
        pytest.skip(f"{PAGE.name} was made with {versions[1]}, this is {made.versions}")
    for section in cheat_sheet.sections(made):
        assert str(section) in page


def test_the_picture_shows_the_order_of_the_table():
    """By its description, and by the sentence that stands for it in the README."""
    page, readme = (path.read_text(encoding="utf-8") for path in (PAGE, ROOT / "README.md"))
    described = re.search(r"picture: begin -->\n(.*)\n<!-- picture: end", page)[1]
    order = page[page.index("| move | peak after it |") :].split("\n\n")[0].splitlines()[2:]
    peaks = [line.split("|")[2].strip() for line in order]
    assert len(peaks) > 3
    assert re.findall(r": ([\d.]+ [GM]iB)", described) == peaks
    alt = re.search(r"!\[([^]]*)\]\(docs/adoption\.png\)", readme)[1]
    assert re.findall(r"[\d.]+ GiB", alt) == [peaks[0], peaks[-1]]
    assert f"{len(peaks) - 1} moves" in alt
    assert f"![{alt}](adoption.png)" in page


def test_the_command(capsys, sheet, monkeypatch):
    given = {}

    def fake(job, **options):
        given.update(options, job=job)
        return sheet

    monkeypatch.setattr(cheat_sheet, "build", fake)
    assert main.main(["cheat-sheet", "--gpu", "t4", "--batch-size", "8"]) == 0
    assert given["job"] == CommonJob(gpu="t4", recipe=cheat_sheet.PLAIN.but(batch_size=8))
    printed = capsys.readouterr().out
    assert printed.startswith("# GPU Memory Lab: cheat sheet\n\n## ")
    for section in cheat_sheet.sections(sheet):
        assert f"## {section.heading}\n\n{section.markdown()}\n" in printed
        assert {len(line) for line in section.rows} == {len(section.columns)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "nothing"], "unknown GPU"),
        (["--precision", "fp16"], "fp16 weights"),
    ],
)
def test_bad_input_is_a_sentence(arguments, says, capsys):
    assert main.main(["cheat-sheet", *arguments]) == 2
    assert says in capsys.readouterr().err
