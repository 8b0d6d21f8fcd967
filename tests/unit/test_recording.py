"""Recording: what is stored, and what is skipped; what is checked when someone sends it in."""

import json
from types import SimpleNamespace

import pytest
from lesson_files import result, run, write_lesson

from gpumem import files
from gpumem.hardware import this_machine
from gpumem.hardware.this_machine import Machine
from labkit.cli import main
from labkit.course import outcomes, runner
from labkit.course.outcomes import Outcome
from labkit.lesson import results
from labkit.lesson.notebooks import lesson_at
from labkit.recording import recorder
from labkit.recording.accuracy import AccuracyRow, AccuracyTable

HERE = this_machine.machine()
MACHINE = {"kind": HERE.kind, "name": HERE.name, "versions": dict(HERE.versions)}


@pytest.fixture
def places(tmp_path):
    target, work = tmp_path / "results" / "gpu", tmp_path / "work"
    target.mkdir(parents=True)
    work.mkdir()
    return SimpleNamespace(target=target, work=work)


def record(places, lesson, announce=lambda outcome: None, again=False):
    how = {"again": again, "timeout_seconds": 60, "announce": announce}
    return recorder.record_lessons([lesson], HERE, **vars(places), **how)


# --- lessons ------------------------------------------------------------------------------------


@pytest.fixture
def lesson(tmp_path):
    return lesson_at(write_lesson(tmp_path / "course"))


def executed(monkeypatch, found, status="passed"):
    """Stands for `runner.run`; returns what it was called with."""
    calls = []
    monkeypatch.setattr(outcomes, "stored_result", lambda outcome, folder: found)

    def run(lessons, *, folder, on_done, **options):
        calls.append((tuple(lessons), options))
        made = tuple(Outcome(each.number, each.name, "T", status) for each in lessons)
        for outcome in made:
            on_done(outcome)
        return runner.Course(made, folder)

    monkeypatch.setattr(runner, "run", run)
    return calls


def test_a_lesson_is_recorded_then_skipped_then_recorded_again(places, lesson, monkeypatch, capsys):
    found = result(machine=MACHINE)
    calls = executed(monkeypatch, found)
    announced = []
    record(places, lesson, announced.append)
    assert [outcome.name for outcome in announced] == ["06_saving"]
    assert results.load_recorded(places.target / "06.json") == found
    assert calls[0][1]["parameters"] == [("size", "auto")]

    course, elsewhere = record(places, lesson)
    assert (len(calls), course.outcomes, course.passed, elsewhere) == (1, (), True, [])
    assert capsys.readouterr().out == "recorded before  06_saving\n"

    record(places, lesson, again=True)
    assert len(calls) == 2
    (places.target / "06.json").write_text("{")
    record(places, lesson)
    assert "It is recorded again." in capsys.readouterr().out
    assert results.load_recorded(places.target / "06.json") == found


def test_a_lesson_that_failed_or_ran_elsewhere_is_not_recorded(places, lesson, monkeypatch, capsys):
    executed(monkeypatch, result(machine=MACHINE), status="failed")
    record(places, lesson)
    executed(monkeypatch, result())
    _, elsewhere = record(places, lesson)
    assert list(places.target.iterdir()) == []
    assert elsewhere == ["06_saving"]
    assert "it ran on Test CPU" in capsys.readouterr().out


# --- what someone sends in ----------------------------------------------------------------------

GPU = {
    "kind": "cuda",
    "name": "NVIDIA H200",
    "capacity_bytes": 140 << 30,
    "versions": {"driver": "580.1", "cuda": "13.0", "torch": "2.13.0"},
}


def gpu_result(**changes):
    measured = run(mode="measured", device="NVIDIA H200", capacity_bytes=140 << 30)
    return result(**{"machine": GPU, "runs": (measured,)} | changes)


def write(folder, name, record):
    files.write_atomic(folder / name, json.dumps(record.to_dict()))


@pytest.fixture
def sent(tmp_path):
    """The folder of one GPU, as someone sends it in."""
    folder = tmp_path / "results" / "h200"
    machine = {key: GPU[key] for key in ("kind", "name", "versions")}
    table = AccuracyTable(
        (AccuracyRow("4 × 96", 5, None, 6),), Machine(**machine), "2026-01-04T00:00:00+00:00"
    )
    write(folder, "06.json", gpu_result())
    write(folder, "headlines.json", table)
    write(folder, "accuracy.json", table)
    (folder.parent / "README.md").write_text("# Recorded runs\n")
    return folder


def test_a_folder_as_it_was_recorded_is_valid(sent, capsys):
    assert main.main(["record", "--check", str(sent)]) == 0
    assert main.main(["record", "--check", "--out", str(sent.parent)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{sent}: valid"] * 2
    (sent / "notes.txt").write_text("{")
    assert main.main(["record", "--check", str(sent)]) == 1
    assert f"{sent}: notes.txt: " in capsys.readouterr().out
    wrong = sent.rename(sent.with_name("h100"))
    assert "06.json: the folder of 'NVIDIA H200' is called h200" in recorder.problems(wrong)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"machine": {**GPU, "name": "NVIDIA L4"}}, "is called nvidia-l4-140gib"),
        ({"machine": {**GPU, "kind": "cpu"}}, "it was made on 'cpu'"),
        ({"judgements": ({"id": "x", "verdict": "wrong"},)}, "unknown claim"),
        ({"lesson": "07"}, "holds a result of lesson '07'"),
    ],
)
def test_a_recording_that_cannot_be_is_named(sent, changes, says):
    write(sent, "06.json", gpu_result(**changes))
    [problem] = recorder.problems(sent)
    assert says in problem


def test_without_a_recording_there_is_none_to_check(tmp_path, capsys):
    assert main.main(["record", "--check", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"Nothing is recorded in {tmp_path}.\n"
    for arguments in (["--check", "none"], ["--check", "--out", "none"]):
        assert main.main(["record", *arguments]) == 2
        assert "none" in capsys.readouterr().err
