"""The tracker and the simulation against PyTorch's own allocator, set-up by set-up; the tables."""

import gc
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import labkit as lab
from benchmarks import accuracy, answering, peers
from benchmarks.accuracy import SETUPS_GROUP, AccuracyRow, markdown, summary, table
from benchmarks.setups import GPU_RECIPES, SETUPS, SMALL_RECIPES, tiny_config
from gpumem.estimation.recipe import ATTENTIONS, OFFLOADS, OPTIMIZERS, QUANTIZATIONS, Recipe
from gpumem.fake_cuda.fake_tensors import fake_tensors
from gpumem.hardware import catalogue, this_machine
from gpumem.inputs import PRECISIONS, InputError
from gpumem.measurement import allocator_peak, cpu_record
from gpumem.tracker import track
from gpumem.units import MIB
from labkit.recording import recorder
from labkit.recording.accuracy import AccuracyTable, recorded_tables
from labkit.recording.accuracy import load as read_back

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
# Its kernels' workspaces are not tensors; the tracker's docstring says so.
WORKSPACES = {"convolutions"}


def tracked(name: str, *, fake: bool):
    gc.collect()
    with fake_tensors(None) if fake else nullcontext(), track(work=True) as tracker:
        for _ in SETUPS[name](CPU):
            pass
    return tracker.trace()


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.slow
def test_tracked_simulated_and_allocated_agree(name):
    real = tracked(name, fake=False)
    fake = tracked(name, fake=True)
    gc.collect()
    with cpu_record() as record:
        for _ in SETUPS[name](CPU):
            pass
    truth = allocator_peak(record)
    peak = real.peak()
    assert sum(peak.by_category.values()) == peak.total_bytes
    assert peak.total_bytes == pytest.approx(truth, rel=0.02 if name in WORKSPACES else 0.005)
    if name in WORKSPACES:
        assert peak.total_bytes < truth
    assert fake.peak_bytes == pytest.approx(peak.total_bytes, rel=0.005)
    assert fake.flops == real.flops > 0


# --- the recipes of the benchmark ---------------------------------------------------------------


@pytest.mark.parametrize("recipes", [SMALL_RECIPES, GPU_RECIPES], ids=["small", "gpu"])
def test_the_matrix_uses_every_technique(recipes):
    assert len(recipes) >= 24
    chosen = [recipe for _, recipe in recipes.values()]
    assert len(set(recipes.values())) == len(recipes)
    assert {r.precision for r in chosen} == set(PRECISIONS)
    assert {r.optimizer for r in chosen} == set(OPTIMIZERS)
    assert {r.attention for r in chosen} == set(ATTENTIONS)
    assert {r.offload for r in chosen} == set(OFFLOADS)
    assert {r.quantize for r in chosen} == {None, *QUANTIZATIONS}
    for name in ("checkpointing", "optimizer_in_backward", "chunked_loss"):
        assert {getattr(r, name) for r in chosen} == {False, True}
    assert {r.accumulate > 1 for r in chosen} == {False, True}
    assert {r.lora is None for r in chosen} == {False, True}
    assert len({r.batch_size for r in chosen}) >= 3


def test_a_recipe_that_fails_on_the_gpu_costs_only_its_own_row(monkeypatch, capsys):
    first, second, third = list(GPU_RECIPES)[:3]
    good = AccuracyRow(third, 10, 10, 10)

    def on_gpu(name, model, recipe, card, *, track):
        if name == first:
            raise RuntimeError("CUDA error: no kernel image")
        if name == second:
            raise InputError("not on this card")
        return good

    monkeypatch.setattr(accuracy, "on_gpu", on_gpu)
    monkeypatch.setattr(accuracy, "this_gpu", lambda: catalogue.gpu("h200"))
    monkeypatch.setattr(accuracy, "GPU_RECIPES", dict(list(GPU_RECIPES.items())[:3]))
    rows = list(accuracy.large_rows(""))
    assert rows == [
        AccuracyRow(first, None, None, None),
        AccuracyRow(second, None, None, None),
        good,
    ]
    said = capsys.readouterr().err
    assert f"{first} failed: RuntimeError: CUDA error: no kernel image" in said
    assert f"{second}: not on this card" in said


def test_on_a_gpu_the_estimate_is_held_to_the_measured_steps(monkeypatch):
    recipe, card = Recipe(batch_size=2, seq_len=32), catalogue.gpu("h200")
    measured = lab.measure(lab.training(tiny_config(), recipe))
    truth = {"reserved_bytes": 100 * MIB, "step_peaks_bytes": (60 * MIB, 90 * MIB)}

    limits = []

    def measure(experiment, *, steps=4, track=True):
        limits.append(this_machine.current_budget_bytes())
        return measured if track else replace(measured, trace=None, **truth)

    monkeypatch.setattr(lab, "measure", measure)
    row = accuracy.on_gpu("it", tiny_config(), recipe, card)
    found = lab.estimate(tiny_config(), gpu=card, recipe=recipe)
    peaks = 90 * MIB, measured.trace.peak_bytes, found.peak_allocated_bytes
    assert row == AccuracyRow("it", *peaks, 100 * MIB, found.peak_reserved_bytes)
    row = accuracy.on_gpu("it", tiny_config(), recipe, card, 128 * MIB, track=False)
    assert row == AccuracyRow("it", peaks[0], None, peaks[2], 100 * MIB, found.peak_reserved_bytes)
    assert limits == [None, None, 128 * MIB]


# --- its tables ---------------------------------------------------------------------------------

ROWS = [
    AccuracyRow("one", 1000 * MIB, 999 * MIB, 1001 * MIB, 2000 * MIB, 1990 * MIB),
    AccuracyRow("two", 1000 * MIB, 1000 * MIB, 970 * MIB, 1000 * MIB, 1000 * MIB),
    AccuracyRow("large", None, None, 5000 * MIB, None, 5000 * MIB),
    AccuracyRow("convolutions", 100 * MIB, 98 * MIB, 98 * MIB, group=SETUPS_GROUP),
]


def test_errors_are_signed_and_their_sizes_are_summed_up():
    assert ROWS[0].errors() == pytest.approx({"simulated": 0.1, "tracked": -0.1, "reserved": -0.5})
    assert set(ROWS[2].errors().values()) == {None}
    figures = summary(ROWS[:3])
    assert figures["median"] == pytest.approx(
        {"simulated": 1.55, "tracked": 0.05, "reserved": 0.25}
    )
    assert figures["maximum"] == pytest.approx({"simulated": 3.0, "tracked": 0.1, "reserved": 0.5})
    assert summary(ROWS[3:])["maximum"]["reserved"] is None
    rows = [AccuracyRow(str(n), 1000, None, 1000 - n) for n in range(1, 41)]
    assert summary(rows)["95th percentile"]["simulated"] == pytest.approx(3.8)


def test_the_table_names_groups_errors_and_causes():
    lines = table(ROWS).splitlines()
    one = next(line for line in lines if line.startswith("one "))
    assert " ".join(one.split()[1:]) == "1000 MiB +0.100 % -0.100 % 1.95 GiB -0.500 %"
    assert any(line.startswith("large") and "no fit" in line for line in lines)
    assert sum(line.startswith("median") for line in lines) == 2  # a summary of each group
    beyond = [line for line in lines if line.startswith("beyond")]
    assert len(beyond) == 2
    assert "two (simulated -3.000 %): cause not known yet" in beyond[0]
    assert "convolutions" in beyond[1]
    assert "workspaces" in beyond[1]


def test_markdown_stands_between_its_markers():
    lines = markdown(ROWS, "NVIDIA X, torch 2.13, 2026-11-21").splitlines()
    assert (lines[0], lines[-1]) == accuracy.MARKERS
    assert lines[1] == "NVIDIA X, torch 2.13, 2026-11-21."
    assert lines[3] == "| recipe | allocated | simulated | reserved | simulated |"
    assert "| one | 1000 MiB | +0.100 % | 1.95 GiB | -0.500 % |" in lines
    assert "| large | no fit | – | – | – |" in lines
    assert not any(line.startswith("| convolutions") for line in lines)
    text = "\n".join(lines)
    assert "3 recipes, allocated: median 1.550 %" in text
    assert "3 recipes, reserved: median 0.250 %" in text
    assert "1 set-ups, allocated: median 2.000 %" in text
    rows = [replace(row, reserved_bytes=None, simulated_reserved_bytes=None) for row in ROWS]
    assert "reserved" not in markdown(rows, "CPU")


def test_the_stored_table_reads_back(tmp_path):
    path = accuracy.store(ROWS, tmp_path)
    record = json.loads(path.read_text())
    assert [AccuracyRow(**row) for row in record["rows"]] == ROWS
    assert read_back(path).rows == tuple(ROWS)
    assert record["schema"] == AccuracyTable.schema


def test_the_page_shows_what_gpus_and_phantoms_recorded(capsys):
    assert accuracy.main(["--recorded"]) == 0
    page = (ROOT / "docs" / "ACCURACY.md").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    for shown in (accuracy.recorded_table(), accuracy.headlines_table()):
        assert shown in page
        assert shown in printed


def test_the_readmes_sentences_and_the_pages_are_what_was_recorded():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    page = " ".join((ROOT / "docs" / "ACCURACY.md").read_text(encoding="utf-8").split())
    tables = recorded_tables()
    rows = tables.pop("h200").rows
    allocated = sum(row.truth_bytes == row.simulated_bytes for row in rows)
    reserved = sum(row.reserved_bytes == row.simulated_reserved_bytes for row in rows)
    worst = summary(rows)["maximum"]
    assert worst["simulated"] < 1
    assert worst["reserved"] < 1.2
    said = "all allocate what was simulated within 1 %, and reserve it within 1.2 %"
    assert f"An H200 ran {len(rows)} recipes: {said}." in readme
    assert f"An H200 ran {len(rows)} recipes" in page
    assert (
        f"{allocated} of them allocate what the GPU did to the byte, and {reserved} reserve it"
        in page
    )
    phantoms = [row for table in tables.values() for row in table.rows if row.truth_bytes]
    worst = summary(phantoms)["maximum"]
    assert worst["simulated"] < 0.01
    assert worst["reserved"] < 0.4
    assert {len(table.rows) for table in tables.values()} == {65}
    missing = sum(row.truth_bytes is None for row in tables["phantom/t4"].rows)
    assert f"{missing} recipes are refused there or do not fit" in page


def test_a_phantoms_table_lies_apart(tmp_path, monkeypatch):
    here = replace(this_machine.machine(), kind="cuda", name="NVIDIA T4", phantom=True)
    monkeypatch.setattr(this_machine, "machine", lambda: here)
    path = accuracy.store(ROWS, tmp_path)
    assert path == tmp_path / "phantom" / "t4" / "accuracy.json"
    assert read_back(path).machine.phantom
    assert recorder.problems(path.parent) == []
    monkeypatch.setattr("labkit.lesson.results.result_folders", lambda: [tmp_path])
    assert list(recorded_tables()) == ["phantom/t4"]
    path.parent.rename(tmp_path / "t4")
    assert "belongs into results/phantom" in recorder.problems(tmp_path / "t4")[0]


def test_the_command_line(capsys, tmp_path):
    assert accuracy.main(["--only", "nothing like it"]) == 2
    assert "nothing is named like" in capsys.readouterr().err
    assert accuracy.main(["--only", "views", "--out", str(tmp_path)]) == 0
    assert "views and slices" in capsys.readouterr().out
    assert list(tmp_path.glob("*/accuracy.json"))
    if not this_machine.machine().can_measure:
        assert accuracy.main(["--gpu"]) == 2
        assert "need a CUDA machine" in capsys.readouterr().err


def test_the_page_says_what_other_tools_answered():
    answers = json.loads(peers.RECORD.read_text(encoding="utf-8"))
    names = {job.name for job in peers.jobs()}
    assert len(names) == 60
    assert all(found.keys() <= names for found in answers.values())
    ours = answers[peers.OURS]
    assert ours == {job.name: job.ours_bytes for job in peers.jobs()}
    assert len(answers["PyTorch's MemTracker"]) == 2, "the page says: about the first two only"
    assert peers.table(answers) in peers.PAGE.read_text(encoding="utf-8")


def test_answers_beside_published_runs_are_those_of_the_record():
    answers = json.loads(answering.RECORD.read_text(encoding="utf-8"))
    assert answering.table(answers) in answering.PAGE.read_text(encoding="utf-8")
    current = [run for run in answering.RUNS if not (run.old_cache or run.quantize)]
    for run in current:  # libraries of then that do what those of today do
        answer = answering.Answer(*answers[answering.OURS][run.name])
        assert answer.allocated_bytes == pytest.approx(run.allocated_bytes, rel=4e-4)
    assert len(current) == 3
