"""Exercises: right, wrong, untouched and broken answers each get the outcome they deserve."""

import gc
import inspect
import sys
import weakref
from dataclasses import replace

import pytest
import torch

import labkit
from gpumem.inputs import InputError, shown
from gpumem.runs import OutOfMemory, Run
from labkit.exercises import checks, engine
from labkit.exercises.checks import (
    Correct,
    arithmetic_limit,
    call,
    expect_limit,
    expect_number,
    memory_target,
    reference_run,
    run_experiment,
    same_gradients,
    same_losses,
    settings_of,
    whole_number,
)
from labkit.exercises.engine import Exercise, Status


def sixteen():
    # Four tensors of four bytes.
    return 4 * 4


def value_exercise(check=lambda answer: expect_number(answer, 16, unit="bytes_per_parameter")):
    return Exercise("01-1", sixteen, check)


def doubled(n):
    return 2 * n


def function_exercise():
    def check(answer):
        return expect_number(call(answer, 21), 42)

    return Exercise("01-2", doubled, check)


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
        run = run_experiment(answer, mode="measure", batch_size=4, steps=2)
        reference = reference_run(train, mode="measure", batch_size=4, steps=2)
        return memory_target(run, most_bytes) or same_losses(run, reference)

    return Exercise("01-3", train, check)


# --- outcomes ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [value_exercise, function_exercise, experiment_exercise])
def test_solution_is_correct_and_stub_is_not_attempted(make, capsys):
    exercise = make()
    assert exercise.check(exercise.right_answer).status == Status.CORRECT
    for stub in (..., None, {"a": ..., "b": ...}):
        assert exercise.check(stub).status == Status.NOT_ATTEMPTED
    assert exercise.check().status == Status.NOT_ATTEMPTED
    shown = capsys.readouterr().out
    assert f"correct] Exercise {exercise.id}" in shown
    assert "not attempted" in shown


def returns_nothing(n):
    pass


def no_yield(device, batch_size=4):
    pass


def dots(device, batch_size=4):
    yield ...


@pytest.mark.parametrize(
    ("make", "answer", "says"),
    [
        (function_exercise, returns_nothing, "`returns_nothing` returns nothing yet"),
        (experiment_exercise, no_yield, "`no_yield` has no `yield` yet"),
        (experiment_exercise, dots, "yields no loss yet"),
    ],
)
def test_unfinished_functions_are_no_attempt(make, answer, says):
    outcome = make().check(answer)
    assert outcome.status == Status.NOT_ATTEMPTED
    assert says in outcome.message


@pytest.mark.parametrize("answer", [42, train("cpu")])
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


def test_errors_of_an_experiment_are_told():
    def other_shapes(device, batch_size=4):
        yield torch.ones(2, 3) @ torch.ones(2, 3)

    def other_parameter(device, batch=4):
        yield torch.ones(())

    assert "shapes cannot be multiplied" in experiment_exercise().check(other_shapes).message
    outcome = experiment_exercise().check(other_parameter)
    assert outcome.message.startswith("Your answer cannot be used: ")
    assert "batch_size" in outcome.message


class Unprintable:
    def __call__(self, n):
        raise ValueError

    def __repr__(self):
        raise RuntimeError


@pytest.mark.parametrize("make", [lambda: 5, lambda: 10**5000, Unprintable])
def test_a_check_that_stumbles_over_an_answer_does_not_raise(make):
    answer = make()  # not by pytest, which prints its parameters
    outcome = value_exercise(check=lambda answer: answer["a"]).check(answer)
    assert outcome.status == Status.NOT_YET
    for exercise in (value_exercise(), function_exercise(), experiment_exercise()):
        assert exercise.check(answer).status != Status.CORRECT
    assert shown(answer) in ("5", f"a {type(answer).__name__} that cannot be written out")


def test_leaving_the_program_is_a_wrong_answer_and_interrupting_interrupts():
    def leave(n):
        sys.exit(n)

    def interrupt(n):
        raise KeyboardInterrupt

    outcome = function_exercise().check(leave)
    assert outcome.status == Status.NOT_YET
    assert outcome.message.startswith("Your function raised SystemExit: 21")
    with pytest.raises(KeyboardInterrupt):
        function_exercise().check(interrupt)


def test_a_failed_answer_keeps_no_tensor_alive():
    alive = []

    def mine(n):
        tensor = torch.ones(4)
        alive.append(weakref.ref(tensor))
        kept = torch.OutOfMemoryError("CUDA out of memory.")
        errors.append(kept)  # as a notebook's own record of errors would
        raise kept

    errors = []
    assert "CUDA out of memory." in function_exercise().check(mine).message
    gc.collect()
    assert errors
    assert alive[0]() is None


# --- comparing runs ------------------------------------------------------------------------


def a_run(peak_bytes=100, **changes):
    shares = {"weights": peak_bytes}
    fixed = {"name": "a", "parameters": {}, "mode": "simulated", "device": "NVIDIA T4"}
    return Run(**fixed, peak_bytes=peak_bytes, by_category=shares, **changes)


OOM = OutOfMemory(5, 100, 102, {"weights": 100}, 1, "forward", "", "aten::mm")


def test_runs_are_compared():
    assert memory_target(a_run(100), 100) is None
    assert memory_target(a_run(101), 100) == (
        "Your peak is 101 B, the target at most 100 B. The largest part of your peak is weights, "
        "with 101 B."
    )
    reference = a_run(losses=(2.0, 1.0), flops=100)
    assert same_losses(a_run(losses=(2.00001, 1.0)), reference) is None
    assert "step 2 is 1.1" in same_losses(a_run(losses=(2.0, 1.1)), reference)
    assert "step 1 is nan" in same_losses(a_run(losses=(float("nan"), 1.0)), reference)
    nothing_computed = replace(a_run(losses=()), mode="phantom")
    assert "computes no losses" in same_losses(nothing_computed, nothing_computed)
    assert "has 1 losses, 2 are expected" in same_losses(a_run(losses=(2.0,)), reference)
    assert arithmetic_limit(a_run(flops=109), reference, 0.1) is None
    assert "the limit is 10%" in arithmetic_limit(a_run(flops=120), reference, 0.1)
    assert "5% less arithmetic" in arithmetic_limit(a_run(flops=95), reference, 0.1)
    for problem in (memory_target(a_run(oom=OOM), 200), same_losses(a_run(oom=OOM), reference)):
        assert "did not fit" in problem


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (40, None),
        (
            50,
            "50 B allocated, 50 B reserved; there are 45 B. That does not fit. Less",
        ),
        (20, "But 30 rows fit, too. More"),
        (25, "25 is no multiple of 10"),
    ],
)
def test_the_last_number_that_fits(answer, says):
    def run_of(rows):
        return a_run(rows, capacity_bytes=45)

    advice = {"too_much": "Less", "too_little": "More"}
    result = expect_limit(answer, "rows", run_of, most=99, step=10, **advice)
    assert says in result if says else isinstance(result, Correct)


def test_a_reference_run_knows_no_budget_and_is_kept():
    def mine(device, batch_size=4):
        yield from train(device, batch_size)

    with labkit.pretend(budget_bytes=1):
        assert run_experiment(mine, mode="measure", steps=2).oom is not None
        run = reference_run(mine, mode="measure", steps=2)
    assert run.oom is None
    assert reference_run(mine, mode="measure", steps=2) is run


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

    def step_through(wrapped):
        for loss in wrapped("cpu"):
            del loss

    monkeypatch.setitem(checks.MODES, "simulate", step_through)
    run_experiment(experiment, mode="simulate")
    assert lives == [[], [False], [False, False]]


# --- comparing tensors ---------------------------------------------------------------------


def weighted(x, y, labels):
    return (x * y)[labels].sum()


def test_gradients_are_compared_one_by_one():
    x, y, labels = torch.arange(3.0), torch.ones(3), torch.tensor([0, 1])

    def problem(answer):
        return same_gradients(answer, weighted, x, y, labels)

    assert problem(lambda x, y, labels: (x[labels] * y[labels]).sum().reshape(1)) is None
    assert "result is 100.0% off" in problem(lambda *inputs: 2 * weighted(*inputs))
    assert "no gradient of y" in problem(lambda x, y, labels: weighted(x, y.detach(), labels))
    assert "gradient of x is" in problem(
        lambda x, y, labels: weighted(x, y, labels) + x[0] * x.sum().detach()
    )
    assert "has the shape (2,), not ()" in problem(lambda x, y, labels: (x * y)[labels])
    assert "under no_grad" in problem(lambda *inputs: weighted(*inputs).detach())


# --- values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (103, "You gave 103. The right answer is less."),
        (-100, "You gave -100. The right answer is more."),
        (0, "You gave 0. The right answer is more."),
        (102400, "factor of 1024, a binary prefix"),
        (0.1, "factor of 1000, a decimal prefix"),
        (107.374, "factor of 1024³/1000³, GiB against GB"),
        ("a hundred", "you gave 'a hundred'"),
        (True, "you gave True"),
        (float("nan"), "you gave nan"),
    ],
)
def test_wrong_numbers_are_explained(answer, message):
    assert message in expect_number(answer, 100)


@pytest.mark.parametrize("number", [200, 200.5, torch.tensor([200])])
def test_a_known_slip_is_named(number):
    assert expect_number(98.1, 100) is None
    slips = {201.5: "No.", 200: "That is twice as much.", 100.5: "Right all the same."}
    assert expect_number(number, 100, slips=slips).endswith(". That is twice as much.")
    assert expect_number(100.5, 100, slips=slips) is None
    assert expect_number(210, 100, slips=slips) == "You gave 210. The right answer is less."


def test_numbers_show_their_unit():
    assert expect_number(3 << 30, 5 << 30, unit="bytes").startswith("You gave 3.00 GiB.")
    assert expect_number(0.3, 0.5, unit="share").startswith("You gave 30 %.")
    assert "number of GPUs" in expect_number("x", 5, unit="GPUs")


def test_whole_numbers():
    assert whole_number(torch.tensor(8.0), "the batch") == 8
    for answer, says in ((8.5, "a whole number, not 8.5"), ("8", "not '8'"), (10, "from 1 to 9")):
        with pytest.raises(InputError, match=says):
            whole_number(answer, "the batch", most=9)


def test_settings_are_those_of_the_exercise():
    assert settings_of({"Batch-Size": 2}, ["batch_size"]) == {"batch_size": 2}
    with pytest.raises(InputError, match="Did you mean 'batch_size'"):
        settings_of({"batchsize": 2}, ["batch_size", "chunk"])
    with pytest.raises(InputError, match="a dictionary is asked for, not 5"):
        settings_of(5, ["batch_size"])


# --- solutions, finding --------------------------------------------------------------------


def test_solution_shows_its_source(capsys):
    value_exercise().solution()
    shown = capsys.readouterr().out
    assert "One way to do it:\n    def sixteen():\n        # Four tensors of four bytes." in shown


def test_solution_shows_the_imports_that_the_notebook_lacks(capsys):
    def needy(n):
        return [Run(n, torch.nn, sys.path, train, n) for n in range(n)]

    Exercise("01-1", needy, call).solution()
    imports = ["from gpumem.runs import Run", "import sys", "import torch"]
    imports += [f"from {__name__} import train", "def needy(n):"]
    shown = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert shown[2 : 2 + len(imports)] == imports


@pytest.mark.parametrize(
    ("id", "message"),
    [("00-9", "Did you mean '00-"), ("99-1", "unknown lesson '99'"), (7, "unknown lesson '7'")],
)
def test_an_unknown_exercise_is_refused(id, message):
    with pytest.raises(InputError, match=message):
        engine.exercise(id)
