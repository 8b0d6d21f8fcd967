"""The command line: exit codes and sentences. Executing lessons is tested in test_runner."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from lesson_files import run, write_lesson

from labkit import cli, cli_text, doctor, hardware, headlines, notebooks, recording
from labkit.catalogue import GPUS
from labkit.headline_records import Entry, Headline
from labkit.headlines import HEADLINES
from labkit.lessons import find
from labkit.memory import MIB
from labkit.outcomes import Outcome
from labkit.recording import FAILED, NOT_HERE, RECORDED, Part
from labkit.register import locked


@pytest.fixture
def lesson(tmp_path):
    return str(write_lesson(tmp_path))


def refused(capsys, *arguments):
    """The sentence on standard error of a call that must exit 2."""
    assert cli.main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("labkit: ")
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err
    return printed.err


def test_a_long_cell_is_wrapped_not_cut(capsys):
    cli_text.print_table(("a", "b"), [("x", " ".join(map(str, range(40)))), ("y", "short")])
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 3 + 44
    assert " ".join(printed[3:-2]).split() == ["x", *map(str, range(40))]
    assert printed[-2] == "y  short"


def test_without_a_command_it_lists_them(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^    {name}\s", printed, re.MULTILINE) for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], "unknown command 'rnu'. Did you mean 'run'?"),
        (["run", "--jbos", "2"], "--jbos"),
        (["run", "LESSON", "--jobs", "0"], "--jobs must be from 1 to"),
        (["run", "LESSON", "--jobs", "two"], "--jobs must be a whole number of at least 1"),
        (["run", "LESSON", "--timeout", "0"], "--timeout must be from 1 second"),
        (["run", "LESSON", "--timeout", "nan"], "--timeout must be from 1 second"),
        (["run", "LESSON", "--timeout", "soon"], "such as 600, not 'soon'"),
        (["run", "LESSON", "-p", "batch_sise", "4"], "Did you mean 'batch_size'?"),
        (["run", "LESSON", "-p", "batch_size", "0"], "batch_size must be from 1 to"),
        (["run", "LESSON", "-p", "batch_size", "x"], "a whole number such as 8, not 'x'"),
        (["run", "LESSON", "-p", "precision", "fp31"], "unknown precision 'fp31'. Did you mean"),
        (["run", "LESSON", "-p", "batch_size"], "expected 2 arguments"),
        (["run", "no_such_lesson"], "unknown lesson 'no_such_lesson'"),
        (["run", "LESSON", "--out", "LESSON"], "cannot write to the folder"),
        (["run", "LESSON", "--out", "LESSON/deeper"], "cannot write to the folder"),
        (["report", "--out", "no/such/folder"], "there is no folder no/such/folder"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, lesson, arguments, words):
    given = [argument.replace("LESSON", lesson) for argument in arguments]
    assert words in refused(capsys, *given)


def test_a_folder_that_may_not_be_written(capsys, lesson, tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied", str(options["dir"]))

    monkeypatch.setattr(notebooks.tempfile, "TemporaryFile", refuse)
    sentence = refused(capsys, "run", lesson, "--out", str(tmp_path / "out"))
    assert "Permission denied" in sentence
    assert "for example" in sentence


def test_a_damaged_notebook(capsys, tmp_path):
    path = tmp_path / "06_x.ipynb"
    path.write_text("{")
    assert "is not a valid notebook" in refused(capsys, "run", str(path), "--out", str(tmp_path))


def test_papermill_missing(capsys, lesson, tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks.importlib.util, "find_spec", lambda name: None)
    sentence = refused(capsys, "run", lesson, "--out", str(tmp_path / "out"))
    assert "papermill is not installed" in sentence
    assert "gpu-memory-lab[notebooks]" in sentence


def test_ctrl_c_before_anything_ran(capsys, monkeypatch, lesson):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(notebooks, "run", interrupt)
    assert cli.main(["run", lesson]) == 130
    assert "stopped" in capsys.readouterr().err


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
        return notebooks.Course((outcome,), folder, interrupted)

    monkeypatch.setattr(notebooks, "run", run)
    assert cli.main(["run", lesson, "--out", str(tmp_path)]) == code
    printed = capsys.readouterr().out
    assert "3.2" in printed
    assert f"Report: {tmp_path / 'report.html'}" in printed
    assert all(problem in printed for problem in problems)


# --- record ------------------------------------------------------------------------------------


def test_record_needs_a_gpu(capsys, lesson, monkeypatch):
    here = SimpleNamespace(can_measure=False, name="Some CPU")
    monkeypatch.setattr(hardware, "machine", lambda: here)
    sentence = refused(capsys, "record", "--lessons", lesson)
    assert "record needs a CUDA GPU" in sentence
    assert "Some CPU" in sentence


@pytest.fixture
def gpu_machine(monkeypatch, tmp_path):
    here = SimpleNamespace(can_measure=True, kind="cuda", name="NVIDIA H200", versions={},
                           capacity_bytes=GPUS["h200"].usable_bytes)  # fmt: skip
    monkeypatch.setattr(hardware, "machine", lambda: here)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def recorded(monkeypatch):
    """What `labkit record` asks of its recorder; ``statuses`` are those of its parts by name."""
    calls = SimpleNamespace(lessons=None, parts=[], statuses={}, made=None, course="passed")

    class Fake(recording.Recorder):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            calls.made = self

        def lessons(self, lessons, announce):
            calls.lessons = [each.name for each in lessons]
            made = tuple(Outcome(each.number, each.name, "T", calls.course) for each in lessons)
            return notebooks.Course(made, self.work, calls.course == "interrupted")

        def accuracy(self):
            return self._part("accuracy")

        def headline(self, job):
            return self._part(job.name)

        def _part(self, name):
            calls.parts.append(name)
            return Part(name, calls.statuses.get(name, NOT_HERE), 1.5)

    monkeypatch.setattr(recording, "Recorder", Fake)
    monkeypatch.setattr("labkit.report.report", lambda folder, outcomes: folder / "report.html")
    return calls


def test_record_refuses_a_lesson_without_a_size(capsys, gpu_machine, lesson):
    assert "'06_saving' has no parameter 'size'" in refused(capsys, "record", "--lessons", lesson)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--headlines", "stak"], "unknown headline 'stak'. Did you mean 'stack'?"),
        (["--lessons", "no_such"], "unknown lesson 'no_such'"),
        (["--timeout", "0"], "--timeout must be from 1 second"),
        (["06"], "unrecognized arguments: 06"),
        (["--out", "FILE"], "cannot write to the folder"),
    ],
)
def test_record_refuses_before_it_measures(capsys, gpu_machine, recorded, lesson, arguments, words):
    arguments = [argument.replace("FILE", lesson) for argument in arguments]
    assert words in refused(capsys, "record", *arguments)
    assert recorded.made is None


def test_without_a_choice_all_three_parts_are_recorded(capsys, gpu_machine, recorded):
    assert cli.main(["record"]) == 0  # what a card cannot do is no failure unless it was named
    assert recorded.lessons == [lesson.name for lesson in find()]
    assert recorded.parts == ["accuracy", *HEADLINES]
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
        (["--lessons", "06", "22"], ["06_gradient_checkpointing", "22_fit_your_model"], []),
        (["--accuracy"], None, ["accuracy"]),
        (["--headlines"], None, list(HEADLINES)),
        (["--headlines", "stack", "--accuracy"], None, ["accuracy", "stack"]),
        (["--headlines", "stack", "stack"], None, ["stack"]),
    ],
)
def test_parts_can_be_chosen(gpu_machine, recorded, arguments, lessons, parts):
    cli.main(["record", *arguments])
    names = [lesson.name for lesson in find()] if lessons == "all" else lessons
    assert (recorded.lessons, recorded.parts) == (names, parts)


@pytest.mark.parametrize(
    ("arguments", "statuses", "code"),
    [
        (["--accuracy"], {"accuracy": FAILED}, 1),
        (["--accuracy"], {"accuracy": NOT_HERE}, 0),
        (["--headlines"], {"t4-batches": FAILED}, 1),
        (["--headlines", "stack"], {"stack": NOT_HERE}, 1),
    ],
)
def test_exit_codes_of_record(gpu_machine, recorded, arguments, statuses, code):
    recorded.statuses = statuses
    assert cli.main(["record", *arguments]) == code


@pytest.mark.parametrize(("status", "code"), [("failed", 1), ("interrupted", 130)])
def test_lessons_that_fail_do_not_stop_the_rest_but_ctrl_c_does(
    capsys, gpu_machine, recorded, status, code
):
    recorded.course = status
    assert cli.main(["record", "--lessons", "06", "--accuracy"]) == code
    assert recorded.parts == (["accuracy"] if status == "failed" else [])
    if status == "interrupted":
        assert "the same command continues" in capsys.readouterr().out


def test_a_second_recorder_is_refused(capsys, gpu_machine, recorded):
    Path("results/h200").mkdir(parents=True)
    with locked(Path("results/h200")):
        assert "is recording in" in refused(capsys, "record", "--accuracy")
    Path("build/record/h200").mkdir(parents=True, exist_ok=True)
    with locked(Path("build/record/h200")):  # another --out, but the same work
        assert "is recording in" in refused(capsys, "record", "--accuracy", "--out", "other")
    assert recorded.made is None


def test_a_headline_that_is_recorded_is_shown(capsys, gpu_machine, recorded, monkeypatch):
    job = HEADLINES["stack"]
    real = run(mode="measured", losses=(3.25,), step_seconds=(0.5,), reserved_bytes=24 * MIB)
    predicted = run(reserved_bytes=24 * MIB)
    entries = tuple(Entry(label, recipe, real, predicted) for label, recipe in job.recipes)
    found = Headline(job, entries, {"kind": "cuda", "name": "g"}, 1.0, "2026-01-01")
    monkeypatch.setattr(headlines, "load", lambda path: found)
    recorded.statuses = {"stack": RECORDED}
    assert cli.main(["record", "--headlines", "stack"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(job.shows in line for line in lines)
    (sparing,) = [line for line in lines if line.startswith("the same training")]
    assert sparing.split("  ")[-1].strip() == "3.25"
    assert "1 × 16" in sparing
    assert "32,768" in sparing  # 16 × 1024 tokens in half a second
    assert "+0.00 %" in sparing


def test_without_benchmarks_accuracy_is_refused_in_a_sentence(
    capsys, gpu_machine, recorded, monkeypatch
):
    monkeypatch.setattr(recording, "accuracy_script", lambda: None)
    assert "is not installed" in refused(capsys, "record", "--accuracy")


# --- doctor ------------------------------------------------------------------------------------


def test_doctor_prints_problems_with_their_remedies(capsys, monkeypatch):
    findings = [
        doctor.Finding("ok", "python", "3.11"),
        doctor.Finding("problem", "torch", "is not installed", "pip install torch"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "✗ torch" in printed
    assert "→ pip install torch" in printed
    assert "1 problem." in printed
    monkeypatch.setattr(doctor, "examine", lambda: findings[:1])
    assert cli.main(["doctor"]) == 0
    assert "All is well." in capsys.readouterr().out
