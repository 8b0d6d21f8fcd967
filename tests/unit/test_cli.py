"""The command line: exit codes and sentences. Executing lessons is tested in test_runner."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from lesson_files import run, write_lesson

import labkit
from labkit import doctor
from labkit.cli import main
from labkit.course import runner
from labkit.course.lessons import find
from labkit.course.outcomes import Outcome
from labkit.hardware import this_machine
from labkit.hardware.catalogue import GPUS
from labkit.recording import benchmarks, recorder
from labkit.recording.benchmarks import BENCHMARKS, BenchmarkResult, Entry
from labkit.recording.recorder import FAILED, NOT_HERE, RECORDED, Part
from labkit.values import MIB


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
    assert listed >= {"doctor", "run", "report", "record", "cheat-sheet", "class", "models", "gpus"}
    assert listed >= {"estimate", "advise"}
    assert f"labkit {labkit.__version__}\n" in printed


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
        (["report", "--out", "no/such/folder"], "there is no folder no/such/folder"),
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
    """What `labkit record` asks of its recorder; ``statuses`` are those of its parts by name."""
    calls = SimpleNamespace(lessons=None, parts=[], statuses={}, made=None, course="passed")

    class Fake(recorder.Recorder):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            calls.made = self

        def lessons(self, lessons, announce):
            calls.lessons = [each.name for each in lessons]
            made = tuple(Outcome(each.number, each.name, "T", calls.course) for each in lessons)
            return runner.Course(made, self.work, calls.course == "interrupted")

        def accuracy(self):
            return self._part("accuracy")

        def benchmark(self, benchmark):
            return self._part(benchmark.name)

        def _part(self, name):
            calls.parts.append(name)
            return Part(name, calls.statuses.get(name, NOT_HERE), 1.5)

    monkeypatch.setattr(recorder, "Recorder", Fake)
    monkeypatch.setattr(
        "labkit.course.report.report", lambda folder, outcomes: folder / "report.html"
    )
    return calls


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--headlines", "stak"], "unknown headline 'stak'. Did you mean 'stack'?"),
        (["--lessons", "no_such"], "unknown lesson 'no_such'"),
        (["--accuracy"], "run `labkit record` from a checkout"),
        (["06"], "unrecognized arguments: 06"),
    ],
)
def test_record_refuses_before_it_measures(
    capsys, gpu_machine, recorded, monkeypatch, tmp_path, arguments, words
):
    monkeypatch.setattr(recorder, "PACKAGE", tmp_path / "labkit")  # installed, no checkout
    assert words in refused(capsys, "record", *arguments)
    assert recorded.made is None


def test_without_a_choice_all_three_parts_are_recorded(capsys, gpu_machine, recorded):
    assert main.main(["record"]) == 0  # what a card cannot do is no failure unless it was named
    assert recorded.lessons == [lesson.name for lesson in find()]
    assert recorded.parts == ["accuracy", *BENCHMARKS]
    assert recorded.made.target == Path("results/h200")
    assert recorded.made.work == Path("build/record/h200")
    assert recorded.made.again is False
    printed = capsys.readouterr().out
    assert "Results: " in printed
    assert "not possible here" in printed
    assert not list(Path("results").rglob("*.lock"))


@pytest.mark.parametrize(
    ("arguments", "lessons", "parts"),
    [
        (["--lessons"], "all", []),
        (["--lessons", "06", "23"], ["06_gradient_checkpointing", "23_fit_your_model"], []),
        (["--headlines"], None, list(BENCHMARKS)),
        (["--headlines", "stack", "--accuracy"], None, ["accuracy", "stack"]),
        (["--headlines", "stack", "stack"], None, ["stack"]),
    ],
)
def test_parts_can_be_chosen(gpu_machine, recorded, arguments, lessons, parts):
    main.main(["record", *arguments])
    names = [lesson.name for lesson in find()] if lessons == "all" else lessons
    assert (recorded.lessons, recorded.parts) == (names, parts)


@pytest.mark.parametrize(
    ("arguments", "statuses", "code"),
    [
        (["--accuracy"], {"accuracy": FAILED}, 1),
        (["--headlines"], {"t4-batches": NOT_HERE}, 0),
        (["--headlines", "stack"], {"stack": NOT_HERE}, 1),
    ],
)
def test_exit_codes_of_record(gpu_machine, recorded, arguments, statuses, code):
    recorded.statuses = statuses
    assert main.main(["record", *arguments]) == code


@pytest.mark.parametrize(("status", "code"), [("failed", 1), ("interrupted", 130)])
def test_lessons_that_fail_do_not_stop_the_rest_but_ctrl_c_does(
    capsys, gpu_machine, recorded, status, code
):
    recorded.course = status
    assert main.main(["record", "--lessons", "06", "--accuracy"]) == code
    assert recorded.parts == (["accuracy"] if status == "failed" else [])
    if status == "interrupted":
        assert "Finished lessons are kept." in capsys.readouterr().out


def test_a_benchmark_that_is_recorded_is_shown(capsys, gpu_machine, recorded, monkeypatch):
    benchmark = BENCHMARKS["stack"]
    real = run(mode="measured", losses=(3.25,), step_seconds=(0.5,), reserved_bytes=24 * MIB)
    predicted = run(reserved_bytes=24 * MIB)
    entries = tuple(Entry(label, recipe, real, predicted) for label, recipe in benchmark.recipes)
    machine = {"kind": "cuda", "name": "g"}
    found = BenchmarkResult(benchmark, entries, machine, 1.0, "2026-01-01")
    monkeypatch.setattr(benchmarks, "load", lambda path: found)
    recorded.statuses = {"stack": RECORDED}
    assert main.main(["record", "--headlines", "stack"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (sparing,) = [line for line in lines if line.startswith("the same training")]
    peak, reserved = ("12.0 MiB +0.00 %", "24.0 MiB +0.00 %")
    speed = "32,768"  # 16 × 1024 tokens in half a second
    assert " ".join(sparing.split()) == f"the same training 1 × 16 {peak} {reserved} {speed} 3.25"


# --- doctor ------------------------------------------------------------------------------------


def test_doctor_prints_problems_with_their_remedies(capsys, monkeypatch):
    found = [
        doctor.Finding("ok", "python", "3.11"),
        doctor.Finding("problem", "torch", "is not installed", "pip install torch"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    assert main.main(["doctor"]) == 1
    assert "-> pip install torch" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda: found[:1])
    assert main.main(["doctor"]) == 0
    assert "All is well." in capsys.readouterr().out
