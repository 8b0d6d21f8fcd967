"""The record of a lesson: reading and writing it, what cannot be true, the session it is from."""

import json
import math
import os
import sys
from dataclasses import replace

import pytest
from lesson_files import result, run

from gpumem import files
from gpumem.hardware import this_machine
from gpumem.inputs import InputError
from gpumem.runs import OutOfMemory
from labkit.lesson import claim_cards, claims, colab, results, session
from labkit.lesson.results import Result

HERE = replace(this_machine.machine(), name="Test CPU")


@pytest.fixture
def begun(monkeypatch):
    """A session of lesson 06, ended afterwards."""
    monkeypatch.setattr(this_machine, "machine", lambda: HERE)
    monkeypatch.setattr(colab, "host", lambda machine: None)
    monkeypatch.setattr(claim_cards, "machine_card", lambda machine, for_a_gpu: None)
    session.start("6")
    yield
    session.current.lesson = None
    session.judgements.clear()


def test_a_result_survives_json_which_has_no_nan():
    diverged = run(mode="tracked", losses=(0.1, -math.inf, math.nan))
    parameters = {"batch_size": 8, "sizes": [1, 2], "gpu": None}
    before = result(parameters=parameters, runs=(diverged,))
    after = Result.from_dict(json.loads(json.dumps(before.to_dict(), allow_nan=False)))
    assert repr(after) == repr(before)  # a NaN equals none


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("schema", 2, "schema"),
        ("lesson", "../../etc", "lesson"),
        ("machine", {"kind": "cpu"}, "name"),
        ("machine", {"kind": "cpu", "name": "x", "versions": 1}, "versions"),
        ("parameters", {"f": {"a": 1}}, "parameters"),
        ("parameters", {"f": 10**400}, "parameters"),
        ("runs", [{"name": "x"}], "run"),
        ("judgements", [{"id": "x", "verdict": "suported"}], "suported"),
        ("seconds", math.nan, "seconds"),
        ("date", "yesterday", "date"),
        ("surprise", 1, "'surprise'"),
    ],
)
def test_a_broken_field_is_named(field, value, words):
    with pytest.raises(InputError, match=words):
        Result.from_dict({**result().to_dict(), field: value})


# --- invariants --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peak_bytes": 0, "by_category": {}, "step_peaks_bytes": ()}, "peak is 0 bytes"),
        ({"step_peaks_bytes": (13 << 20,)}, "above the peak of the whole run"),
        ({"reserved_bytes": 1}, "reserved fewer"),
        ({"mode": "measured", "capacity_bytes": 1 << 20}, "above the capacity"),
        ({"losses": (1.0,)}, "neither losses nor seconds"),
        (
            {"oom": OutOfMemory(1, 13 << 20, None, {"weights": 13 << 20}, 1, "forward", "", "")},
            "more bytes were live",
        ),
    ],
)
def test_impossible_runs_are_refused_by_name(changes, words):
    record = result(runs=(run(**changes),)).to_dict()
    with pytest.raises(InputError, match=rf"^run 1 \(baseline\): .*{words}"):
        Result.from_dict(record)


def test_a_verdict_must_follow_from_its_rule():
    claim = next(c for c in claims.all_claims().values() if c.unit == "yes_no" and c.needs == "any")
    sound = session.judgement_record(claims.judge(claim.id, claim.expected))
    assert result(runs=()).broken_invariants() == ["the result holds no runs"]
    assert result(judgements=(sound,)).broken_invariants() == []
    forged = {**sound, "verdict": "overstated"}
    [problem] = result(judgements=(forged,)).broken_invariants()
    assert f"claim {claim.id!r} is recorded as 'overstated'" in problem
    assert "judged twice" in result(judgements=(sound, sound)).broken_invariants()[0]
    [problem] = result(judgements=({**sound, "id": "no-such"},)).broken_invariants()
    assert "no-such" in problem


# --- the session -------------------------------------------------------------------------------


def test_build_takes_lesson_machine_parameters_and_judgements_from_the_session(begun, capsys):
    claim = next(iter(claims.all_claims()))
    session.judgements.append(claims.judge(claim, None))
    built = session.build([run()], batch_size=4)
    assert (built.lesson, built.title) == ("06", "Gradient checkpointing")
    assert built.machine == HERE
    assert built.parameters == {"batch_size": 4}
    assert built.judgements[0]["id"] == claim
    assert built.broken_invariants() == []
    session.result([run()])
    assert f"Lesson 06: 1 run ({run().label}), peak" in capsys.readouterr().out
    failed = OutOfMemory(1, 1 << 20, None, {"weights": 1 << 20}, 1, "forward", "", "")
    session.result([run(oom=failed)])
    assert f"({run().label}); 1 ran out of memory. Verdicts" in capsys.readouterr().out
    session.start("07")
    assert session.judgements == []


def test_one_run_will_do_and_anything_else_is_refused(begun):
    assert session.build(run()).runs == (run(),)
    with pytest.raises(InputError, match="not int"):
        session.build([1])
    with pytest.raises(InputError, match="cannot be stored"):
        session.build([run()], model=object)
    session.current.lesson = None
    with pytest.raises(InputError, match=r"lab\.start"):
        session.build([run()])


@pytest.mark.parametrize("lesson", ["100", "six", "-1", "", "٣"])
def test_a_lesson_is_a_number(lesson):
    with pytest.raises(InputError, match="from 0 to 99"):
        results.lesson_number(lesson)


def test_modules_in_the_lessons_folder_can_be_imported(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = session.folder()
    assert folder == session.folder()
    (folder / "written_by_lesson.py").write_text("answer = 42")
    import written_by_lesson

    assert written_by_lesson.answer == 42
    session.current.temporary_folder.cleanup()
    session.current.temporary_folder = None
    assert not folder.exists()


# --- files -------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "06.json"
    results.save(result(), path)
    assert results.load_recorded(path) == result()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        results.save(result(title="newer"), path)
    assert results.load_recorded(path).title == "Checkpointing"
    assert [p.name for p in path.parent.iterdir()] == ["06.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, '{"schema": 1}', "\udc80"])
def test_a_damaged_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "06.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=r"06\.json"):
        results.load_recorded(path)


def test_missing_and_oversized_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="No such file"):
        results.load_recorded(tmp_path / "06.json")
    results.save(result(), tmp_path / "06.json")
    monkeypatch.setattr(files, "LARGEST_FILE_BYTES", 10)
    with pytest.raises(InputError, match="larger than 10 B"):
        results.load_recorded(tmp_path / "06.json")


def place(folder, gpu, name, found):
    results.save(found, folder / gpu / name)


def test_a_broken_file_or_one_of_another_lesson_is_left_out_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "result_folders", lambda: [tmp_path])
    place(tmp_path, "t4", "06.json", result())
    place(tmp_path, "l4", "06.json", result(lesson="07"))
    place(tmp_path, "l4", "07.json", result(lesson="07"))
    place(tmp_path, "h200", "07.json", result(lesson="07", runs=(run(reserved_bytes=1),)))
    place(tmp_path, "h200", "headlines.json", result())  # of another kind: not looked at
    (tmp_path / "h200" / "06.json").write_text("{")
    with pytest.warns(UserWarning, match="left out") as warned:
        found = results.all_recorded()
    assert {gpu: [each.lesson for each in held] for gpu, held in found.items()} == {
        "l4": ["07"],
        "t4": ["06"],
    }
    texts = " ".join(sorted(str(each.message) for each in warned))
    assert len(warned) == 3
    assert "h200/06.json is not a result we can read" in texts
    assert "holds a result of lesson '07'" in texts
    assert "run 1 (baseline): it reserved fewer" in texts
    with pytest.warns(UserWarning, match="lesson '07'"):
        assert [each.where for each in results.results_of("06")] == ["Test CPU"]


def test_the_first_of_two_folders_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "result_folders", lambda: [tmp_path / "a", tmp_path / "b"])
    place(tmp_path / "a", "t4", "06.json", result(title="first"))
    place(tmp_path / "b", "t4", "06.json", result(title="second"))
    place(tmp_path / "b", "l4", "06.json", result(title="other"))
    assert [each.title for each in results.results_of(6)] == ["other", "first"]
