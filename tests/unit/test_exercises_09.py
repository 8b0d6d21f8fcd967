"""Lesson 09's exercises: stubs, solutions, and the mistakes that people make."""

import inspect

import pytest
from exercise_rules import stub_and_solution

from labkit.exercises import Status, exercise, lesson_09


def outcome(id, answer):
    return exercise(id).check(answer)


def not_yet(id, answer):
    found = outcome(id, answer)
    assert found.status is Status.NOT_YET
    return found.message


test_stub_and_solution = stub_and_solution("09")


@pytest.mark.parametrize(
    ("answer", "says"),
    [(3.0, "the old and the new logits"), (1.7, "less"), (1.5 * 1024, "1024"), ("1.5", "number")],
)
def test_wrong_sizes(answer, says):
    assert says in not_yet("09-1", answer)


def mended(*replacements):
    """The solution with some of its mends taken back."""
    source = inspect.getsource(lesson_09.tight)
    for new, old in replacements:
        assert new in source
        source = source.replace(new, old)
    space = dict(vars(lesson_09))
    exec(source, space)
    return space["tight"]


def test_the_leaky_loop_itself_names_what_it_holds():
    message = not_yet("09-2", lesson_09.leaky)
    assert "more after step 7 than after step 3" in message
    assert "who keeps it?" in message


HOOK = [("append(result.norm().item())", "append(result)")]
OUTPUT = [("means.append(result.mean().item())", "means.append(result)")]
HISTORY = [(".square().mean().item()", ".square().mean()"), ("no_grad()", "enable_grad()")]


@pytest.mark.parametrize(
    ("mends", "shape"), [(HOOK, "(256, 512)"), (OUTPUT, "(256, 64)"), (HISTORY, "(256, 512)")]
)
def test_each_leak_that_is_left_is_named_by_its_shape(mends, shape):
    message = not_yet("09-2", mended(*mends))
    assert "more after step 7" in message
    assert shape in message


def test_detached_tensors_are_still_tensors():
    kept = mended(("append(result.norm().item())", "append(result.detach())"))
    assert "(256, 512)" in not_yet("09-2", kept)


def test_other_losses_are_another_training():
    slower = mended(("lr=1e-2", "lr=1e-3"))
    assert "should still be" in not_yet("09-2", slower)


NO_HOOK = [("norms.append(result.norm().item())", "None")]
NO_MEANS = [("means.append(result.mean().item())", "pass")]
NO_TOTAL = [("total = total + (model(x) - x).square().mean().item()", "model(x)")]


@pytest.mark.parametrize(
    ("mends", "says"),
    [
        (NO_HOOK, "`norms` is gone"),
        (NO_MEANS, "means and the validation's total"),
        (NO_TOTAL, "means and the validation's total"),
        (NO_HOOK + NO_MEANS + NO_TOTAL, "is gone"),
    ],
)
def test_records_are_kept(mends, says):
    assert says in not_yet("09-2", mended(*mends))


@pytest.mark.parametrize(
    "mends",
    [
        [("result.norm().item()", "float(torch.linalg.norm(result.detach().flatten()))")],
        [("result.mean().item()", "result.detach().numpy().mean()")],
        [("norms.append(result.norm().item())", "norms.append(result.detach().abs().max())")],
        [("(model(x) - x).square().mean().item()", "nn.functional.mse_loss(model(x), x)")],
        [("(result - x).square().mean()", "nn.MSELoss()(result, x)")],
        [("result.mean().item()", "torch.mean(input=result).item()")],
    ],
)
def test_records_of_other_kinds_will_do(mends):
    found = outcome("09-2", mended(*mends))
    assert found.status is Status.CORRECT, found.message
