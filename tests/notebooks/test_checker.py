"""The checker against executed notebooks that papermill lets through, one test per silent case."""

import nbformat
import papermill
import pytest
from lesson_files import notebook, result_source, run
from papermill.exceptions import PapermillExecutionError

from labkit import check, notebooks, worker
from labkit.check import check_notebook
from labkit.lessons import lesson_at
from labkit.memory import MIB
from labkit.results import RESULT_MIME


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
        kernel_manager_class=worker.attentive_kernel_manager(),
    )
    return nbformat.read(target, as_version=4)


def outcome_of(folder, lesson, *, timeout_seconds=60, parameters=()):
    """The runner's outcome for ``lesson``, for notebooks that papermill does object to."""
    path = folder / "06_case.ipynb"
    nbformat.write(lesson, path)
    course = notebooks.run(
        [lesson_at(path)],
        folder=folder / "out",
        parameters=parameters,
        timeout_seconds=timeout_seconds,
        progress=False,
    )
    return course.outcomes[0]


def test_a_good_notebook_has_no_problems(tmp_path):
    # anything a lesson may do: widgets, output widgets, a third party's deprecation warning
    lesson = notebook(
        "import ipywidgets\nwith ipywidgets.Output() as out:\n    print('fine')\nout",
        "import sys, warnings\nprint('a note', file=sys.stderr)\n"
        "warnings.warn_explicit('old', FutureWarning, '/site/other/module.py', 3)",
    )
    assert check_notebook(executed(tmp_path, lesson, batch_size=8), lesson="06") == []


def test_an_exception_inside_interact(tmp_path):
    lesson = notebook("import ipywidgets\n@ipywidgets.interact(x=(0, 3))\ndef f(x=1):\n    1 / 0")
    [problem] = check_notebook(executed(tmp_path, lesson), lesson="06")
    assert problem == "a widget holds the error ZeroDivisionError: division by zero"


def test_an_exception_inside_an_output_widget(tmp_path):
    lesson = notebook(
        "import ipywidgets\nout = ipywidgets.Output()\nwith out:\n    raise KeyError('lost')"
    )
    [problem] = check_notebook(executed(tmp_path, lesson), lesson="06")
    assert problem == "a widget holds the error KeyError: 'lost'"


@pytest.mark.parametrize("call", ["raise SystemExit(0)", "import sys\nsys.exit()"])
def test_a_system_exit_that_leaves_later_cells_pending(tmp_path, call):
    done = executed(tmp_path, notebook(call, "print('never')"))
    problems = check_notebook(done, lesson="06")
    assert problems[0].startswith("cell 3 (06-2) raised SystemExit")
    assert problems[1] == "3 code cells did not complete, first cell 3 (06-2)"
    assert "shows no result" in problems[2]


def test_a_misspelt_parameter(tmp_path):
    [problem] = check_notebook(executed(tmp_path, notebook(), batch_sise=4), lesson="06")
    assert problem == (
        "it was given the parameter 'batch_sise', which it does not declare "
        "(it declares batch_size, precision)"
    )


def test_a_parameter_that_the_result_did_not_run_with(tmp_path):
    [problem] = check_notebook(executed(tmp_path, notebook(), batch_size=4), lesson="06")
    assert problem == "its result says batch_size = 8, but it was given 4"


def test_a_notebook_without_a_result(tmp_path):
    [problem] = check_notebook(executed(tmp_path, notebook(result_cell=False)), lesson="06")
    assert "shows no result" in problem


def test_two_results(tmp_path):
    [problem] = check_notebook(executed(tmp_path, notebook(result_source())), lesson="06")
    assert "shows 2 results" in problem


def test_a_result_of_another_lesson(tmp_path):
    done = executed(tmp_path, notebook())
    assert check_notebook(done, lesson="07") == ["its result says lesson '06', not '07'"]
    assert check_notebook(done) == []


def test_a_result_out_of_its_invariants(tmp_path):
    impossible = run(step_peaks_bytes=(99 * MIB,))
    lesson = notebook(result_source(runs=(impossible,)), result_cell=False)
    [problem] = check_notebook(executed(tmp_path, lesson), lesson="06")
    assert "one step's peak is above the peak of the whole run" in problem


def test_a_result_that_is_not_valid(tmp_path):
    source = f"from IPython.display import display\ndisplay({{{RESULT_MIME!r}: [1]}}, raw=True)"
    [problem] = check_notebook(executed(tmp_path, notebook(source, result_cell=False)))
    assert problem == "a result must be an object, not list"


def test_a_deprecation_warning_from_a_cell(tmp_path):
    lesson = notebook("import warnings\nwarnings.warn('use new()', DeprecationWarning)")
    [problem] = check_notebook(executed(tmp_path, lesson), lesson="06")
    assert problem == "a cell caused a DeprecationWarning: use new()"


def test_a_deprecation_warning_inside_an_output_widget(tmp_path):
    lesson = notebook(
        "import ipywidgets, warnings\nwith ipywidgets.Output():\n"
        "    warnings.warn('use new()', FutureWarning)"
    )
    [problem] = check_notebook(executed(tmp_path, lesson), lesson="06")
    assert problem == "a cell caused a FutureWarning: use new()"


def test_a_deprecation_warning_from_labkit_which_python_would_hide(tmp_path):
    lesson = notebook(
        "import warnings\nwarnings.warn_explicit('use new()', DeprecationWarning, "
        f"{str(check.PACKAGE / 'show' / 'plots.py')!r}, 3, module='labkit.memory')"
    )
    outcome = outcome_of(tmp_path, lesson)
    assert outcome.problems == ("labkit/show/plots.py caused a DeprecationWarning: use new()",)


# --- what papermill reports, the runner must keep ----------------------------------------------


def test_a_cell_tagged_raises_exception(tmp_path):
    lesson = notebook("raise MemoryError('expected')", tags=["raises-exception"])
    with pytest.raises(PapermillExecutionError):
        executed(tmp_path, lesson)
    done = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    problems = check_notebook(done, lesson="06")
    assert any(problem.endswith("raised MemoryError: expected") for problem in problems)


def test_an_exception_keeps_the_partial_notebook(tmp_path):
    outcome = outcome_of(tmp_path, notebook("print('kept')", "1 / 0"))
    assert outcome.status == "failed"
    assert "raised ZeroDivisionError: division by zero" in outcome.problems[0]
    text = (tmp_path / "out" / outcome.notebook).read_text()
    assert outcome.notebook == "06_case.failed.ipynb"
    assert "kept" in text


def test_a_dead_kernel_in_the_last_cell(tmp_path):
    lesson = notebook(
        "print('kept')",
        result_source() + "\nimport os, signal, time\ntime.sleep(1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)",
        result_cell=False,
    )
    outcome = outcome_of(tmp_path, lesson)
    assert outcome.status == "failed"
    assert outcome.problems[0].startswith("the kernel died in cell 4 (06-3)")
    done = nbformat.read(tmp_path / "out" / outcome.notebook, as_version=4)
    assert done.cells[2].outputs[0].text == "kept\n"
    # the file alone shows it too, although papermill wrote "completed" beside every cell
    assert "1 code cell did not complete, first cell 4 (06-3)" in check_notebook(done)


def test_a_hanging_kernel_in_the_last_cell(tmp_path):
    lesson = notebook(
        "print('kept')",
        result_source() + "\nimport time\nwhile True:\n    time.sleep(1)",
        result_cell=False,
    )
    outcome = outcome_of(tmp_path, lesson, timeout_seconds=6)
    assert outcome.status == "failed"
    assert outcome.problems[0].startswith("stopped in cell 4 (06-3) after 6 seconds")
    done = nbformat.read(tmp_path / "out" / outcome.notebook, as_version=4)
    assert done.cells[2].outputs[0].text == "kept\n"
    assert "1 code cell did not complete, first cell 4 (06-3)" in check_notebook(done)
