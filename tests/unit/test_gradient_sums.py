"""Sums of gradients are made where a mode watches as they are where none does."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import labkit as lab
from gpumem.gradient_sums import as_without_mode


class Watched(TorchDispatchMode):
    """Note the sums that run while autograd is at work."""

    def __init__(self):
        super().__init__()
        self.sums = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        func = as_without_mode(func, args)
        if func.__name__.startswith("add") and torch._C._current_graph_task_id() != -1:
            self.sums.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


class Doubled(torch.autograd.Function):
    """Has a backward in Python that sums what it holds."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 1 * grad + 1 * grad


kept = []


class Kept(Doubled):
    """Keeps the gradient that its backward returns."""

    @staticmethod
    def backward(ctx, grad):
        kept.append(2 * grad)
        return kept[-1]


# Each takes a product, which is no leaf, to a loss.
CASES = {
    "two uses": lambda y: (y.sin() + y.cos()).sum(),
    "three uses": lambda y: (y.sin() + y.cos() + y.exp()).sum(),
    "gradient that is spread out": lambda y: (y + 3 * y).sum(),
    "beside itself": lambda y: (y + 3 * y).sin().sum(),
    "views": lambda y: y.view(2, -1).sin().sum() + y.view(4, -1).cos().sum(),
    "transposed": lambda y: (y.view(8, 8).t().sin() + y.view(8, 8).t().cos()).sum(),
    "slices": lambda y: y[:32].sin().sum() + y[32:].cos().sum(),
    "sums in Python": lambda y: (Doubled.apply(y) + Doubled.apply(y)).sin().sum(),
    "held elsewhere": lambda y: (y.cos() + Kept.apply(y)).sin().sum(),
}


@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_of_a_program_by_itself(case):
    def losses():
        return CASES[case](torch.ones(64, requires_grad=True) * 2)

    loss = losses()
    with torch.profiler.profile() as profile:
        loss.backward()
    names = [event.name for event in profile.events() if event.name.startswith("aten::add")]
    loss = losses()
    with Watched() as watched:
        loss.backward()
    assert watched.sums == [name.removeprefix("aten::") for name in names]


def test_second_order_sums_stay_as_they_are():
    y = torch.ones(64, requires_grad=True) * 2
    with Watched() as watched:
        torch.autograd.grad((y.sin() + y.cos()).sum(), y, create_graph=True)
    assert watched.sums == ["add"]


def at_sums(device):
    """Have the peak of a step where a gradient is summed."""
    weight = torch.ones(1 << 18, device=device, requires_grad=True)
    while True:
        product = weight * 2
        loss = product.neg().sum() + product.mul(3).sum()
        del product
        loss.backward()
        yield loss
        weight.grad = None


def test_the_peak_at_a_sum_is_the_allocators():
    truth = lab.measure(at_sums, track=False).peak_bytes
    for run in (lab.measure(at_sums), lab.simulate(at_sums)):
        assert run.peak_bytes == pytest.approx(truth, abs=64)  # numbers that only C++ sees


@pytest.mark.parametrize(
    ("use", "filled"),
    [
        (lambda y: y.topk(8).values.sum(), "scatter_.src"),
        (lambda y: y.view(8, 8).max(1).values.sum(), "scatter_.src"),
        (lambda y: y[torch.tensor([0, 3, 3])].sum(), "index_put_.default"),
    ],
    ids=["topk", "max", "index"],
)
def test_zeros_that_a_backward_fills_are_filled_in_place(use, filled):
    made = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            func = as_without_mode(func, args)
            made.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.ones(64, requires_grad=True)
    use(2 * x).backward()
    alone, x.grad = x.grad, None
    with Noted():
        use(2 * x).backward()
    assert filled in made
    assert torch.equal(x.grad, alone)
