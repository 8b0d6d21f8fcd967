"""Exercises: right, wrong, untouched and broken answers each get the outcome they deserve."""

import gc
import inspect
import sys
import types
import weakref

import pytest
import torch

import labkit
from labkit import exercises, relative_error
from labkit.exercises import (
    Exercise,
    Feedback,
    Status,
    call,
    checks,
    expect_choice,
    expect_number,
    memory_target,
    run_experiment,
    same_losses,
)
from labkit.exercises.checks import quote, reference_run
from labkit.memory import InputError, OutOfMemory, Run


def sixteen():
    # Four tensors of four bytes.
    return 4 * 4


def value_exercise(**changes):
    options = {
        "question": "How many bytes per parameter?",
        "hints": ("Count the tensors.", "There are four."),
        "solution": sixteen,
        "check": lambda answer: expect_number(answer, 16, unit="bytes_per_parameter"),
    }
    return Exercise("01-1", **{**options, **changes})


def doubled(n):
    return 2 * n


def function_exercise():
    def check(answer):
        return expect_number(call(answer, 21), 42)

    return Exercise("01-2", question="", hints=(), solution=doubled, check=check, kind="function")


def train(device, batch_size=4):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        loss = model(torch.ones(batch_size, 8, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def experiment_exercise(most_bytes=1 << 20):
    def check(answer):
        run = run_experiment(answer, world="measure", batch_size=4, steps=2)
        reference = run_experiment(train, world="measure", batch_size=4, steps=2)
        return memory_target(run, most_bytes) or same_losses(run, reference)

    return Exercise("01-3", question="", hints=(), solution=train, check=check)


# --- outcomes ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [value_exercise, function_exercise, experiment_exercise])
def test_solution_is_correct_and_stub_is_not_attempted(make, capsys):
    exercise = make()
    assert exercise.check(exercise.right_answer).status == Status.CORRECT
    for stub in (..., None):
        assert exercise.check(stub).status == Status.NOT_ATTEMPTED
    assert exercise.check().status == Status.NOT_ATTEMPTED
    shown = capsys.readouterr().out
    assert f"correct] Exercise {exercise.id}" in shown
    assert "not attempted" in shown


def test_kind_follows_from_the_solution():
    assert value_exercise().kind == "value"
    assert experiment_exercise().kind == "experiment"
    assert function_exercise().kind == "function"


def test_a_wrong_value_is_quoted():
    outcome = value_exercise().check(12)
    assert outcome.status == Status.NOT_YET
    assert outcome.message == ("You gave 12.0 bytes per parameter. The right answer is more.")


@pytest.mark.parametrize(
    ("result", "status", "message"),
    [
        (None, Status.CORRECT, "That is right."),
        ("Look again.", Status.NOT_YET, "Look again."),
        (Feedback(True, "And cheaper."), Status.CORRECT, "And cheaper."),
        (Feedback(False, "Dearer."), Status.NOT_YET, "Dearer."),
    ],
)
def test_what_a_check_may_return(result, status, message):
    outcome = value_exercise(check=lambda answer: result).check(1)
    assert (outcome.status, outcome.message) == (status, message)


def test_a_function_stub_is_not_attempted():
    def returns_nothing(n):
        pass

    def returns_dots(n):
        return ...

    for stub in (returns_nothing, returns_dots):
        outcome = function_exercise().check(stub)
        assert outcome.status == Status.NOT_ATTEMPTED
        assert stub.__name__ in outcome.message


def test_an_experiment_stub_is_not_attempted():
    def no_yield(device, batch_size=4):
        pass

    def dots(device, batch_size=4):
        yield ...

    outcome = experiment_exercise().check(no_yield)
    assert outcome.status == Status.NOT_ATTEMPTED
    assert "`no_yield` has no `yield` yet" in outcome.message
    outcome = experiment_exercise().check(dots)
    assert outcome.status == Status.NOT_ATTEMPTED
    assert "yields no loss yet" in outcome.message


@pytest.mark.parametrize("answer", [42, "train", train("cpu")])
def test_a_value_where_a_function_is_due(answer):
    outcome = experiment_exercise().check(answer)
    assert outcome.status == Status.NOT_YET
    assert "without calling it" in outcome.message


def test_the_learners_error_is_told_with_its_line():
    def mine(n):
        return n / 0  # here

    outcome = function_exercise().check(mine)
    assert outcome.status == Status.NOT_YET
    assert outcome.message.startswith("Your function raised ZeroDivisionError: division by zero")
    line = inspect.getsourcelines(mine)[1] + 1
    assert f"line {line}: `return n / 0  # here`" in outcome.message


def test_out_of_memory_is_an_answer_too():
    def mine(n):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert "CUDA out of memory." in function_exercise().check(mine).message


def test_an_error_in_an_experiment_is_told():
    def mine(device, batch_size=4):
        yield torch.ones(2, 3) @ torch.ones(2, 3)

    outcome = experiment_exercise().check(mine)
    assert outcome.status == Status.NOT_YET
    assert "shapes cannot be multiplied" in outcome.message


def test_an_experiment_that_lacks_a_parameter_is_told():
    def mine(device, batch=4):
        yield torch.ones(())

    outcome = experiment_exercise().check(mine)
    assert outcome.message.startswith("Your answer cannot be used: ")
    assert "batch_size" in outcome.message


def test_errors_that_cannot_print_do_not_raise():
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError("no")

    def mine(n):
        raise MuteError

    assert "MuteError" in function_exercise().check(mine).message


def test_a_check_that_stumbles_over_a_value_does_not_raise():
    outcome = value_exercise(check=lambda answer: answer["a"]).check(5)
    assert outcome.status == Status.NOT_YET
    assert "could not be checked: 5 led to TypeError" in outcome.message


class UnprintableError(Exception):
    """Also the type of an answer that cannot be printed, nor asked for anything."""

    def __call__(self, n):
        raise SystemExit(3)

    def __repr__(self):
        raise SystemExit(3)

    def __getattr__(self, name):
        raise RuntimeError(name)


@pytest.mark.parametrize("make", [lambda: 10**5000, lambda: [10**5000], UnprintableError])
def test_an_answer_that_cannot_be_printed_does_not_raise(make):
    answer = make()  # not by pytest, which prints its parameters
    assert "that cannot be printed" in quote(answer)
    made = [value_exercise(), value_exercise(check=lambda answer: answer["a"])]
    for exercise in (*made, function_exercise(), experiment_exercise()):
        assert exercise.check(answer).status != Status.CORRECT


def test_leaving_the_program_is_a_wrong_answer():
    def mine(n):
        sys.exit(n)

    outcome = function_exercise().check(mine)
    assert outcome.status == Status.NOT_YET
    assert outcome.message.startswith("Your function raised SystemExit: 21")
    assert "`sys.exit(n)`" in outcome.message


def test_interrupting_still_interrupts():
    def mine(n):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        function_exercise().check(mine)


def test_a_failed_answer_keeps_no_tensor_alive():
    alive = []

    def mine(n):
        tensor = torch.ones(4)
        alive.append(weakref.ref(tensor))
        kept = RuntimeError("no")
        errors.append(kept)  # as a notebook's own record of errors would
        raise kept

    errors = []
    function_exercise().check(mine)
    gc.collect()
    assert errors
    assert alive[0]() is None


# --- memory targets ------------------------------------------------------------------------


def test_a_missed_memory_target_names_the_largest_part():
    outcome = experiment_exercise(most_bytes=100).check(train)
    assert outcome.status == Status.NOT_YET
    assert "the target at most 100 B" in outcome.message
    assert "largest part of your peak is" in outcome.message


def test_other_losses_are_told():
    def mine(device, batch_size=4):
        for loss in train(device, batch_size):
            yield loss * 2

    outcome = experiment_exercise().check(mine)
    assert outcome.status == Status.NOT_YET
    assert "loss at step 1" in outcome.message


def a_run(peak_bytes=100, **changes):
    return Run(
        name="a", parameters={}, mode="simulated", device="NVIDIA T4", peak_bytes=peak_bytes,
        by_category={"weights": peak_bytes}, **changes,
    )  # fmt: skip


def test_memory_target_is_a_limit_and_a_run_must_fit():
    assert memory_target(a_run(100), 100) is None
    assert "Your peak is 101 B" in memory_target(a_run(101), 100)
    oom = OutOfMemory(5, 100, 102, {"weights": 100}, 1, "forward", "", "aten::mm")
    assert "did not fit" in memory_target(a_run(100, oom=oom), 200)


def test_same_losses():
    reference = a_run(losses=(2.0, 1.0))
    assert same_losses(a_run(losses=(2.00001, 1.0)), reference) is None
    assert "step 2 is 1.1" in same_losses(a_run(losses=(2.0, 1.1)), reference)
    assert "step 1 is nan" in same_losses(a_run(losses=(float("nan"), 1.0)), reference)
    assert "has 1 losses, 2 are expected" in same_losses(a_run(losses=(2.0,)), reference)
    with pytest.raises(InputError, match="world='measure'"):
        same_losses(reference, a_run())


def test_a_run_that_does_not_fit_is_not_said_to_lack_losses():
    oom = OutOfMemory(5, 100, 102, {"weights": 100}, 1, "forward", "", "aten::mm")
    assert "did not fit" in same_losses(a_run(oom=oom), a_run(losses=(2.0, 1.0)))


def test_a_reference_run_knows_no_budget_and_is_kept():
    def mine(device, batch_size=4):
        yield from train(device, batch_size)

    with labkit.pretend(budget_bytes=1):
        assert run_experiment(mine, world="measure", steps=2).oom is not None
        run = reference_run(mine, world="measure", steps=2)
    assert run.oom is None
    assert reference_run(mine, world="measure", steps=2) is run


def test_a_reference_run_that_failed_is_not_kept(monkeypatch):
    oom = OutOfMemory(5, 100, 102, {"weights": 100}, 1, "forward", "", "aten::mm")
    runs = [a_run(oom=oom), a_run()]
    monkeypatch.setattr(checks, "run_experiment", lambda answer, **parameters: runs.pop(0))
    with pytest.raises(InputError, match="compared with went"):
        reference_run(sixteen)
    assert reference_run(sixteen).oom is None


def test_wrapping_an_experiment_does_not_keep_its_losses(monkeypatch):
    lives = []

    def experiment(device):
        for _ in range(3):
            lives.append([ref() is not None for ref in seen])
            loss = torch.ones(())
            seen.append(weakref.ref(loss))
            yield loss
            del loss

    seen = []

    def step_through(wrapped, **parameters):
        assert inspect.isgeneratorfunction(wrapped)
        assert list(inspect.signature(wrapped).parameters) == ["device"]
        for loss in wrapped("cpu"):
            del loss

    monkeypatch.setattr(labkit, "simulate", step_through, raising=False)
    run_experiment(experiment, world="simulate")
    assert lives == [[], [False], [False, False]]


def test_run_experiment_refuses_an_unknown_world():
    with pytest.raises(InputError, match="Did you mean 'measure'"):
        run_experiment(train, world="measured")


# --- values --------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [100, 101.9, 98.1, torch.tensor(100)])
def test_close_numbers_are_right(answer):
    assert expect_number(answer, 100) is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (103, "You gave 103. The right answer is less."),
        (-100, "You gave -100. The right answer is more."),
        (102400, "factor of 1024, a binary prefix"),
        (0.1, "factor of 1000, a decimal prefix"),
        (100 * 2**30, "factor of 1024³"),
        (107.374, "factor of 1024³/1000³, GiB against GB"),
        (12.5, "factor of 8, bits against bytes"),
        ("a hundred", "you gave 'a hundred'"),
        (True, "you gave True"),
        (float("nan"), "you gave nan"),
    ],
)
def test_wrong_numbers_are_explained(answer, message):
    assert message in expect_number(answer, 100)


@pytest.mark.parametrize("number", [200, 200.5, torch.tensor(200.0), torch.tensor([200])])
def test_a_known_slip_is_named(number):
    slips = {201.5: "No.", 200: "That is twice as much.", 100.5: "Right all the same."}
    assert expect_number(number, 100, slips=slips).endswith(". That is twice as much.")
    assert expect_number(100.5, 100, slips=slips) is None
    assert expect_number(210, 100, slips=slips) == "You gave 210. The right answer is less."
    assert "you gave True" in expect_number(True, 100, slips={1: "One."})


def test_numbers_show_their_unit():
    assert expect_number(3 << 30, 5 << 30, unit="bytes").startswith("You gave 3.00 GiB.")
    assert expect_number(0.3, 0.5, unit="share").startswith("You gave 30 %.")
    assert "number of GPUs" in expect_number("x", 5, unit="GPUs")
    assert expect_number(0, 0) is None
    assert expect_number(0.1, 0) == "You gave 0.1. The right answer is less."


def test_choices():
    choices = ("weights", "activations")
    assert expect_choice("Activations", "activations", choices) is None
    assert expect_choice("weights", "activations", choices) == (
        "You chose 'weights'. It is another one."
    )
    assert "Did you mean 'activations'" in expect_choice("activation", "activations", choices)
    assert "You gave 5" in expect_choice(5, "activations", choices)


# --- hints, solutions, finding -------------------------------------------------------------


def test_hints_come_one_at_a_time(capsys):
    exercise = value_exercise()
    shown = []
    for _ in range(3):
        exercise.hint()
        shown.append(capsys.readouterr().out)
    assert "hint 1 of 2" in shown[0]
    assert "Count the tensors." in shown[0]
    assert "There are four." not in shown[0]
    assert "There are four." in shown[1]
    assert "no more hints" in shown[2]


def test_solution_shows_its_source(capsys):
    value_exercise().solution()
    shown = capsys.readouterr().out
    assert "def sixteen():\n        # Four tensors of four bytes." in shown


@pytest.mark.parametrize("id", ["6-1", "06", "06-0", "06-1 ", "\u0660\u0666-1"])
def test_a_malformed_id_is_refused(id):
    with pytest.raises(InputError, match="called like '06-1'"):
        Exercise(id, question="", hints=(), solution=sixteen, check=print)


@pytest.fixture
def one_lesson(monkeypatch):
    module = types.SimpleNamespace(EXERCISES=(value_exercise(),))
    monkeypatch.setitem(sys.modules, "labkit.exercises.lesson_01", module)
    monkeypatch.setattr(exercises, "lessons_with_exercises", lambda: ["01"])


def test_exercises_are_found_by_id_with_all_hints_to_come(one_lesson, capsys):
    first = exercises.exercise("01-1")
    first.hint()
    again = exercises.exercise("01-1")
    capsys.readouterr()
    again.hint()
    assert "hint 1 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("id", "message"),
    [("01-9", "Did you mean '01-1'"), ("99-1", "lessons with exercises are 01"), (7, "are 01")],
)
def test_an_unknown_exercise_is_refused(one_lesson, id, message):
    with pytest.raises(InputError, match=message):
        exercises.exercise(id)


def test_lessons_with_exercises_are_those_with_a_module(tmp_path, monkeypatch):
    for name in ("lesson_06.py", "lesson_00.py", "checks.py", "lesson_x.py"):
        (tmp_path / name).touch()
    monkeypatch.setattr(exercises, "__path__", [str(tmp_path)])
    assert exercises.lessons_with_exercises() == ["00", "06"]


# --- comparing tensors ---------------------------------------------------------------------


def test_shapes_that_differ_are_named():
    ours, theirs = [torch.ones(2), torch.ones(1)], [torch.ones(2), torch.ones(())]
    with pytest.raises(InputError, match=r"tensor 2 of 2 has the shape \(1,\), its reference \(\)"):
        relative_error(ours, theirs)


def test_complex_tensors_are_not_compared():
    ours, theirs = torch.tensor([1 + 5j]), torch.tensor([1 + 0j])
    for pair in ((ours, theirs), (ours, theirs.real), (ours.real, theirs)):
        with pytest.raises(InputError, match="view_as_real"):
            relative_error(*pair)
    assert relative_error(torch.view_as_real(ours), torch.view_as_real(theirs)) == 5
