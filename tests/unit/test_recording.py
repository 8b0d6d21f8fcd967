"""Recording: what is kept, what is left alone, what two recorders or a killed one leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
from lesson_files import result, run, write_lesson

from benchmarks.setups import tiny_config
from labkit import accuracy, child, hardware, headlines, notebooks, outcomes, recording, results
from labkit.accuracy import AccuracyTable, Row
from labkit.drift import drift, figures
from labkit.headline_records import Entry, Headline, Job
from labkit.lessons import lesson_at
from labkit.memory import MIB, InputError, OutOfMemory
from labkit.outcomes import Outcome
from labkit.recipes import Recipe
from labkit.recording import FAILED, NOT_HERE, RECORDED, UNCHANGED, Recorder
from labkit.register import LOCK, Register, locked

HERE = hardware.machine()
SMALL = Recipe(batch_size=2, seq_len=32, optimizer="sgd")


@pytest.fixture
def places(tmp_path):
    target, work = tmp_path / "results" / "gpu", tmp_path / "work"
    target.mkdir(parents=True)
    work.mkdir()
    return SimpleNamespace(target=target, work=work, said=[])


def recorder(places, **options):
    return Recorder(places.target, places.work, HERE, tell=places.said.append, **options)


def headline(name="stack", peak_mib=12, seconds=0.5, **changes):
    job = Job(name=name, shows="It fits.", model="m", recipes=(("plain", SMALL),))
    peak = {"peak_bytes": peak_mib * MIB, "by_category": {"weights": peak_mib * MIB},
            "step_peaks_bytes": ()}  # fmt: skip
    real = run(mode="measured", losses=(3.0,), step_seconds=(seconds,), **peak)
    machine = {"kind": HERE.kind, "name": HERE.name}
    values = {"job": job, "entries": (Entry("plain", SMALL, real, run(**peak)),),
              "machine": machine, "seconds": 1.0, "date": "2026-01-02T03:04:05+00:00"}  # fmt: skip
    return Headline(**{**values, **changes})


def written(places, found, code=0, why=""):
    """Stands for the process that makes a headline: writes ``found``."""

    def in_child(command, log, timeout_seconds, *, order=""):
        if found is not None:
            path = places.work / "parts" / command[-1].rpartition("/")[2]
            text = found if isinstance(found, str) else json.dumps(found.to_dict())
            path.write_text(text)
        return child.Ended(code, why)

    return in_child


# --- drift --------------------------------------------------------------------------------------


def test_drift_says_old_new_and_change():
    lines = drift("stack", figures(headline()), figures(headline(peak_mib=15, seconds=0.25)))
    assert lines[0] == "stack: 1 of 1 run changed"
    assert lines[2].split() == ["plain", "12.0", "MiB", "15.0", "MiB", "+25.00", "%", "128", "256",
                                "+100.00", "%"]  # fmt: skip


def test_no_change_is_one_line():
    assert drift("06", figures(result()), figures(result())) == ["06: no change in 1 run"]
    table = AccuracyTable((Row("a", 5, 5, 5),), {"kind": "cuda", "name": "g"}, "2026-01-01")
    assert drift("accuracy", figures(table), figures(table)) == ["accuracy: no change in 1 run"]


def test_runs_of_a_lesson_are_matched_by_name_and_parameters():
    one, two = run(), run(parameters={"batch_size": 16}, peak_bytes=24 * MIB,
                          by_category={"weights": 24 * MIB})  # fmt: skip
    larger = replace(one, peak_bytes=13 * MIB, by_category={"weights": 13 * MIB})
    lines = drift("06", figures(result(runs=(one, two, one))), figures(result(runs=(two, larger))))
    assert lines[0] == "06: 1 of 2 runs changed, 1 run gone"
    assert lines[2].split()[:1] + lines[2].split()[-2:] == ["baseline", "+8.33", "%"]
    assert "tokens" not in lines[1]  # lessons do not record them
    lines = drift("06", figures(result(runs=(one,))), figures(result(runs=(one, two))))
    assert lines == ["06: no change in 1 run, 1 run new"]


def test_what_no_longer_fits_is_said():
    oom = OutOfMemory(1, MIB, None, {"weights": MIB}, 1, "forward", "", "")
    lines = drift("06", figures(result()), figures(result(runs=(run(oom=oom),))))
    assert lines[2].split() == ["baseline", "12.0", "MiB", "no", "fit", "–"]


# --- headlines ----------------------------------------------------------------------------------


def test_a_headline_is_kept_then_left_alone_then_measured_again(places, monkeypatch):
    first = headline()
    monkeypatch.setattr(recording, "in_child", written(places, first))
    assert recorder(places).headline(first.job).status == RECORDED
    path = places.target / "headline-stack.json"
    assert headlines.load(path) == first
    assert places.said == []  # nothing was there before

    def never(*arguments, **options):
        raise AssertionError("it was measured again")

    monkeypatch.setattr(recording, "in_child", never)
    assert recorder(places).headline(first.job).status == UNCHANGED

    second = headline(peak_mib=11)
    monkeypatch.setattr(recording, "in_child", written(places, second))
    assert recorder(places, again=True).headline(first.job).status == RECORDED
    assert places.said[0] == "headline-stack: 1 of 1 run changed"
    assert "-8.33 %" in places.said[2]
    assert headlines.load(path) == second


@pytest.mark.parametrize("what", ["job", "file", "sources", "register"])
def test_what_changed_is_measured_again(places, monkeypatch, what):
    first = headline()
    monkeypatch.setattr(recording, "in_child", written(places, first))
    assert recorder(places).headline(first.job).status == RECORDED
    job = first.job
    if what == "job":
        job = replace(job, recipes=(("plain", SMALL.but(batch_size=1)),))
    elif what == "file":
        path = places.target / job.file
        path.write_text(path.read_text().replace("It fits.", "It FITS."))
    elif what == "sources":
        monkeypatch.setattr(
            recording.outcomes, "environment_hash", lambda machine, recorded: "other"
        )
    else:
        (places.target / "recording.json").write_text("{")
    assert recorder(places).headline(job).status == RECORDED


def test_a_broken_record_is_named_and_replaced(places, monkeypatch):
    (places.target / "headline-stack.json").write_text("{")
    monkeypatch.setattr(recording, "in_child", written(places, headline()))
    assert recorder(places).headline(headline().job).status == RECORDED
    assert "headline-stack.json is not a headline we can read" in places.said[0]
    assert headlines.load(places.target / "headline-stack.json") == headline()


@pytest.mark.parametrize(
    ("found", "code", "why", "status", "words"),
    [
        (None, 2, "it needs more memory", NOT_HERE, "stack: it needs more memory"),
        (None, 1, "RuntimeError: no", FAILED, "RuntimeError: no (see "),
        (None, None, "stopped after 5 seconds", FAILED, "stopped after 5 seconds"),
        (None, 0, "", FAILED, "not kept: cannot read"),
        ("{", 0, "", FAILED, "not kept: "),
        (headline(machine={"kind": "cpu", "name": "X"}), 0, "", FAILED, "it ran on X"),
        (headline(name="t4-batches"), 0, "", FAILED, "holds the headline 't4-batches'"),
    ],
)
def test_what_failed_is_named_and_leaves_no_file(
    places, monkeypatch, found, code, why, status, words
):
    monkeypatch.setattr(recording, "in_child", written(places, found, code, why))
    assert recorder(places).headline(headline().job).status == status
    assert words in places.said[0]
    assert list(places.target.iterdir()) == []


def test_a_failure_leaves_the_earlier_record_whole(places, monkeypatch):
    monkeypatch.setattr(recording, "in_child", written(places, headline()))
    recorder(places).headline(headline().job)
    monkeypatch.setattr(recording, "in_child", written(places, None, 1, "no"))
    assert recorder(places, again=True).headline(headline().job).status == FAILED
    assert headlines.load(places.target / "headline-stack.json") == headline()


def test_a_full_disk_leaves_the_earlier_record_whole(places, monkeypatch):
    monkeypatch.setattr(recording, "in_child", written(places, headline()))
    recorder(places).headline(headline().job)
    monkeypatch.setattr(recording, "in_child", written(places, headline(peak_mib=11)))

    def full(handle):
        raise OSError(28, "No space left on device")

    again = recorder(places, again=True)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        again.headline(headline().job)
    assert headlines.load(places.target / "headline-stack.json") == headline()
    assert {path.name for path in places.target.iterdir()} == {
        "headline-stack.json", "recording.json"}  # fmt: skip


# --- a real process, and one that is killed -----------------------------------------------------

RECORD = """
import json, sys
from pathlib import Path
from labkit import hardware
from labkit.headline_records import Job
from labkit.recording import Recorder
from labkit.register import locked
target, work, *jobs = sys.argv[1:]
with locked(Path(target)):
    recorder = Recorder(Path(target), Path(work), hardware.machine(), tell=lambda line: None)
    for text in jobs:
        print(recorder.headline(Job.from_dict(json.loads(text))).status, flush=True)
"""


def job(name, folder, count=1):
    recipes = tuple((str(number), SMALL) for number in range(count))
    return Job(name=name, shows="It runs.", model=str(folder), recipes=recipes)


def test_a_recorder_killed_outright_loses_only_what_is_in_flight(places, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_config().to_dict()))
    short, endless = job("stack", model), job("t4-batches", model, count=40)
    texts = [json.dumps(each.to_dict()) for each in (short, endless)]
    process = subprocess.Popen(
        [sys.executable, "-c", RECORD, str(places.target), str(places.work), *texts],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout.readline() == f"{RECORDED}\n"
        log = places.work / "parts" / "headline-t4-batches.log"
        wait_until(lambda: log.exists() and "peak" in log.read_text())
        with pytest.raises(InputError, match=f"process {process.pid} is recording"):
            locked(places.target).__enter__()
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert headlines.load(places.target / short.file).job == short
    names = {path.name for path in places.target.iterdir()}
    assert names == {short.file, "recording.json", LOCK}
    assert children
    wait_until(lambda: not any(alive(each.pid) for each in children), seconds=20)
    assert log.read_text().count("peak") < 40  # the run in flight ended with its recorder
    with locked(places.target):  # a dead process's lock is taken over
        assert recorder(places).headline(short).status == UNCHANGED
    assert not (places.target / LOCK).exists()


def wait_until(true, seconds=120):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# --- processes ----------------------------------------------------------------------------------


def ended(tmp_path, code, *, timeout_seconds=60.0, order=""):
    log = tmp_path / "it.log"
    return child.in_child([sys.executable, "-c", code], log, timeout_seconds, order=order), log


def test_a_process_that_succeeds_silently_leaves_no_log(tmp_path):
    found, log = ended(tmp_path, "print(end='')")
    assert found == (0, "its process ended with code 0")
    assert not log.exists()


def test_the_last_line_says_why_a_process_failed(tmp_path):
    found, log = ended(tmp_path, "print('one'); raise SystemExit('because')")
    assert found == (1, "because")
    assert log.read_text() == "one\nbecause\n"


def test_a_process_gets_its_order_and_keeps_its_input(tmp_path):
    code = "import sys, select; print(input(), bool(select.select([0], [], [], 0.3)[0]))"
    found, log = ended(tmp_path, code, order="do it")
    assert found.code == 0
    assert log.read_text() == "do it False\n"


def test_a_process_that_hangs_is_stopped_with_all_it_started(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(other.pid, flush=True)\n"
        "time.sleep(600)"
    )
    found, log = ended(tmp_path, code, timeout_seconds=3)
    assert found.code is None
    assert "stopped after 3 seconds, the time limit" in found.why
    started = int(log.read_text())
    wait_until(lambda: not alive(started), seconds=20)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_that_is_killed_is_said_to_be(tmp_path):
    found, _ = ended(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert found.code == -9
    assert "ended by signal 9" in found.why


# --- locks and registers ------------------------------------------------------------------------


def test_one_recorder_at_a_time(tmp_path):
    with locked(tmp_path):
        with pytest.raises(InputError, match=f"process {os.getpid()} is recording in"), \
                locked(tmp_path):  # fmt: skip
            raise AssertionError
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"
    assert not (tmp_path / LOCK).exists()
    (tmp_path / LOCK).write_text("999999\n")  # of one that died
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"


def test_an_error_gives_the_lock_back(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path):
        pass


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"schema": 2, "files": {}}', '{"schema": 1, "files": {"a": 1}}',
             '{"schema": 1, "files": {"a": {"made_by": 1, "sha256": "x"}}}']
)  # fmt: skip
def test_a_broken_register_holds_nothing(tmp_path, text):
    (tmp_path / "recording.json").write_text(text)
    (tmp_path / "a").write_text("x")
    said = []
    register = Register(tmp_path, said.append)
    assert not register.holds("a", "me")
    assert "All is measured again" in said[0]
    register.note("a", "me")
    assert Register(tmp_path, said.append).holds("a", "me")
    assert len(said) == 1


def test_the_environment_is_sources_versions_and_gpu_not_what_was_recorded(tmp_path, monkeypatch):
    environment_hash = partial(outcomes.environment_hash, recorded=False)
    before = environment_hash(HERE)
    assert environment_hash(replace(HERE, name="other")) != before
    assert environment_hash(replace(HERE, capacity_bytes=5)) != before
    assert environment_hash(replace(HERE, versions={"torch": "9"})) != before
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert environment_hash(HERE) != before
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    results.save(result(), tmp_path / "h200" / "06.json")
    monkeypatch.setattr(outcomes, "result_folders", lambda: [tmp_path])
    assert environment_hash(HERE) == before


# --- lessons ------------------------------------------------------------------------------------


@pytest.fixture
def lesson(tmp_path):
    return lesson_at(write_lesson(tmp_path / "course"))


def executed(monkeypatch, found, status="passed"):
    """Stands for `notebooks.run`; what it was called with."""
    calls = []
    monkeypatch.setattr(outcomes, "stored_result", lambda outcome, folder: found)

    def run(lessons, *, folder, on_done, **options):
        calls.append((tuple(lessons), options))
        made = tuple(Outcome(each.number, each.name, "T", status) for each in lessons)
        for outcome in made:
            on_done(outcome)
        return notebooks.Course(made, folder)

    monkeypatch.setattr(notebooks, "run", run)
    return calls


def here(**changes):
    return result(machine={"kind": HERE.kind, "name": HERE.name}, **changes)


def test_a_lesson_is_kept_then_left_alone(places, lesson, monkeypatch):
    calls = executed(monkeypatch, here())
    announced = []
    recorder(places).lessons([lesson], announced.append)
    assert [outcome.name for outcome in announced] == ["06_saving"]
    assert results.load(places.target / "06.json") == here()
    assert calls[0][1]["parameters"] == [("size", "auto")]
    assert calls[0][1]["resume"] is True

    course = recorder(places).lessons([lesson], announced.append)
    assert (len(calls), course.outcomes, course.passed) == (1, (), True)
    assert places.said == ["unchanged  06_saving"]

    executed(monkeypatch, here(runs=(run(name="new"),)))
    recorder(places, again=True).lessons([lesson], announced.append)
    assert places.said[1:] == ["06: no change in 0 runs, 1 run new, 1 run gone"]
    path = write_lesson(lesson.path.parent, "1 + 1")  # other cells
    recorder(places).lessons([lesson_at(path)], announced.append)
    assert places.said[-1] == "06: no change in 1 run"


def test_a_lesson_that_failed_or_ran_elsewhere_is_not_kept(places, lesson, monkeypatch):
    executed(monkeypatch, here(), status="failed")
    recorder(places).lessons([lesson], lambda outcome: None)
    assert list(places.target.iterdir()) == []
    executed(monkeypatch, result())
    one = recorder(places)
    one.lessons([lesson], lambda outcome: None)
    assert list(places.target.iterdir()) == []
    assert one.not_kept == ["06_saving"]
    assert "it ran on Test CPU" in places.said[-1]


# --- the accuracy matrix ------------------------------------------------------------------------

TABLE = AccuracyTable((Row("a", 5, 5, 5),), {"kind": HERE.kind, "name": HERE.name}, "2026-01-01")


def test_the_accuracy_matrix_is_kept_then_left_alone(places, monkeypatch):
    def in_child(command, log, timeout_seconds):
        assert command[-3] == "--gpu"
        path = places.work / "parts" / "accuracy" / "gpu" / "accuracy.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(TABLE.to_dict()))
        return child.Ended(0, "")

    monkeypatch.setattr(recording, "in_child", in_child)
    assert recorder(places).accuracy().status == RECORDED
    assert accuracy.load(places.target / "accuracy.json") == TABLE
    assert recorder(places).accuracy().status == UNCHANGED
    assert recorder(places, again=True).accuracy().status == RECORDED
    assert places.said == ["accuracy: no change in 1 run"]


def test_an_installed_package_says_that_the_benchmark_is_missing(places, monkeypatch):
    monkeypatch.setattr(recording, "PACKAGE", places.work / "labkit")
    assert recorder(places).accuracy().status == NOT_HERE
    assert "is not installed" in places.said[0]


def test_a_table_of_accuracy_is_not_trusted(tmp_path):
    good = TABLE.to_dict()
    for broken, words in [
        ([], "an object"),
        ({**good, "schema": 1}, "schema 1"),
        ({**good, "rows": []}, "1 to 1000"),
        ({**good, "rows": [{"setup": "a"}]}, "with the fields"),
        ({**good, "rows": good["rows"] * 2}, "twice"),
        ({**good, "rows": [{**good["rows"][0], "truth_bytes": -1}]}, "number of bytes"),
        ({**good, "rows": [{**good["rows"][0], "setup": ""}]}, "a text"),
        ({**good, "machine": {}}, "'kind'"),
        ({**good, "date": 5}, "ISO 8601"),
    ]:
        with pytest.raises(InputError, match=words):
            AccuracyTable.from_dict(broken)
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "accuracy.json").write_text(json.dumps(good))
    (tmp_path / "t4").mkdir()
    (tmp_path / "t4" / "accuracy.json").write_text("{")
    with pytest.warns(UserWarning, match=r"t4.accuracy\.json"):
        assert accuracy.recorded(tmp_path) == {"h200": TABLE}
