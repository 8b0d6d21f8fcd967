"""The cheat sheet: its figures, the order of adoption, what it reads, and what it writes."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from lesson_files import result, run

from gpumem.estimation.estimate import estimate
from gpumem.estimation.known_techniques import Technique
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
    RecordedVerdict,
    Trial,
    build,
    gather,
    order_of_adoption,
    row,
    verdict_table,
)
from labkit.cli import main
from labkit.lesson import results
from labkit.lesson.claims import Verdict, all_claims

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "CHEAT_SHEET.md"  # holds the tables that the command prints
TINY = CommonJob(model="SmolLM2-tiny", recipe=cheat_sheet.PLAIN.but(seq_len=256))
EVIL = "<script>alert('|')</script>"


@pytest.fixture(scope="module")
def sheet():
    """Of a tiny model, with a few techniques, on which nothing is judged."""
    few = ("gradient checkpointing", "fused attention", "SGD", "optimizer on the host")
    techniques = [t for t in TECHNIQUES if t.name in (*few, "sharding over 8 GPUs")]
    return build(TINY, trial=trial_of(), techniques=techniques)


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


def made_up(monkeypatch, measure, slower=None):
    """Simulations that ``measure`` makes of the names that are on: peak in GiB, seconds."""

    def simulated(job, recipe):
        on = {n for n, change in _FIELDS.items() if recipe == recipe.but(**change)}
        peak, seconds = measure(on)
        return Figures(recipe, run_of(peak * GIB), True, seconds)

    monkeypatch.setattr(cheat_sheet, "simulated", simulated)
    techniques = [Technique(name=name, recipe=fields) for name, fields in _FIELDS.items()]
    return order_of_adoption(CommonJob(model="made up"), techniques, slower)


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


def test_a_technique_that_was_timed_takes_these_seconds(monkeypatch):
    def measure(on):
        return 40 - 10 * ("a" in on) - 6 * ("b" in on), 1 + 0.1 * len({"a", "b"} & on)

    assert [move.name for move in made_up(monkeypatch, measure)] == ["a", "b"]
    order = made_up(monkeypatch, measure, {"a": 1.5})
    assert [move.name for move in order] == ["b", "a"]
    assert [move.after.seconds for move in order] == pytest.approx([1.1, 1.1 * 1.5])


def test_each_move_of_a_real_order_saves(sheet):
    assert sheet.order
    for move in sheet.order:
        assert move.saved_bytes > 0
        assert move.after.recipe.tokens == TINY.recipe.tokens
    changed = [move.changed for move in sheet.order]
    assert changed == sorted(changed)
    peaks = [figures.run.peak_bytes for figures in (sheet.plain, *(m.after for m in sheet.order))]
    assert peaks == sorted(peaks, reverse=True)


# --- what it reads --------------------------------------------------------------------------------


MODE = "trained on a CPU"
JUDGED = {"id": "amp-accuracy", "verdict": "supported", "measured": 0.001, "mode": MODE}
H200 = {"kind": "cuda", "name": "NVIDIA H200", "versions": {"torch": "2.11.0"}}


def test_recorded_verdicts_name_the_gpu_and_leave_out_what_it_could_not_judge(
    tmp_path, monkeypatch
):
    not_judged = {"id": "accum-neutral-speed", "verdict": "not testable here", "measured": None}
    found = result(lesson="04", machine=H200, judgements=(JUDGED, not_judged))
    results.save(found, tmp_path / "nvidia-h200/04.json")
    monkeypatch.setattr(results, "result_folders", lambda: [tmp_path])
    trial = gather()
    (finding,) = trial.findings["amp-accuracy"]
    assert (finding.verdict, finding.found) == ("supported", "0.1 %")
    assert trial.machines == [finding.machine] == ["NVIDIA H200"]
    assert trial.findings["accum-neutral-speed"] == ()


def run_of(peak_bytes, **changes):
    return run(peak_bytes=peak_bytes, by_category={"weights": peak_bytes}, **changes)


# --- what it says ---------------------------------------------------------------------------------


def test_nothing_is_filled_in(sheet):
    assert not any(sheet.trial.findings.values())
    table = verdict_table(sheet.trial)
    assert "nothing yet" in table.note
    assert table.rows[-1] == ("all, each once", *"00000", str(len(all_claims())))


def trial_of(**verdicts):
    """A trial in which each claim was judged so on machines 0, 1 and so on."""
    found = dict.fromkeys(all_claims(), ())
    for id, judged in verdicts.items():
        id = id.replace("_", "-")
        found[id] = tuple(
            RecordedVerdict(Verdict(verdict), "found", f"GPU {number}")
            for number, verdict in enumerate(judged.split())
        )
    return Trial(found)


def test_a_claim_counts_once_and_depends_where_machines_disagree():
    trial = trial_of(
        amp_accuracy="supported supported",
        ckpt_40="wrong overstated",
        bf16_no_scaler="wrong",
    )
    assert trial.verdict("amp-accuracy") is Verdict.SUPPORTED
    assert trial.verdict("ckpt-40") is Verdict.DEPENDS
    assert trial.verdict("amp-20-50-faster") is Verdict.NOT_TESTABLE
    assert trial.machines == ["GPU 0", "GPU 1"]
    counts = trial.by_article()
    assert list(counts) == [*"ABCD"]
    assert [counts[letter][Verdict.WRONG] for letter in counts] == [0, 1, 1, 1]  # of all three
    assert counts["A"][Verdict.SUPPORTED] == counts["A"][Verdict.DEPENDS] == 1
    rows = verdict_table(trial).rows
    assert [row[0].split()[0] for row in rows] == ["A", "B", "C", "D", "all,"]
    column = verdict_table(trial).columns.index("wrong")
    assert [row[column] for row in rows] == [*"01111"]
    assert "Judged on: GPU 0; GPU 1." in verdict_table(trial).note
    for letter, verdicts in counts.items():
        made = [claim for claim in all_claims().values() if letter in claim.sources]
        assert verdicts.total() == len(made)


def test_a_finding_says_under_which_conditions_a_claim_agrees():
    found = next(each for each in gather().findings["opt8-75"])
    assert found.agrees.startswith("optimizer state: ")
    assert found.differs.startswith("peak: ")


# --- what it writes -------------------------------------------------------------------------------


def test_a_section_is_escaped_as_html_and_as_markdown():
    section = cheat_sheet.Table("Heading", EVIL, ("a", "b"), ((EVIL, "1"), ("c", "2")))
    assert EVIL not in section._repr_html_()
    lines = str(section).splitlines()
    assert lines[0] == "## Heading"
    tables = [line for line in lines if line.startswith("|")]
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in tables] == [3] * 4


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


def test_the_page_counts_the_verdicts_of_all_records():
    assert str(verdict_table(gather())) in PAGE.read_text(encoding="utf-8")


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
