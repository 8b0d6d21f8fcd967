import contextlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lesson_files import MACHINE, result, run

from labkit import (
    claims,
    cli,
    hardware,
    hosted,
    recorded_check,
    recorded_table,
    results,
    session,
    sheet_export,
)
from labkit.accuracy import AccuracyTable, Row
from labkit.headline_records import Entry, Headline, Job
from labkit.memory import InputError, OutOfMemory
from labkit.recipes import Recipe
from labkit.register import Register, digest_of
from labkit.results import Result
from labkit.show import cards


@pytest.fixture
def begun(monkeypatch):
    """A session of lesson 06, ended afterwards."""
    monkeypatch.setattr(hardware, "machine", lambda: MACHINE)
    monkeypatch.setattr(hosted, "host", lambda machine: None)
    monkeypatch.setattr(cards, "machine_card", lambda machine, for_a_gpu: None)
    session.start("6", title="Checkpointing")
    yield
    session.current.lesson = None
    claims.session.clear()


def test_a_result_survives_the_way_through_json():
    before = result(parameters={"batch_size": 8, "sizes": [1, 2], "gpu": None})
    assert Result.from_dict(json.loads(json.dumps(before.to_dict()))) == before


@given(st.lists(st.floats(), max_size=4))
def test_losses_of_any_value_survive_json_that_has_no_nan(losses):
    before = result(runs=(run(mode="tracked", losses=tuple(losses)),))
    text = json.dumps(before.to_dict(), allow_nan=False)
    after = Result.from_dict(json.loads(text)).runs[0].losses
    assert len(after) == len(losses)
    for a, b in zip(after, losses, strict=True):
        assert a == b or (math.isnan(a) and math.isnan(b))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("schema", 2, "schema 2 is not 1"),
        ("schema", True, "schema True is not 1"),
        ("lesson", "6", "two digits"),
        ("lesson", "../../etc", "two digits"),
        ("title", "x" * 201, "title"),
        ("machine", {"kind": "cpu"}, "'name'"),
        ("machine", None, "machine"),
        ("parameters", {"f": {"a": 1}}, "parameter 'f'"),
        ("runs", "none", "runs must be a list"),
        ("runs", [{"name": "x"}], "needs the field"),
        ("judgements", [{"id": "x"}], "'verdict'"),
        ("judgements", [{"id": "x", "verdict": "suported"}], "Did you mean 'supported'"),
        ("seconds", math.nan, "seconds"),
        ("seconds", -1, "seconds"),
        ("date", "yesterday", "ISO 8601"),
        ("date", 5, "ISO 8601"),
    ],
)
def test_a_broken_field_is_named(field, value, words):
    with pytest.raises(InputError, match=words):
        Result.from_dict({**result().to_dict(), field: value})


def test_a_hostile_value_is_quoted_in_short():
    for field in ("parameters", "date", "seconds", "lesson", "schema"):
        value = {"x" * 10**6: ["y" * 10**6, {}]} if field == "parameters" else "9" * 10**6
        with pytest.raises(InputError) as caught:
            Result.from_dict({**result().to_dict(), field: value})
        assert len(str(caught.value)) < 300


def test_a_judgement_says_in_words_where_it_comes_from():
    claim = next(c for c in claims.all_claims().values() if c.needs == "gpu")
    sound = session.judgement_record(claims.judge(claim.id, None))
    record = result(judgements=(sound,)).to_dict()
    assert Result.from_dict(record).broken_invariants() == []
    record["judgements"] = [{**sound, "mode": 5}]
    with pytest.raises(InputError, match="mode must be a text"):
        Result.from_dict(record)


def test_missing_and_unknown_fields_are_named():
    record = result().to_dict()
    with pytest.raises(InputError, match="'surprise'"):
        Result.from_dict({**record, "surprise": 1})
    del record["date"]
    with pytest.raises(InputError, match="'date'"):
        Result.from_dict(record)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(result().to_dict())), json_values)
def test_any_json_in_a_field_is_read_or_refused_never_a_crash(field, value):
    with contextlib.suppress(InputError):
        Result.from_dict({**result().to_dict(), field: value})


# --- invariants --------------------------------------------------------------------------------


def test_a_sound_result_breaks_nothing():
    assert result().broken_invariants() == []


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
def test_impossible_runs_are_named(changes, words):
    [problem] = result(runs=(run(**changes),)).broken_invariants()
    assert words in problem
    assert problem.startswith("run 1 (baseline)")


def test_a_result_without_runs_is_noticed():
    assert result(runs=()).broken_invariants() == ["the result holds no runs"]


def test_a_verdict_must_follow_from_its_rule():
    claim = next(c for c in claims.all_claims().values() if c.unit == "yes_no" and c.needs == "any")
    sound = session.judgement_record(claims.judge(claim.id, claim.expected))
    assert result(judgements=(sound,)).broken_invariants() == []
    forged = {**sound, "verdict": "overstated"}
    [problem] = result(judgements=(forged,)).broken_invariants()
    assert f"claim {claim.id!r} is recorded as 'overstated'" in problem
    assert "judged twice" in result(judgements=(sound, sound)).broken_invariants()[0]
    [problem] = result(judgements=({**sound, "id": "no-such"},)).broken_invariants()
    assert "no-such" in problem


# --- the session -------------------------------------------------------------------------------


def test_build_takes_lesson_machine_parameters_and_judgements_from_the_session(begun):
    claim = next(iter(claims.all_claims()))
    claims.session.append(claims.judge(claim, None))
    built = session.build([run()], batch_size=4)
    assert (built.lesson, built.title, built.machine) == ("06", "Checkpointing", MACHINE)
    assert built.parameters == {"batch_size": 4}
    assert built.judgements[0]["id"] == claim
    assert built.broken_invariants() == []


def test_one_run_will_do_and_anything_else_is_refused(begun):
    assert session.build(run()).runs == (run(),)
    with pytest.raises(InputError, match="not int"):
        session.build([1])
    with pytest.raises(InputError, match="cannot be stored"):
        session.build([run()], model=object)


def test_a_result_needs_a_lesson_that_was_started():
    with pytest.raises(InputError, match=r"lab\.start"):
        session.build([run()])


def test_start_forgets_the_judgements_of_the_lesson_before(begun):
    claims.session.append(claims.judge(next(iter(claims.all_claims())), None))
    session.start("07")
    assert claims.session == []
    assert session.current.title


@pytest.mark.parametrize("lesson", ["100", "six", "-1", "", "٣"])
def test_a_lesson_is_a_number(lesson):
    with pytest.raises(InputError, match="from 0 to 99"):
        results.lesson_number(lesson)


def test_outside_a_notebook_the_result_is_printed(begun, capsys):
    session.result([run()])
    assert "Lesson 06: 1 runs on Test CPU" in capsys.readouterr().out


# --- files -------------------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    path = tmp_path / "deep" / "06.json"
    results.save(result(), path)
    assert results.load(path) == result()
    assert [p.name for p in path.parent.iterdir()] == ["06.json"]


def test_a_full_disk_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "06.json"
    results.save(result(), path)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        results.save(result(title="newer"), path)
    assert results.load(path).title == "Checkpointing"
    assert [p.name for p in tmp_path.iterdir()] == ["06.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, '{"schema": 1}', "\udc80"])
def test_a_damaged_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "06.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match=r"06\.json"):
        results.load(path)


def test_missing_and_oversized_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="No such file"):
        results.load(tmp_path / "06.json")
    results.save(result(), tmp_path / "06.json")
    monkeypatch.setattr(results, "LARGEST_FILE_BYTES", 10)
    with pytest.raises(InputError, match="larger than 10 B"):
        results.load(tmp_path / "06.json")


def test_recorded_reads_every_gpu_and_skips_a_broken_file_with_a_warning(tmp_path):
    for gpu in ("t4", "a100-40"):
        machine = {**MACHINE, "name": gpu}
        results.save(replace(result(), machine=machine), tmp_path / gpu / "06.json")
    (tmp_path / "l4").mkdir()
    (tmp_path / "l4" / "06.json").write_text("{")
    with pytest.warns(UserWarning, match=r"l4.06\.json"):
        found = results.recorded("6", folder=tmp_path)
    assert [r.where for r in found] == ["a100-40", "t4"]
    assert results.recorded("07", folder=tmp_path) == []


def place(folder, gpu, name, found):
    results.save(found, folder / gpu / name)


def test_a_file_of_another_or_no_lesson_or_of_an_impossible_run_is_named(tmp_path):
    place(tmp_path, "t4", "06.json", result())
    place(tmp_path, "t4", "77.json", result(lesson="77"))
    place(tmp_path, "l4", "06.json", result(lesson="07"))
    place(tmp_path, "l4", "07.json", result(lesson="07"))
    place(tmp_path, "h200", "07.json", result(lesson="07", runs=(run(reserved_bytes=1),)))
    place(tmp_path, "h200", "headline-stack.json", result())  # of another kind: not looked at
    with pytest.warns(UserWarning, match="left out") as warned:
        found = results.all_recorded(tmp_path)
    assert {gpu: [each.lesson for each in held] for gpu, held in found.items()} == {
        "t4": ["06"], "l4": ["07"]}  # fmt: skip
    texts = " ".join(sorted(str(each.message) for each in warned))
    assert len(warned) == 3
    assert "the course has no lesson '77'" in texts
    assert "holds a result of lesson '07'" in texts
    assert "run 1 (baseline): it reserved fewer" in texts
    with pytest.warns(UserWarning, match="lesson '07'"):
        assert [each.where for each in results.recorded("06", folder=tmp_path)] == ["Test CPU"]
    with pytest.warns(UserWarning, match="no lesson '77'"):
        assert results.recorded(77, folder=tmp_path) == []


def test_the_first_of_two_folders_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "result_folders", lambda: [tmp_path / "a", tmp_path / "b"])
    place(tmp_path / "a", "t4", "06.json", result(title="first"))
    place(tmp_path / "b", "t4", "06.json", result(title="second"))
    place(tmp_path / "b", "l4", "06.json", result(title="other"))
    assert [each.title for each in results.recorded(6)] == ["other", "first"]
    assert {gpu: [each.title for each in held] for gpu, held in results.all_recorded().items()} == {
        "l4": ["other"], "t4": ["first"]}  # fmt: skip


def test_the_lessons_of_the_course_are_known():
    assert {"00", "06", "22"} <= results.known_lessons()
    assert "77" not in results.known_lessons()


# --- what people send in -------------------------------------------------------------------------

GPU = {"kind": "cuda", "name": "NVIDIA H200", "capacity_bytes": 140 << 30,
       "versions": {"driver": "580.1", "cuda": "13.0", "torch": "2.13.0",
                    "transformers": "5.23.0", "bitsandbytes": "0.50.2"}}  # fmt: skip


def gpu_result(**changes):
    measured = run(mode="measured", device="NVIDIA H200", capacity_bytes=140 << 30)
    return result(**{"machine": GPU, "runs": (measured,)} | changes)


def gpu_headline():
    recipe = Recipe(batch_size=2, seq_len=32, optimizer="sgd")
    one = Job(name="stack", shows="all", model="SmolLM2-135M", recipes=(("plain", recipe),))
    real = run(mode="measured", losses=(3.0, 2.0), step_seconds=(0.5,))
    return Headline(one, (Entry("plain", recipe, real, run()),), GPU, 12.5,
                    "2026-01-03T00:00:00+00:00")  # fmt: skip


def gpu_table():
    machine = {key: GPU[key] for key in ("kind", "name", "versions")}
    return AccuracyTable((Row("4 × 96", 100 << 20, None, 101 << 20),), machine,
                         "2026-01-04T00:00:00+00:00")  # fmt: skip


def write_record(folder, name, record):
    """As a recorder does: the file, then its line in the register."""
    text = json.dumps(record if isinstance(record, dict) else record.to_dict(), indent=1)
    results.write_atomic(folder / name, text)
    Register(folder).note(name, digest_of(name))


@pytest.fixture
def sent(tmp_path):
    """The folder of one GPU, as somebody sends it in."""
    folder = tmp_path / "results" / "h200"
    write_record(folder, "06.json", gpu_result())
    write_record(folder, "headline-stack.json", gpu_headline())
    write_record(folder, "accuracy.json", gpu_table())
    (folder.parent / "README.md").write_text("# Recorded runs\n")
    return folder


def test_what_the_course_has_recorded_is_sound():
    found = recorded_check.all_problems(Path(results.PACKAGE.parent, "results"))
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def test_a_folder_as_it_was_recorded_is_sound(sent, capsys):
    assert recorded_check.problems(sent) == []
    assert cli.main(["record", "--check", str(sent)]) == 0
    assert cli.main(["record", "--check", "--out", str(sent.parent)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{sent}: sound", "h200: sound"]


def link(folder):
    (folder / "07.json").symlink_to("06.json")


def too_large(folder):
    path = folder / "06.json"
    path.write_text(path.read_text() + " " * recorded_check.LARGEST_RECORD_BYTES)


def changed(folder):
    path = folder / "06.json"
    path.write_text(path.read_text().replace(str(12 << 20), str(12 << 19)))


def unregistered(folder):
    (folder / "07.json").write_text(json.dumps(gpu_result(lesson="07").to_dict()))


def gone(folder):
    (folder / "06.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "notes.txt").write_text("hello"), "'notes.txt' is not of those that"),
        (lambda f: (f / "77.json").write_text("{}"), "'77.json' is not of those that"),
        (lambda f: (f / "more").mkdir(), "'more' is no plain file"),
        (lambda f: (f / ".recording.lock").write_text("1"), "a recording goes on"),
        (lambda f: (f / "recording.json").write_text("{"), "recording.json cannot be read"),
        (link, "'07.json' is no plain file"),
        (too_large, "06.json is larger than 1.00 MiB"),
        (changed, "06.json was changed after it was recorded"),
        (unregistered, "07.json is not in recording.json"),
        (gone, "'06.json' is in recording.json, and is not here"),
    ],
)
def test_a_file_that_no_recorder_leaves_is_named(sent, spoil, says, capsys):
    spoil(sent)
    assert says in " ".join(recorded_check.problems(sent))
    assert cli.main(["record", "--check", str(sent)]) == 1
    assert says in capsys.readouterr().out


def with_text(text):
    return gpu_result(machine={**GPU, "note": text})


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (gpu_result(machine={**GPU, "name": "NVIDIA L4"}), "several GPUs: 'NVIDIA H200'"),
        (gpu_result(machine={**GPU, "kind": "cpu"}), "it was made on 'cpu'"),
        (gpu_result(date="2999-01-01T00:00:00"), "its date 2999-01-01T00:00:00 is still to come"),
        (gpu_result(date="0001-01-01T00:00:00+14:00"), None),  # no crash on the way to UTC
        (gpu_result(runs=(run(mode="measured", peak_bytes=200 << 30,
                              by_category={"weights": 200 << 30}),)),
         "it measured 200 GiB on a GPU of 140 GiB"),
        (gpu_result(runs=(run(reserved_bytes=1),)), "it reserved fewer bytes than it allocated"),
        (gpu_result(judgements=({"id": "no-such", "verdict": "wrong", "measured": 1},)), "no-such"),
        (gpu_result(lesson="07"), "holds a result of lesson '07'"),
        (with_text("<img src=x onerror=go()>"), "looks like markup"),
        (with_text("Java\u202egpj.exe"), "characters that cannot be seen"),
        (with_text("\x1b]0;owned\x07"), "characters that cannot be seen"),
        (with_text("x" * 3000), "longer than 2000 characters"),
        ({"schema": 1}, "needs the field"),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_is_named(sent, record, says):
    write_record(sent, "06.json", record)
    found = recorded_check.problems(sent)
    assert (not found) if says is None else any(says in problem for problem in found)
    assert all(len(problem) < 3000 for problem in found)  # one lists all claims that there are


def test_a_folder_has_the_name_of_its_gpu(sent):
    wrong = sent.rename(sent.with_name("h100"))
    assert recorded_check.problems(wrong) == [
        "the folder of 'NVIDIA H200' is called h200, not h100"]  # fmt: skip


def test_a_text_as_deep_as_python_reads_is_looked_at(sent):
    deep = "<script>"
    for _ in range(400):
        deep = [deep]
    judgement = {"id": "no-such", "verdict": "wrong", "deep": deep}
    write_record(sent, "06.json", gpu_result(judgements=(judgement,)))
    assert any("looks like markup" in problem for problem in recorded_check.problems(sent))


def test_all_of_results_is_looked_at(sent):
    (sent.parent / "l4").mkdir()
    (sent.parent / "notes.txt").write_text("hello")
    found = recorded_check.all_problems(sent.parent)
    assert found == {
        "h200": [], "l4": ["l4 holds no recording"],
        "notes.txt": ["'notes.txt' is neither a GPU's folder nor README.md"]}  # fmt: skip
    for folder in ("none", "results/none"):
        with pytest.raises(InputError, match="there is no folder"):
            recorded_check.problems(folder)
        with pytest.raises(InputError, match="there is no folder"):
            recorded_check.all_problems(folder)


def test_nothing_is_recorded_yet(tmp_path, capsys):
    assert recorded_table.recorded_gpus(tmp_path) == ()
    section = sheet_export.gpus(())
    assert "yours can be the first" in section._repr_html_()
    assert "<table" not in section._repr_html_()
    assert cli.main(["record", "--check", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"Nothing is recorded in {tmp_path}.\n"


def test_every_gpu_is_shown_by_name_versions_and_date(sent):
    older = {**GPU, "name": "A | <b>card</b>", "versions": {"torch": "2.11.0"}}
    write_record(sent.parent / "card", "06.json", gpu_result(machine=older))
    newer = gpu_result(machine={**older, "versions": {"torch": "2.13.0"}}, lesson="07",
                       date="2026-02-01T00:00:00+00:00")  # fmt: skip
    write_record(sent.parent / "card", "07.json", newer)
    card, h200 = recorded_table.recorded_gpus(sent.parent)
    assert card.cells == ("A | <b>card</b>", "2026-01-02 to 2026-02-01", "2", "–", "–",
                          "torch 2.13.0 (older records: others)")  # fmt: skip
    assert h200.cells == (
        "NVIDIA H200", "2026-01-02 to 2026-01-04", "1", "stack", "1 recipes and set-ups",
        "driver 580.1, cuda 13.0, torch 2.13.0, transformers 5.23.0, bitsandbytes 0.50.2",
    )  # fmt: skip
    section = sheet_export.gpus((card, h200))
    assert section.rows == (card.cells, h200.cells)
    shown = section._repr_html_()
    assert "<b>" not in shown
    assert "A | &lt;b&gt;card" in shown
