"""The cheat sheet: its figures, the order of adoption, what it reads, and what it writes."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup
from drawn import assert_fits, texts
from lesson_files import result, run

from labkit.cheat_sheet import export, figures, findings, pictures
from labkit.cheat_sheet import sheet as sheet_module
from labkit.cheat_sheet.export import percent
from labkit.cheat_sheet.figures import CommonJob, Figures, order_of_adoption, row
from labkit.cheat_sheet.findings import Finding, Trial, gather
from labkit.cheat_sheet.sheet import build
from labkit.cheat_sheet.techniques import TECHNIQUES, Technique
from labkit.cli import main
from labkit.course import results
from labkit.course.claims import Verdict, all_claims
from labkit.course.outcomes import RUN_VARIABLE, Outcome, store
from labkit.course.results import RESULT_MIME
from labkit.plan.estimate import estimate
from labkit.trace import Category
from labkit.values import GIB, InputError

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
TINY = CommonJob(model="SmolLM2-tiny", recipe=figures.PLAIN.but(seq_len=256))
EVIL = "<script>alert('|')</script>"


@pytest.fixture(scope="module")
def sheet(tmp_path_factory):
    """Of a tiny model, with a few techniques, on which nothing is judged."""
    nothing = tmp_path_factory.mktemp("nothing")
    few = ("SGD", "optimizer on the host", "sharding over 8 GPUs")
    techniques = [*TECHNIQUES[:8], *(t for t in TECHNIQUES if t.name in few)]
    return build(TINY, trial=gather(run=nothing, recorded=nothing), techniques=techniques)


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
    assert sgd.saved_share == 1 - after.peak_bytes / before.peak_bytes > 0
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
    crossing = 2 * 4 * figures._shapes(TINY.model).parameters / 31.5e9
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


def technique(name):
    def change(recipe, gpu):
        return recipe.but(**_FIELDS[name])

    return Technique(name=name, lesson="00", change=change, effort="", not_when="Never.")


def made_up(monkeypatch, measure):
    """Simulations that ``measure`` makes of the names that are on: peak in GiB, seconds."""

    def simulated(job, recipe):
        on = {n for n, change in _FIELDS.items() if recipe == recipe.but(**change)}
        peak, seconds = measure(on)
        return Figures(recipe, run_of(peak * GIB), True, seconds)

    monkeypatch.setattr(figures, "simulated", simulated)
    return order_of_adoption(CommonJob(model="made up"), [technique(n) for n in _FIELDS])


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


# --- what it reads --------------------------------------------------------------------------------


MODE = "trained on a CPU"
JUDGED = {"id": "amp-accuracy", "verdict": "supported", "measured": 0.001, "mode": MODE}
H200 = {"kind": "cuda", "name": "NVIDIA H200", "versions": {"torch": "2.11.0"}}


def a_run(folder, *, status="passed"):
    """A folder as `labkit run` leaves it, with one lesson."""
    found = result(lesson="04", judgements=(JUDGED,))
    output = nbformat.v4.new_output("display_data", data={RESULT_MIME: found.to_dict()})
    cell = nbformat.v4.new_code_cell("lab.result(...)", outputs=[output])
    partial = folder / "partial.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), partial)
    store(Outcome("04", "04_mixed_precision", "AMP", status), partial, folder)
    return folder


def test_verdicts_of_this_machine(tmp_path):
    (finding,) = findings.own_findings(a_run(tmp_path))
    assert (finding.claim, finding.verdict, finding.found) == ("amp-accuracy", "supported", "0.1 %")
    assert finding.machine.startswith("this machine, ")
    assert not finding.recorded


def test_a_cpu_counts_only_where_no_gpu_has_judged(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    a_run(run)
    alone = gather(run=run, recorded=tmp_path / "none")
    assert [each.recorded for each in alone.findings["amp-accuracy"]] == [False]
    found = result(lesson="04", machine=H200, judgements=(JUDGED,))
    results.save(found, tmp_path / "gpus/h200/04.json")
    both = gather(run=run, recorded=tmp_path / "gpus")
    assert [each.machine for each in both.findings["amp-accuracy"]] == ["NVIDIA H200"]


def test_a_failed_lesson_and_a_broken_file_give_no_verdict(tmp_path):
    a_run(tmp_path, status="failed")
    (tmp_path / "05_bf16.json").write_text("{")
    with pytest.warns(UserWarning, match=r"05_bf16\.json"):
        assert findings.own_findings(tmp_path) == []


def test_the_run_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(findings, "PACKAGE", tmp_path / "labkit")
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    assert findings.run_folder() is None
    (tmp_path / "build/course").mkdir(parents=True)
    a_run(tmp_path / "build/course")
    assert findings.run_folder() == Path("build/course")
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path / "elsewhere"))
    assert findings.run_folder() is None


def test_recorded_verdicts_name_the_gpu_and_leave_out_what_it_could_not_judge(tmp_path):
    not_judged = {"id": "accum-neutral-speed", "verdict": "not testable here", "measured": None}
    found = result(lesson="04", machine=H200, judgements=(JUDGED, not_judged))
    results.save(found, tmp_path / "nvidia-h200/04.json")
    (finding,) = findings.recorded_findings(tmp_path)
    assert finding.recorded
    assert finding.machine == "NVIDIA H200"


def run_of(peak_bytes, **changes):
    return run(peak_bytes=peak_bytes, by_category={"weights": peak_bytes}, **changes)


# --- what it says ---------------------------------------------------------------------------------


def test_nothing_is_filled_in(sheet):
    assert not any(sheet.trial.findings.values())
    table = export.verdicts(sheet)
    assert "nothing yet" in table.note
    assert table.rows[-1] == ("all, each once", *"00000", str(len(all_claims())))


def trial_of(**verdicts):
    """A trial in which each claim was judged so on machines 0, 1 and so on."""
    found = dict.fromkeys(all_claims(), ())
    for id, judged in verdicts.items():
        id = id.replace("_", "-")
        found[id] = tuple(
            Finding(id, Verdict(verdict), "found", f"GPU {number}", recorded=True)
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
    for letter, verdicts in counts.items():
        made = [claim for claim in all_claims().values() if letter in claim.sources]
        assert verdicts.total() == len(made)


def test_a_finding_says_under_which_conditions_a_claim_agrees():
    found = next(each for each in gather(own=False).findings["opt8-75"])
    assert found.agrees.startswith("optimizer state: ")
    assert found.differs.startswith("peak: ")


def test_the_page_counts_by_article_and_all_once(sheet):
    judged = replace(sheet, trial=trial_of(bf16_no_scaler="supported supported"))
    rows = export.verdicts(judged).rows
    assert [row[0].split()[0] for row in rows] == ["A", "B", "C", "D", "all,"]
    assert [row[1] for row in rows] == [*"01111"]
    assert "Judged on: GPU 0; GPU 1." in export.verdicts(judged).note


@pytest.fixture
def full(sheet):
    """With a verdict of a machine of a hostile name."""
    here = Finding("amp-accuracy", Verdict.OVERSTATED, EVIL, EVIL, recorded=False)
    return replace(sheet, trial=Trial({**sheet.trial.findings, "amp-accuracy": (here,)}))


def test_the_figures_draw_every_verdict_and_technique(sheet):
    trial = trial_of(ckpt_40="wrong", amp_accuracy="supported")
    figure = pictures.draw_verdict_bars(trial, title="Claims")
    assert_fits(figure)
    assert "A: supported 1, understated 0, depends 0, overstated 0, wrong 1, open 11" in figure.alt
    assert (
        "all, each once: supported 1, understated 0, depends 0, overstated 0, wrong 1" in figure.alt
    )
    assert "13 claims" in [text.get_text() for text in texts(figure)]
    figure = pictures.draw_alone(sheet.rows, "simulated")
    assert_fits(figure)
    sgd = row_of(sheet, "SGD")
    assert f"SGD: peak {percent(-sgd.saved_share)}, bound on a step" in figure.alt
    assert sgd.changes_training
    assert not row_of(sheet, "gradient checkpointing").changes_training
    assert "TorchScript" not in figure.alt


def test_shares_in_words():
    texts = {0.436: "+44 %", -0.038: "−3.8 %", 0.0996: "+10 %", 0.0004: "0.0 %", 5.46: "+546 %"}
    assert {share: percent(share) for share in texts} == texts


# --- what it writes -------------------------------------------------------------------------------


def test_the_page_is_complete_in_itself_and_escapes_names(full, tmp_path):
    text = export.write_page(full, tmp_path / "deep" / "sheet.html").read_text()
    soup = BeautifulSoup(text, "html.parser")
    assert not soup.find_all(["script", "link", "img", "iframe"])
    assert EVIL in soup.get_text()
    assert "url(" not in text
    assert "size: A4 landscape" in text
    for section in export.sections(full):
        assert section.heading in [heading.string for heading in soup.find_all("h2")]
        for line in section.rows:
            assert len(line) == len(section.columns)


def test_markdown_leaves_this_machine_out_and_keeps_its_columns(full):
    text = export.markdown(full)
    assert text.startswith(export.MARKERS[0])
    assert text.endswith(export.MARKERS[1])
    assert EVIL not in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {8}


@pytest.mark.lessons
def test_the_readme_holds_the_table_that_is_made():
    """As `labkit cheat-sheet --markdown` prints it, with the versions that the README names."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    versions = re.search(r"Simulated with (torch [^\n]*?)\.\n", readme)
    made = build(trial=gather(own=False))
    if made.versions != versions[1]:
        pytest.skip(f"README was made with {versions[1]}, this is {made.versions}")
    assert export.markdown(made) in readme


def test_the_readmes_picture_shows_the_order_of_its_table():
    """By its description: both are made from the same figures, at different times."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    described = re.search(r"!\[([^]]*)\]\(docs/adoption\.png\)", readme)[1]
    order = readme[readme.index("| move | peak after it |") :].split("\n\n")[0].splitlines()[2:]
    peaks = [line.split("|")[2].strip() for line in order]
    assert len(peaks) > 3
    assert re.findall(r": ([\d.]+ [GM]iB)", described) == peaks


def test_the_command(tmp_path, capsys, sheet, monkeypatch):
    given = {}

    def fake(job, **options):
        given.update(options, job=job)
        return sheet

    monkeypatch.setattr(sheet_module, "build", fake)
    page = tmp_path / "a.html"
    assert main.main(["cheat-sheet", "--out", str(page), "--gpu", "t4", "--batch-size", "8"]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert given["job"] == CommonJob(gpu="t4", recipe=figures.PLAIN.but(batch_size=8))
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main.main(["cheat-sheet", "--markdown"]) == 0
    assert capsys.readouterr().out == export.markdown(sheet) + "\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--run", "nowhere"], "there is no folder nowhere"),
        (["--gpu", "nothing"], "unknown GPU"),
        (["--precision", "fp16"], "fp16 weights"),
    ],
)
def test_bad_input_is_a_sentence(arguments, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main(["cheat-sheet", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
