"""Lesson 10's exercises: stubs, solutions, and the mistakes that people make."""

import pytest
import torch
from exercise_rules import stub_and_solution
from torch import nn
from torch.utils.checkpoint import checkpoint

from labkit.exercises import Status, exercise, lesson_10


def outcome(id, answer):
    return exercise(id).check(answer)


def not_yet(id, answer):
    found = outcome(id, answer)
    assert found.status is Status.NOT_YET
    return found.message


test_stub_and_solution = stub_and_solution("10")


def test_a_function_that_returns_nothing_is_no_attempt():
    assert outcome("10-2", lambda x: ...).status is Status.NOT_ATTEMPTED


def test_the_first_answer_is_what_tracing_gives():
    def pick(x):
        return x.sum() if x.sum() > 0 else torch.zeros(())

    with pytest.warns(torch.jit.TracerWarning):
        traced = torch.jit.trace(pick, torch.ones(3), check_trace=False)
    assert float(traced(-torch.ones(3))) == lesson_10.traced_gives()


@pytest.mark.parametrize(
    ("answer", "says"), [(0, "which operators did it write down"), (3, "less"), ("x", "number")]
)
def test_wrong_numbers(answer, says):
    assert says in not_yet("10-1", answer)


def with_branch(x):
    return x / x.norm() if x.norm() > 1 else x


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda x: x / x.norm(), "For a short vector"),
        (lambda x: x, "For a long vector"),
        (lambda x: x.clamp(max=0.5), "For a long vector"),
        (lambda x: x.clamp(-0.5, 0.5), "For a long vector"),
        (lambda x: x / x.abs().sum().clamp(min=1), "For a long vector"),
        (lambda x: x / x.norm().clamp(min=1) if len(x) == 4 else x, "-8.0, 0.25"),
        (lambda x: 1.0, "A tensor of shape (4,)"),
        (lambda x: x / max(x.norm().item(), 1.0), "torch.export does not take it"),
        (with_branch, "torch.export does not take it"),
        (lambda x: x.nrm(), "AttributeError"),
    ],
)
def test_functions_that_do_not_do(answer, says):
    assert says in not_yet("10-2", answer)


def test_a_condition_that_export_knows_will_do():
    def portable(x):
        return torch.cond(x.norm() > 1, lambda x: x / x.norm(), lambda x: x.clone(), (x,))

    assert outcome("10-2", portable).status is Status.CORRECT


def test_training_mistakes():
    def other(device, batch_size=4, steps=3):
        yield from lesson_10.wasteful(device, batch_size, steps, activate=nn.functional.gelu)

    def recomputing(device, batch_size=4, steps=3):
        torch.manual_seed(0)
        sizes = ((64, 512), (512, 64))
        ups, downs = ([nn.Linear(a, b).to(device) for _ in range(6)] for a, b in sizes)
        parameters = [p for layer in ups + downs for p in layer.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=1e-2)
        for _ in range(steps):
            x = torch.randn(batch_size, 256, 64, device=device)
            for up, down in zip(ups, downs, strict=True):

                def block(x, up=up, down=down):
                    h = up(x)
                    return x + down(h * torch.sigmoid(h))

                x = checkpoint(block, x, use_reentrant=False)
            loss = x.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    assert "at most" in not_yet("10-3", lesson_10.wasteful)
    assert "should still be" in not_yet("10-3", other)
    assert "more arithmetic" in not_yet("10-3", recomputing)
