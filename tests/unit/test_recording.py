"""Recording: what is stored, what is skipped, what an interrupted recorder leaves; what is checked
when someone sends recordings in."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from lesson_files import result, run, write_lesson

from gpumem import files
from gpumem.hardware import this_machine
from labkit.cli import main
from labkit.course import outcomes, runner
from labkit.course.outcomes import Outcome
from labkit.lesson import results
from labkit.lesson.notebooks import lesson_at
from labkit.recording import accuracy, recorder
from labkit.recording.accuracy import AccuracyRow, AccuracyTable
from labkit.recording.recorder import FAILED, RECORDED, SKIPPED, Recorder

HERE = this_machine.machine()
MACHINE = {"kind": HERE.kind, "name": HERE.name, "versions": dict(HERE.versions)}
TABLE = AccuracyTable((AccuracyRow("a", 5, 5, 5),), MACHINE, "2026-01-03T00:00:00+00:00")


@pytest.fixture
def places(tmp_path):
    target, work = tmp_path / "results" / "gpu", tmp_path / "work"
    target.mkdir(parents=True)
    work.mkdir()
    return SimpleNamespace(target=target, work=work)


def new_recorder(places, **options):
    return Recorder(places.target, places.work, HERE, **options)


def process(places, found, code=0, why=""):
    """Stands for `run_process`: the process writes ``found``."""

    def run_process(command, log, timeout_seconds):
        if found is not None:
            option, _, folder = command[-3:]
            name = {"--gpu": "accuracy.json", "--headlines": "headlines.json"}[option]
            path = Path(folder, "gpu", name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(found if isinstance(found, str) else json.dumps(found.to_dict()))
        return code, why

    return run_process


def never(*arguments, **options):
    raise AssertionError("it was measured again")


# --- the accuracy matrix ------------------------------------------------------------------------


def test_a_table_is_recorded_then_skipped_then_recorded_again(places, monkeypatch, capsys):
    path = places.target / "headlines.json"
    path.write_text("{")
    monkeypatch.setattr(recorder, "run_process", process(places, TABLE))
    assert new_recorder(places).accuracy("headlines.json") == RECORDED
    assert accuracy.load(path) == TABLE
    assert "It is recorded again." in capsys.readouterr().out

    monkeypatch.setattr(recorder, "run_process", never)
    assert new_recorder(places).accuracy("headlines.json") == SKIPPED
    monkeypatch.setattr(results, "result_folders", lambda: [places.target.parent])
    assert accuracy.recorded_tables("headlines.json") == {"gpu": TABLE}

    newer = replace(TABLE, date="2026-01-04T00:00:00+00:00")
    monkeypatch.setattr(recorder, "run_process", process(places, newer))
    assert new_recorder(places, again=True).accuracy("headlines.json") == RECORDED
    assert accuracy.load(path) == newer


@pytest.mark.parametrize(
    ("found", "code", "why", "words"),
    [
        (None, 2, "it needs more memory", "accuracy: it needs more memory"),
        (None, None, "stopped after 5 seconds", "stopped after 5 seconds"),
        (None, 0, "", "accuracy: cannot read"),
        ("{", 0, "", "is not an accuracy table"),
        (replace(TABLE, machine={"kind": "cpu", "name": "X"}), 0, "", "it ran on X"),
    ],
)
def test_what_failed_is_named_and_leaves_the_earlier_record(
    places, monkeypatch, capsys, found, code, why, words
):
    path = places.target / "accuracy.json"
    path.write_text(json.dumps(TABLE.to_dict()))
    monkeypatch.setattr(recorder, "run_process", process(places, found, code, why))
    assert new_recorder(places, again=True).accuracy() == FAILED
    assert words in capsys.readouterr().out
    assert accuracy.load(path) == TABLE
    assert list(places.target.iterdir()) == [path]


def test_a_process_is_run_with_its_output_in_a_file_and_stopped_in_time(tmp_path):
    log = tmp_path / "it.log"

    def run_code(code, seconds=60.0):
        return recorder.run_process([sys.executable, "-c", code], log, seconds)

    assert run_code("import gpumem.inputs") == (0, "ended with code 0: it wrote nothing")
    failed = "print('one'); raise SystemExit('because')"
    assert run_code(failed) == (1, "ended with code 1: because")
    assert log.read_text() == "one\nbecause\n"
    code, why = run_code("import time; time.sleep(600)", seconds=1.0)
    assert (code, "stopped after 1 seconds" in why) == (None, True)


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
    new_recorder(places).lessons([lesson], announced.append)
    assert [outcome.name for outcome in announced] == ["06_saving"]
    assert results.load(places.target / "06.json") == found
    assert calls[0][1]["parameters"] == [("size", "auto")]

    course = new_recorder(places).lessons([lesson], announced.append)
    assert (len(calls), course.outcomes, course.passed) == (1, (), True)
    assert capsys.readouterr().out == "recorded before  06_saving\n"

    new_recorder(places, again=True).lessons([lesson], announced.append)
    assert len(calls) == 2


def test_a_lesson_that_failed_or_ran_elsewhere_is_not_recorded(places, lesson, monkeypatch, capsys):
    executed(monkeypatch, result(machine=MACHINE), status="failed")
    new_recorder(places).lessons([lesson], lambda outcome: None)
    executed(monkeypatch, result())
    one = new_recorder(places)
    one.lessons([lesson], lambda outcome: None)
    assert list(places.target.iterdir()) == []
    assert one.ran_elsewhere == ["06_saving"]
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
        (AccuracyRow("4 × 96", 5, None, 6),), machine, "2026-01-04T00:00:00+00:00"
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
