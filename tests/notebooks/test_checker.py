"""The checker against executed notebooks that papermill lets through, and the runner's outcomes."""

import nbformat
import papermill
import pytest
from lesson_files import notebook, result, result_source
from nbformat.v4 import new_output

from labkit.course import papermill_worker, runner
from labkit.course.check import check_notebook
from labkit.lesson.notebooks import lesson_at
from labkit.lesson.results import RESULT_MIME


def executed(folder, lesson, **parameters):
    """``lesson`` as papermill leaves it on disk; fails if papermill objects."""
    source, target = folder / "in.ipynb", folder / "out.ipynb"
    nbformat.write(lesson, source)
    papermill.execute_notebook(
        source,
        target,
        parameters,
        progress_bar=False,
        kernel_name="python3",
        language="python",
        kernel_manager_class=papermill_worker.attentive_kernel_manager(),
    )
    return nbformat.read(target, as_version=4)


def outcome_of(folder, lesson, **options):
    """The runner's outcome for ``lesson``, and the notebook that it left."""
    path = folder / "06_case.ipynb"
    nbformat.write(lesson, path)
    course = runner.run([lesson_at(path)], folder=folder / "out", **options)
    [outcome] = course.outcomes
    return outcome, nbformat.read(folder / "out" / outcome.notebook, as_version=4)


def test_a_good_notebook_has_no_problems(tmp_path):
    # what a lesson may do: widgets, output widgets, a warning
    lesson = notebook(
        "import ipywidgets\nwith ipywidgets.Output() as out:\n    print('fine')\nout",
        "import warnings\nwarnings.warn('old', FutureWarning)",
    )
    assert check_notebook(executed(tmp_path, lesson, batch_size=8), lesson="06") == []


def test_errors_in_widgets_and_parameters_are_found(tmp_path):
    lesson = notebook(
        "import ipywidgets\n@ipywidgets.interact(x=(0, 3))\ndef f(x=1):\n    1 / 0",
        "with ipywidgets.Output():\n    raise KeyError('lost')",
    )
    done = executed(tmp_path, lesson, batch_size=4)
    # Widgets have no order: their ids are random.
    assert sorted(check_notebook(done, lesson="06")) == sorted(
        [
            "a widget holds the error ZeroDivisionError: division by zero",
            "a widget holds the error KeyError: 'lost'",
            "its result says batch_size = 8, but it was given 4",
        ]
    )


def test_a_system_exit_leaves_later_cells_pending(tmp_path):
    done = executed(tmp_path, notebook("raise SystemExit(0)", "print('never')"))
    problems = check_notebook(done, lesson="06")
    assert problems[0].startswith("cell 3 (06-2) raised SystemExit")
    assert problems[1] == "code cells that did not complete: 3, first cell 3 (06-2)"
    assert "shows no result" in problems[2]


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([], "it shows no result: lab.result(...) did not run"),
        ([result().to_dict()] * 2, "it shows 2 results, where one is expected"),
        ([result(lesson="07").to_dict()], "its result says lesson '07', not '06'"),
        ([[1]], "a result"),
    ],
)
def test_there_is_one_valid_result_of_this_lesson(records, problem):
    book = notebook("pass")
    for cell in book.cells[1:]:
        cell.execution_count = 1
        cell.metadata.update(
            papermill={"status": "completed"}, execution={"shell.execute_reply": ""}
        )
    book.cells[2].outputs = [new_output("display_data", {RESULT_MIME: each}) for each in records]
    [found] = check_notebook(book, lesson="06")
    assert problem in found


# --- what papermill reports, the runner must keep ----------------------------------------------


def test_an_exception_keeps_the_partial_notebook(tmp_path):
    sources = ("print('kept')", "raise MemoryError('expected')")
    lesson = notebook(*sources, tags=["raises-exception"])
    outcome, done = outcome_of(tmp_path, lesson)
    assert (outcome.status, outcome.notebook) == ("failed", "06_case.failed.ipynb")
    [printing] = [cell for cell in done.cells if cell.id == "06-2"]  # papermill added a banner
    assert printing.outputs[0].text == "kept\n"
    assert any(each.endswith("raised MemoryError: expected") for each in outcome.problems)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "the kernel died in cell 4 (06-3)"),
        ("time.sleep(600)", "stopped in cell 4 (06-3) after 8 seconds"),
    ],
)
def test_a_kernel_that_dies_or_hangs_in_the_last_cell(tmp_path, end, problem):
    last = f"{result_source()}\nimport os, signal, time\ntime.sleep(1)\n{end}"
    lesson = notebook("print('kept')", last, result_cell=False)
    outcome, done = outcome_of(tmp_path, lesson, timeout_seconds=8)
    assert outcome.problems[0].startswith(problem)
    assert done.cells[2].outputs[0].text == "kept\n"
    # the file alone shows it too, although papermill wrote "completed" beside every cell
    assert "code cells that did not complete: 1, first cell 4 (06-3)" in check_notebook(done)
