"""The cheat sheet: its figures, the order of adoption, what it reads, and what it writes."""

import itertools
import json
import re
import tomllib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from lesson_files import result, run

from labkit import (
    cheat_sheet,
    cli,
    headlines,
    results,
    sheet_export,
    sheet_figures,
    sheet_findings,
    sheet_order,
    sheet_questions,
)
from labkit.cheat_sheet import build
from labkit.claim_rules import CLAIMS_FILE, Verdict, all_claims
from labkit.headline_records import Entry, Headline
from labkit.memory import GIB, Category, InputError
from labkit.outcomes import RUN_VARIABLE, Outcome, store
from labkit.results import RESULT_MIME
from labkit.sheet_figures import CommonJob, Figures, row
from labkit.sheet_findings import Finding, Pair
from labkit.sheet_order import order_of_adoption
from labkit.sheet_questions import faq, percent
from labkit.sheet_techniques import TECHNIQUES, Technique

ROOT = Path(__file__).resolve().parents[2]
TINY = CommonJob(model="SmolLM2-tiny", seq_len=256, batch_size=4)
EVIL = "<script>alert('|')</script>"


@pytest.fixture(scope="module")
def sheet(tmp_path_factory):
    nothing = tmp_path_factory.mktemp("nothing")
    return build(TINY, run=nothing, recorded=nothing)


# --- techniques -----------------------------------------------------------------------------------


def test_the_claims_of_techniques_are_claims():
    known = tomllib.loads(CLAIMS_FILE.read_text(encoding="utf-8"))["claims"]
    for technique in TECHNIQUES:
        assert set(technique.claims) <= set(known), technique.name
        assert technique.not_when.endswith(".")
        for id in set(technique.claims) - {"grads-freed-after-step", "inference-int4-1b"}:
            assert known[id]["lesson"] == technique.lesson or known[id]["lesson"] == "16"
    assert len({technique.name for technique in TECHNIQUES}) == len(TECHNIQUES)


def test_every_lesson_of_a_technique_has_a_row():
    assert {t.lesson for t in TECHNIQUES} == {"02", *(f"{n:02}" for n in range(4, 21))}


def test_a_row_says_what_falls_and_by_how_much(sheet):
    before, after = sheet.row("SGD").before, sheet.row("SGD").after
    category, fallen = sheet.row("SGD").part
    assert category is Category.OPTIMIZER
    assert fallen == before.by_category[category] - after.by_category.get(category, 0)
    assert sheet.row("SGD").saved_share == 1 - after.peak_bytes / before.peak_bytes > 0
    assert sum(after.by_category.values()) == after.peak_bytes
    assert sheet.row("gradient checkpointing").part[0] is Category.ACTIVATIONS


def test_figures_are_those_of_an_estimate(sheet):
    from labkit.estimates import estimate

    recipe = TINY.recipe.but(checkpointing=True)
    found = estimate(TINY.model, gpu=TINY.gpu, recipe=recipe)
    figures = sheet.row("gradient checkpointing").after
    assert figures.recipe == recipe
    assert figures.peak_bytes == found.peak_allocated_bytes
    assert figures.fits == found.fits


def test_the_bound_is_arithmetic_or_traffic_and_the_link(sheet):
    plain, card = sheet.plain, TINY.card
    arithmetic = plain.run.flops / (card.bf16_tflops * 1e12 / 2)
    traffic = plain.run.moved_bytes / (card.bandwidth_gb_per_s * 1e9)
    assert plain.seconds == pytest.approx(max(arithmetic, traffic))
    on_host = sheet.row("optimizer on the host")
    crossing = 2 * 4 * sheet_figures._sizes(TINY.model).parameters / 31.5e9
    assert on_host.after.seconds > crossing
    assert sheet.row("sharding over 8 GPUs").slower_share is None


def test_what_a_card_or_a_job_cannot_do_is_said():
    by_name = {technique.name: technique for technique in TECHNIQUES}
    old = row(by_name["BF16 throughout"], replace(TINY, gpu="t4"))
    assert old.after is None
    assert "no bfloat16" in old.refused
    assert row(by_name["mixed precision"], replace(TINY, gpu="t4")).after.recipe.precision == (
        "amp-fp16"
    )
    assert "no halves" in row(by_name["accumulation of two halves"],
                              replace(TINY, batch_size=1)).refused  # fmt: skip
    has = row(by_name["fused attention"], replace(TINY, attention="sdpa"))
    assert has.refused == "the job has it already"
    assert row(by_name["TorchScript"], TINY).after is None
    with pytest.raises(InputError, match="unknown GPU"):
        row(by_name["SGD"], replace(TINY, gpu="nothing"))


# --- the order ------------------------------------------------------------------------------------

PLAIN = CommonJob(model="made up").recipe
_FIELDS = {"a": {"checkpointing": True}, "b": {"chunked_loss": True}, "c": {"attention": "sdpa"},
           "d": {"precision": "amp-bf16"}, "e": {"optimizer": "sgd"}}  # fmt: skip


def technique(name):
    return Technique(name=name, lesson="00", change=lambda r, card: r.but(**_FIELDS[name]),
                     effort="", not_when="Never.")  # fmt: skip


def made_up(monkeypatch, measure):
    """Simulations that ``measure`` makes of the names that are on: peak in GiB, seconds."""

    def simulated(model, gpu, recipe):
        on = {n for n, change in _FIELDS.items() if recipe == recipe.but(**change)}
        peak, seconds = measure(on)
        return Figures(recipe, held(peak * GIB), True, seconds)

    monkeypatch.setattr(sheet_order, "simulated", simulated)
    return order_of_adoption(CommonJob(model="made up"), [technique(n) for n in _FIELDS])


def names(order):
    return [move.name for move in order]


def test_free_moves_come_first_then_bytes_per_second(monkeypatch):
    saved, added = {"a": 10, "b": 6, "c": 1, "d": 2}, {"a": 0.4, "b": 0.1, "c": -0.1, "d": 0}
    order = made_up(monkeypatch, lambda on: (
        40 - sum(saved.get(n, 0) for n in on), 1 + sum(added.get(n, 0) for n in on)))  # fmt: skip
    assert names(order) == ["d", "c", "b", "a"]
    assert [move.saved_bytes for move in order] == [2 * GIB, GIB, 6 * GIB, 10 * GIB]
    assert [move.is_free for move in order] == [True, True, False, False]
    for earlier, later in itertools.pairwise(order):
        assert earlier.after == later.before


def test_what_saves_only_after_another_is_found_then(monkeypatch):
    order = made_up(monkeypatch, lambda on: (
        max(40 - 20 * ("a" in on), 35 - 10 * ("b" in on)), 1 + 0.1 * len(on)))  # fmt: skip
    assert names(order) == ["a", "b"]


def test_two_that_save_nothing_alone_are_one_move(monkeypatch):
    order = made_up(monkeypatch, lambda on: (40 - 15 * ({"c", "d"} <= on), 1 - 0.1 * len(on)))
    assert names(order) == ["c + d"]


def test_what_changes_the_training_comes_last(monkeypatch):
    saved = {"a": 1, "e": 20}
    order = made_up(monkeypatch, lambda on: (40 - sum(saved.get(n, 0) for n in on), 1 + len(on)))
    assert names(order) == ["a", "e"]
    assert [move.changed for move in order] == [False, True]


def test_nothing_that_saves_is_an_empty_order(monkeypatch):
    assert made_up(monkeypatch, lambda on: (40, 1)) == ()


def test_each_move_of_a_real_order_saves(sheet):
    assert sheet.order
    for move in sheet.order:
        assert move.saved_bytes > 0
        assert move.after.recipe.tokens == TINY.recipe.tokens
    changed = [move.changed for move in sheet.order]
    assert changed == sorted(changed)
    peaks = [sheet.plain.peak_bytes, *(move.after.peak_bytes for move in sheet.order)]
    assert peaks == sorted(peaks, reverse=True)


# --- what it reads --------------------------------------------------------------------------------


def judged(verdict, **more):
    return {"id": "amp-accuracy", "says": EVIL, "claimed": "minimal", "unit": "share",
            "sources": ["A"], "verdict": verdict, "measured": 0.001,
            "mode": "trained on a CPU", **more}  # fmt: skip


def a_run(folder, judgement, *, status="passed"):
    """A folder as `labkit run` leaves it, with one lesson."""
    found = result(lesson="04", judgements=(judgement,))
    output = nbformat.v4.new_output("display_data", data={RESULT_MIME: found.to_dict()})
    cell = nbformat.v4.new_code_cell("lab.result(...)", outputs=[output])
    partial = folder / "partial.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), partial)
    store(Outcome("04", "04_mixed_precision", "AMP", status), partial, folder)
    return folder


def test_verdicts_of_this_machine(tmp_path):
    found, broken = sheet_findings.own_findings(a_run(tmp_path, judged("supported")))
    (finding,) = found
    assert (finding.claim, finding.verdict, finding.found) == ("amp-accuracy", "supported", "0.1 %")
    assert finding.source == "04_mixed_precision.ipynb"
    assert not finding.recorded
    assert broken == []


def test_a_failed_lesson_and_a_broken_file_give_no_verdict(tmp_path):
    a_run(tmp_path, judged("supported"), status="failed")
    (tmp_path / "05_bf16.json").write_text("{")
    found, broken = sheet_findings.own_findings(tmp_path)
    assert found == []
    assert len(broken) == 1
    assert "05_bf16.json" in broken[0]


def test_a_claim_that_is_no_longer_made_is_left_out(tmp_path):
    found, _ = sheet_findings.own_findings(a_run(tmp_path, judged("supported", id="gone")))
    assert found == []


def test_the_run_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "PACKAGE", tmp_path / "labkit")
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    assert sheet_findings.run_folder() is None
    (tmp_path / "build/course").mkdir(parents=True)
    a_run(tmp_path / "build/course", judged("supported"))
    assert sheet_findings.run_folder() == Path("build/course")
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path / "elsewhere"))
    assert sheet_findings.run_folder() is None


def recorded_result(folder):
    machine = {"kind": "cuda", "name": "NVIDIA H200", "versions": {"torch": "2.11.0"}}
    found = result(lesson="04", machine=machine, judgements=(judged("supported"),))
    results.save(found, folder / "nvidia-h200/04.json")


def test_recorded_verdicts_name_gpu_versions_date_and_file(tmp_path):
    recorded_result(tmp_path)
    (finding,) = sheet_findings.recorded_findings(tmp_path)
    assert finding.recorded
    assert (finding.where, finding.versions) == ("NVIDIA H200", "torch 2.11.0")
    assert finding.source == "results/nvidia-h200/04.json"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", finding.date)


def held(peak_bytes, **changes):
    return run(peak_bytes=peak_bytes, by_category={"weights": peak_bytes}, **changes)


def recorded_headline(folder, name, seconds):
    job = headlines.HEADLINES[name]
    entries = tuple(
        Entry(label, recipe.but(batch_size=place) if job.largest_batch else recipe,
              held(place * GIB, mode="measured", losses=(1.0,), step_seconds=(seconds,),
                   capacity_bytes=job.budget_bytes),
              held(place * GIB, capacity_bytes=job.budget_bytes))
        for place, (label, recipe) in enumerate(job.recipes, 1)
    )  # fmt: skip
    machine = {"kind": "cuda", "name": "NVIDIA H200", "versions": {"torch": "2.11.0"}}
    made = Headline(job, entries, machine, 1.0, "2026-01-02T03:04:05+00:00")
    path = folder / "nvidia-h200" / job.file
    results.write_atomic(path, json.dumps(made.to_dict()))


def test_runs_that_differ_by_one_technique_are_its_measurement(tmp_path):
    recorded_headline(tmp_path, "t4-batches", 0.5)
    pairs = {pair.technique: pair for pair in sheet_findings.recorded_pairs(tmp_path)}
    assert set(pairs) == {"mixed precision", "fused attention", "gradient checkpointing",
                          "chunked loss", "8-bit optimizer"}  # fmt: skip
    pair = pairs["gradient checkpointing"]
    assert pair.says == "largest batch 3 → 4, tokens/s 3072 → 4096"
    assert pair.source == "results/nvidia-h200/headline-t4-batches.json"
    assert (pair.where, pair.date) == ("NVIDIA H200", "2026-01-02")


# --- what it says ---------------------------------------------------------------------------------


def test_nothing_is_filled_in(sheet):
    assert not any(sheet.findings.values())
    assert any("labkit run" in text for text in sheet.missing)
    assert any("labkit record" in text for text in sheet.missing)
    for line in sheet_export.techniques(sheet).rows:
        assert line[5:8] in {("–", "–", "–"), ("–", "no claim", "no claim")}
    lines = sheet_export.trial(sheet).rows
    assert len(lines) == len(all_claims())
    assert {line[4] for line in lines} == {"not judged"}
    assert all("labkit run" in line[5] for line in lines)


def finding(verdict=Verdict.SUPPORTED, **changes):
    values = {"claim": "amp-accuracy", "verdict": verdict, "found": EVIL, "where": EVIL,
              "mode": EVIL, "date": "2026-01-02", "versions": "torch 2", "source": EVIL,
              "recorded": True, **changes}  # fmt: skip
    return Finding(**values)


@pytest.fixture
def full(sheet):
    """With a verdict of this machine, one of a GPU, and a recorded pair, of hostile names."""
    here = finding(Verdict.OVERSTATED, recorded=False)
    pair = Pair("mixed precision", EVIL, EVIL, "2026-01-02", "torch 2", EVIL)
    rows = [replace(r, recorded=(pair,)) if r.technique.name == "mixed precision" else r
            for r in sheet.rows]  # fmt: skip
    return replace(sheet, rows=tuple(rows),
                   findings={**sheet.findings, "amp-accuracy": (here, finding())})  # fmt: skip


def test_verdicts_stand_beside_the_claim_they_judge(full):
    lines = [line for line in sheet_export.trial(full).rows if "accuracy" in line[0]]
    assert [line[4] for line in lines] == ["overstated", "supported"]
    assert full.counts(recorded=True) == {Verdict.SUPPORTED: 1}
    (line,) = [r for r in sheet_export.techniques(full).rows if "mixed precision" in r[0]]
    assert line[6:8] == ("1 overstated", "1 supported")


def test_every_question_has_an_answer_and_its_source(sheet, full):
    for answer in [*faq(sheet), *faq(full)]:
        assert answer.question.endswith("?")
        assert answer.says.endswith(".")
        assert answer.sources or "not judged yet" in answer.says
    (accuracy,) = [a for a in faq(full) if "accuracy" in a.question]
    assert "overstated" in accuracy.says
    assert "supported" in accuracy.says


def test_a_recorded_headline_takes_the_place_of_its_simulation(sheet, tmp_path):
    recorded_headline(tmp_path, "8b-full-24gb", 0.5)
    known = replace(sheet, headlines=headlines.recorded(tmp_path))
    (answer,) = [a for a in faq(known) if "7B on 24 GB" in a.question]
    assert "measured on NVIDIA H200" in answer.says
    assert "results/nvidia-h200/headline-8b-full-24gb.json" in answer.sources


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.436, "+44 %"), (-0.038, "−3.8 %"), (0.0996, "+10 %"), (0.0004, "0.0 %"), (5.46, "+546 %")],
)
def test_shares_in_words(share, text):
    assert percent(share) == text


# --- what it writes -------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.words = set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attributes)

    def handle_data(self, data):
        self.words += data


def test_the_page_is_complete_in_itself_and_escapes_names(full):
    page = sheet_export.page(full)
    read = Tags(page)
    assert not read.tags & {"script", "link", "img", "iframe"}
    assert EVIL in read.words
    assert "url(" not in page
    assert "size: A4 landscape" in page
    for section in sheet_export.sections(full):
        assert section.heading in read.words
        for line in section.rows:
            assert len(line) == len(section.columns)


def test_a_notebook_shows_a_section_escaped(full):
    section = sheet_export.trial(full)
    assert EVIL not in section._repr_html_()
    assert section.heading in repr(section)


def test_the_pdf_holds_pages_and_a_font(full, tmp_path):
    pytest.importorskip("fpdf")
    path = sheet_export.write_pdf(full, tmp_path / "deep/sheet.pdf")
    content = path.read_bytes()
    assert content.startswith(b"%PDF-")
    assert b"DejaVu" in content
    assert content.count(b"/Type /Page\n") >= 3


def test_a_begin_that_greed_shut_out_is_named(sheet):
    short = replace(sheet, order=sheet.order[:1])
    name, figures = sheet_questions._begun_otherwise(short, short.order)
    assert figures.peak_bytes < short.order[0].after.peak_bytes
    technique, card = sheet.row(name).technique, sheet.job.card
    assert technique.change(figures.recipe, card) == figures.recipe  # it is still on
    for first in short.order[0].techniques:
        assert first.change(figures.recipe, card) == figures.recipe  # and what it allows is, too
    assert f"Begun with {name}, it shrinks" in sheet_questions._all_together(short).says
    assert "Begun with" not in sheet_questions._all_together(sheet).says


def test_without_fpdf_a_sentence_says_what_to_install(full, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fpdf", None)
    with pytest.raises(InputError, match="pip install fpdf2"):
        sheet_export.write_pdf(full, tmp_path / "sheet.pdf")


def test_markdown_leaves_this_machine_out_and_keeps_its_columns(full):
    text = sheet_export.markdown(full)
    assert text.startswith(sheet_export.MARKERS[0])
    assert text.endswith(sheet_export.MARKERS[1])
    assert "verdicts here" not in text
    assert "measured on GPUs" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {10, 8}


@pytest.mark.lessons
def test_the_readme_holds_the_table_that_is_made():
    """As `labkit cheat-sheet --markdown` prints it, with the versions that the README names."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    versions = re.search(r"Simulated with (torch [^\n]*?)\.\n", readme)
    made = build(own=False)
    if made.versions != versions[1]:
        pytest.skip(f"README was made with {versions[1]}, this is {made.versions}")
    assert sheet_export.markdown(made) in readme


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

    monkeypatch.setattr(cheat_sheet, "build", fake)
    page = tmp_path / "a.html"
    assert cli.main(["cheat-sheet", "--out", str(page), "--gpu", "t4", "--batch-size", "8"]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert given["job"] == CommonJob(gpu="t4", batch_size=8)
    assert given["own"]
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert cli.main(["cheat-sheet", "--markdown"]) == 0
    assert capsys.readouterr().out == sheet_export.markdown(sheet) + "\n"
    assert not given["own"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--run", "nowhere"], "there is no folder nowhere"),
        (["--batch-size", "many"], "--batch-size must be a whole number"),
        (["--gpu", "nothing"], "unknown GPU"),
        (["--precision", "fp16"], "fp16 weights"),
        (["--model", "nobody"], "nobody"),
    ],
)
def test_bad_input_is_a_sentence(arguments, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["cheat-sheet", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
