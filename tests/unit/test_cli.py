"""The command line: exit codes and sentences. Executing lessons is tested in test_runner."""

import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from lesson_files import write_lesson

from gpumem.files import SOURCE
from gpumem.hardware import this_machine
from gpumem.hardware.catalogue import GPUS
from labkit import doctor
from labkit.cli import main
from labkit.course import runner
from labkit.course.outcomes import Outcome
from labkit.lesson.notebooks import find
from labkit.recording import recorder


@pytest.fixture
def lesson(tmp_path):
    return str(write_lesson(tmp_path))


def refused(capsys, *arguments):
    """The sentence on standard error of a call that must exit 2."""
    assert main.main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("labkit: ")
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    return printed.err


def test_the_commands_and_the_version(capsys):
    for arguments in ([], ["--help"], ["--version"]):
        with pytest.raises(SystemExit) as ended:
            main.main(arguments)
        assert ended.value.code == 0
    printed = capsys.readouterr().out
    listed = set(re.findall(r"^    ([a-z-]+)\s", printed, re.MULTILINE))
    assert listed >= {"doctor", "run", "report", "record", "cheat-sheet", "models", "gpus"}
    assert listed >= {"estimate", "advise"}
    assert f"labkit {version('gpu-memory-lab')}\n" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], "unknown command 'rnu'. Did you mean 'run'?"),
        (["run", "--jbos", "2"], "--jbos"),
        (["run", "LESSON", "--jobs", "0"], "--jobs must be from 1 to"),
        (["run", "LESSON", "--timeout", "0"], "--timeout must be from 1 to"),
        (["run", "LESSON", "--timeout", "soon"], "--timeout: invalid int value: 'soon'"),
        (["run", "LESSON", "-p", "batch_sise", "4"], "Did you mean 'batch_size'?"),
        (["run", "LESSON", "-p", "batch_size", "x"], "such as 8, not 'x'"),
        (["run", "LESSON", "-p", "batch_size"], "expected 2 arguments"),
        (["run", "no_such_lesson"], "unknown lesson 'no_such_lesson'"),
        (["run", "DAMAGED"], "is not a valid notebook"),
        (["run", "LESSON", "--out", "LESSON"], "cannot write to the folder"),
        (["report", "no/such/folder"], "there is no folder no/such/folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, lesson, tmp_path, arguments, words):
    damaged = tmp_path / "06_x.ipynb"
    damaged.write_text("{")
    given = {"LESSON": lesson, "DAMAGED": str(damaged)}
    assert words in refused(capsys, *(given.get(each, each) for each in arguments))


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "stopped"),
        (OSError(28, "No space left on device", "/x"), 2, "No space left on device (/x). What was"),
    ],
)
def test_ctrl_c_and_a_full_disk_end_in_a_sentence(capsys, monkeypatch, lesson, error, code, says):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(runner, "run", fail)
    assert main.main(["run", lesson]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "interrupted", "code"),
    [("passed", False, 0), ("failed", False, 1), ("interrupted", True, 130)],
)
def test_exit_codes_of_run(capsys, monkeypatch, lesson, tmp_path, status, interrupted, code):
    problems = ("cell 3 raised ValueError",) if status == "failed" else ()
    outcome = Outcome("06", "06_saving", "Saving", status, problems, 3.21)

    def run(lessons, *, folder, on_done, **options):
        if not interrupted:
            on_done(outcome)
        return runner.Course((outcome,), folder, interrupted)

    monkeypatch.setattr(runner, "run", run)
    assert main.main(["run", lesson, "--out", str(tmp_path)]) == code
    printed = capsys.readouterr().out
    assert "3.2" in printed
    assert f"Report: {tmp_path / 'report.html'}" in printed
    assert all(problem in printed for problem in problems)


# --- record ------------------------------------------------------------------------------------


def test_record_needs_a_gpu(capsys, lesson, monkeypatch):
    here = SimpleNamespace(phantom=False, can_measure=False, name="Some CPU")
    monkeypatch.setattr(this_machine, "machine", lambda: here)
    assert "needs a CUDA GPU" in refused(capsys, "record", "--lessons", lesson)


@pytest.fixture
def gpu_machine(monkeypatch, tmp_path):
    nbytes = GPUS["h200"].usable_bytes
    here = SimpleNamespace(
        phantom=False, can_measure=True, name="NVIDIA H200", versions={}, capacity_bytes=nbytes
    )
    monkeypatch.setattr(this_machine, "machine", lambda: here)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def recorded(monkeypatch):
    """What `labkit record` asks of its recorder; ``status`` is that of its lessons."""
    calls = SimpleNamespace(lessons=None, machine=None, status="passed", ran_elsewhere=[])

    def record_lessons(lessons, machine, *, work, **options):
        vars(calls).update(options, lessons=[each.name for each in lessons], work=work)
        made = tuple(Outcome(each.number, each.name, "T", calls.status) for each in lessons)
        course = runner.Course(made, work, calls.status == "interrupted")
        return course, calls.ran_elsewhere

    monkeypatch.setattr(recorder, "record_lessons", record_lessons)
    monkeypatch.setattr(
        "labkit.course.report.report", lambda folder, outcomes: folder / "report.html"
    )
    return calls


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lessons", "no_such"], "unknown lesson 'no_such'"),
        (["06"], "unrecognized arguments: 06"),
    ],
)
def test_record_refuses_before_it_measures(capsys, gpu_machine, recorded, arguments, words):
    assert words in refused(capsys, "record", *arguments)
    assert recorded.lessons is None


def test_without_a_choice_all_is_recorded(capsys, gpu_machine, recorded):
    assert main.main(["record"]) == 0
    assert recorded.lessons == [lesson.name for lesson in find()]
    assert recorded.target == Path("results/h200")
    assert recorded.work == Path("build/record/h200")
    assert recorded.again is False
    assert "Results: " in capsys.readouterr().out
    assert not list(Path("results").rglob("*.lock"))


def test_lessons_can_be_chosen(gpu_machine, recorded):
    assert main.main(["record", "--lessons", "06", "23"]) == 0
    assert recorded.lessons == ["06_gradient_checkpointing", "23_fit_your_model"]


def test_accuracy_is_recorded_by_the_script_of_a_clone(gpu_machine, recorded, monkeypatch):
    ran = []

    def run(command):
        ran.append([str(word) for word in command[1:]])
        return SimpleNamespace(returncode=len(ran) - 1)

    monkeypatch.setattr(main.subprocess, "run", run)
    assert main.main(["record", "--accuracy", "--out", "there"]) == 1  # the second has failed
    script = str(SOURCE / "benchmarks" / "accuracy.py")
    assert ran == [[script, part, "--out", "there"] for part in ("--gpu", "--headlines")]
    assert recorded.lessons is None


@pytest.mark.parametrize(
    ("status", "elsewhere", "code"),
    [("failed", [], 1), ("interrupted", [], 130), ("passed", ["06"], 1)],
)
def test_what_is_not_recorded_is_an_exit_code(gpu_machine, recorded, status, elsewhere, code):
    recorded.status, recorded.ran_elsewhere = status, elsewhere
    assert main.main(["record", "--lessons", "06"]) == code


# --- doctor ------------------------------------------------------------------------------------


def test_doctor_prints_problems_last_each_with_its_remedy(capsys, monkeypatch):
    found = [
        doctor.Finding("problem", "torch", "is not installed", "pip install torch"),
        doctor.Finding("ok", "python", "3.11"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    assert main.main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok       python  3.11",
        "problem  torch   is not installed",
        "                 -> pip install torch",
        "Problems: 1.",
    ]
    monkeypatch.setattr(doctor, "examine", lambda: found[1:])
    assert main.main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("\nAll is well.\n")
