"""The command line: exit codes and sentences. Executing lessons is tested in test_runner."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from lesson_files import result, write_lesson

from labkit import cli, doctor, hardware, notebooks, outcomes, results
from labkit.outcomes import Outcome


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], "unknown command 'rnu'. Did you mean 'run'?"),
        ([], "COMMAND"),
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
    sentence = refused(capsys, "record", lesson)
    assert "record needs a CUDA GPU" in sentence
    assert "Some CPU" in sentence


@pytest.fixture
def gpu_machine(monkeypatch, tmp_path):
    here = SimpleNamespace(can_measure=True, name="NVIDIA H200")
    monkeypatch.setattr(hardware, "machine", lambda: here)
    monkeypatch.chdir(tmp_path)


def test_record_refuses_a_lesson_without_a_size(capsys, gpu_machine, lesson):
    assert "'06_saving' has no parameter 'size'" in refused(capsys, "record", lesson)


def test_record_saves_each_result_as_soon_as_its_lesson_passed(
    capsys, gpu_machine, lesson, tmp_path, monkeypatch
):
    monkeypatch.setattr(cli, "declared_parameters", lambda notebook: {"size": None})
    monkeypatch.setattr(outcomes, "stored_result", lambda outcome, folder: result())
    passed = Outcome("06", "06_saving", "Saving", "passed")
    failed = Outcome("07", "07_more", "More", "failed")
    seen = {}
    target = tmp_path / "results" / "h200" / "06.json"

    def run(lessons, *, folder, on_done, **options):
        seen.update(options, folder=folder)
        on_done(failed)
        assert not target.exists()
        on_done(passed)
        assert target.exists()
        return notebooks.Course((passed, failed), tmp_path)

    monkeypatch.setattr(notebooks, "run", run)
    assert cli.main(["record", lesson]) == 1
    assert results.load(target) == result()
    assert seen["parameters"] == [("size", "auto")]
    assert seen["resume"] is True
    assert seen["folder"] == Path("build/record/h200")
    assert [p.name for p in target.parent.iterdir()] == ["06.json"]


def test_a_gpu_that_the_catalogue_lacks_still_has_a_folder():
    assert cli.gpu_key("NVIDIA H200") == "h200"
    assert cli.gpu_key("Strange/Card: 9000 ../") == "strange-card-9000"


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
