"""What the tracker sees, what it must not change, and what it leaves behind."""

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import labkit as lab
from gpumem.out_of_memory import SimulatedOutOfMemory
from gpumem.trace import Category, Phase
from gpumem.tracker import track
from gpumem.units import MIB

MEGA = 1 << 18  # float32 numbers in a MiB


def peak(tracker):
    return tracker.trace().peak()


def test_a_view_counts_once_and_keeps_its_storage_alive():
    with track() as tracker:
        whole = torch.zeros(MEGA)
        part = whole[:10].view(2, 5)
        del whole
        gc.collect()
        assert tracker.live_bytes["cpu"] == MIB
        del part
        assert tracker.live_bytes["cpu"] == 0
    assert tracker.trace().peak_bytes == MIB


def test_resizing_a_storage_is_seen():
    with track() as tracker:
        torch.zeros(MEGA, device="meta")  # holds nothing
        tensor = torch.zeros(MEGA)
        tensor.untyped_storage().resize_(0)
        assert tracker.live_bytes["cpu"] == 0
        tensor.untyped_storage().resize_(2 * MIB)
        assert tracker.live_bytes["cpu"] == 2 * MIB
        grown, result, square = torch.empty(0), torch.empty(0), torch.ones(512, 512)
        grown.resize_(MEGA)
        torch.mm(square, square, out=result)
        assert tracker.live_bytes["cpu"] == 5 * MIB
    del tensor
    changes = [event.change_bytes for event in tracker.trace().events if event.change_bytes]
    assert changes[:3] == [MIB, -MIB, 2 * MIB]


def test_tied_weights_count_once():
    with track() as tracker:
        first, second = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)
        second.weight = first.weight
        second(first(torch.zeros(1, 512))).sum().backward()
        live = tracker.live_by_category()
    assert live[Category.WEIGHTS] == live[Category.GRADIENTS] == MIB


def test_what_is_saved_for_backward_is_an_activation():
    with track() as tracker:
        layer = nn.Linear(64, 64)
        x = torch.zeros(4096, 64)  # saved by the layer, for its weight's gradient
        y = layer(x).relu()  # saved by relu, its own result
        noise = torch.zeros(4096, 64)  # saved by nobody
        live = tracker.live_by_category()
    assert live[Category.ACTIVATIONS] == 2 * MIB
    assert live[Category.TEMPORARY] == MIB
    del x, y, noise


def test_recomputed_activations_are_activations_too():
    def layer(x):
        return F.relu(x * 2).sin().cos()

    with track() as tracker:
        x = torch.zeros(MEGA, requires_grad=True)
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    # relu's result, sin's and cos's inputs: all three live again at once, beside x.
    assert peak(tracker).by_category[Category.ACTIVATIONS] >= 3 * MIB
    operators = {s.operator for s in tracker.trace().storages if s.category == "activations"}
    assert {"relu", "sin"} <= operators


def test_phases_modules_and_names():
    with track() as tracker:
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()
    storages = tracker.trace().storages
    phases = {storage.phase for storage in storages}
    assert phases >= {Phase.SETUP, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    assert any(s.module == "0" and s.operator == "addmm" for s in storages)
    names = {s.name for s in storages if s.category is Category.GRADIENTS}
    assert names == {"0.weight", "0.bias"}
    with track() as tracker:  # two models do not share names
        a, b = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))
        b(a(torch.zeros(1, 8)))
    names = {s.name for s in tracker.trace().storages if s.category is Category.WEIGHTS}
    assert names == {"0.weight", "0.bias", "Sequential.0.weight", "Sequential.0.bias"}


def test_parameters_outside_any_module_are_found_through_the_optimizer():
    with track() as tracker:
        weight = torch.zeros(MEGA, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        (weight * 2).sum().backward()
        optimizer.step()
        live = tracker.live_by_category()
    assert live[Category.WEIGHTS] == live[Category.GRADIENTS] == MIB


@pytest.mark.parametrize("inplace_target", ["input", "result"])
def test_autograd_still_refuses_a_changed_tensor(inplace_target):
    """Saved-tensor hooks turn this check off; the tracker must put it back."""
    with track():
        x = torch.randn(8, requires_grad=True)
        hidden = x * 1.0
        result = hidden.exp() if inplace_target == "result" else hidden.pow(2)
        (result if inplace_target == "result" else hidden).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_gradients_are_the_same_to_the_bit_with_and_without():
    def gradients(context):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        with context:
            F.cross_entropy(model(torch.randn(16, 64)), torch.arange(16) % 8).backward()
        return [p.grad for p in model.parameters()]

    plain = gradients(torch.enable_grad())
    assert all(map(torch.equal, plain, gradients(track())))


def test_the_budget_raises_before_and_frees_after():
    with track(budget_bytes=4 * MIB) as tracker:
        held = torch.zeros(3 * MEGA)
        with pytest.raises(SimulatedOutOfMemory, match=r"Tried to allocate 2\.00 MiB") as caught:
            torch.zeros(2 * MEGA)
        assert caught.value.requested_bytes == 2 * MIB
        assert isinstance(caught.value, torch.OutOfMemoryError)
        assert tracker.failure.operator == "zeros"
        assert tracker.live_bytes["cpu"] == 3 * MIB
        torch.zeros(MEGA)  # what still fits, fits
    assert tracker.trace().peak_bytes == 4 * MIB
    del held


def test_everything_is_unhooked_afterwards():
    layer = nn.Linear(8, 8)
    before = torch.UntypedStorage.resize_, torch.autograd.graph.saved_tensors_hooks.__enter__
    tracker = track()

    def failing():
        with tracker:
            layer(torch.zeros(1, 8)).sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    recorded = tracker.trace()
    layer(torch.zeros(1, 8)).sum().backward()
    gc.collect()
    assert tracker.trace() == recorded
    after = torch.UntypedStorage.resize_, torch.autograd.graph.saved_tensors_hooks.__enter__
    assert after == before
    assert not layer.weight._post_accumulate_grad_hooks


def test_a_failing_forward_unwinds_the_module_path():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("broken")

    with track() as tracker:
        with pytest.raises(ValueError, match="broken"):
            nn.Sequential(nn.Linear(4, 4), Broken())(torch.zeros(1, 4))
        assert tracker.module_path == ""


def test_products_that_are_added_in_place_count():
    total = torch.zeros(8, 16)
    with track(work=True) as tracker:
        total.addmm_(torch.ones(8, 4), torch.ones(4, 16))
    assert tracker.trace().flops == 2 * 8 * 4 * 16


def test_flops_are_pytorchs_own():
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Sequential(nn.Linear(64, 128), nn.Conv1d(16, 16, 3), nn.Linear(126, 8))
    x = torch.randn(4, 16, 64)
    with FlopCounterMode(display=False) as truth:
        model(x).sum().backward()
    with track(work=True) as tracker:
        model(x).sum().backward()
    assert tracker.trace().flops == truth.get_total_flops() > 0


def test_wrapper_subclasses_count_what_they_hold():
    from torch.testing._internal.two_tensor import TwoTensor

    with track() as tracker:
        both = TwoTensor(torch.zeros(MEGA), torch.zeros(MEGA))
        result = both + 1
        assert tracker.live_bytes["cpu"] == 4 * MIB
    del both, result


def test_hooks_and_modes_of_a_suspended_generator_survive_the_tracker():
    from torch.utils.flop_counter import FlopCounterMode

    packed, counted = [], []

    def experiment():
        layer = nn.Linear(16, 16)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(step) or t.detach(), lambda t: t
        )
        with hooks, FlopCounterMode(display=False) as flops:
            while True:
                before = flops.get_total_flops()
                layer(torch.ones(4, 16)).sum().backward()
                counted.append(flops.get_total_flops() - before)
                yield

    running = experiment()
    with track() as tracker:
        step = 1
        next(running)
    recorded = tracker.trace()
    step = 2
    next(running)
    assert packed.count(1) == packed.count(2) > 0
    assert counted[0] == counted[1] > 0
    assert tracker.trace() == recorded
    running.close()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_weights_replaced_after_the_first_forward_are_weights():
    with track() as tracker:
        layer = nn.Linear(512, 512, bias=False)
        layer(torch.zeros(1, 512))
        layer.weight.data = torch.ones(512, 512)
        layer(torch.zeros(1, 512))
        live = tracker.live_by_category()
    assert live == {Category.WEIGHTS: MIB}


def test_a_tracker_is_used_once():
    tracker = track()
    with tracker:
        pass
    with pytest.raises(RuntimeError, match="records once"):
        tracker.__enter__()


def test_a_failed_optimizer_step_does_not_colour_the_next_forward():
    def broken():
        raise ValueError("closure")

    with track() as tracker:
        layer = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        with pytest.raises(ValueError, match="closure"):
            optimizer.step(broken)
        layer(torch.zeros(1, 8))
        assert tracker.phase is Phase.FORWARD


@pytest.mark.parametrize("foreach", [False, True])
def test_an_update_in_place_moves_what_it_writes(foreach):
    parameter = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=foreach)
    parameter.grad = torch.ones(1000)
    with track(work=True) as tracker:
        optimizer.step()
    assert tracker.work_done().moved_bytes == 3 * 4000  # both read, one written


def test_making_a_model_is_no_steps_work():
    def train(device):
        model = torch.nn.Linear(512, 512).to(device)
        while True:
            loss = model(torch.ones(1, 512, device=device)).sum()
            loss.backward()
            model.zero_grad()
            yield loss

    one, two = (lab.simulate(train, gpu="t4", steps=steps) for steps in (1, 2))
    assert one.flops == two.flops
    assert one.moved_bytes == pytest.approx(two.moved_bytes, rel=0.01)  # its input is made before
