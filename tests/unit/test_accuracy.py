"""The tracker and the simulation against PyTorch's own allocator, set-up by set-up."""

import gc

import pytest
import torch

from benchmarks.setups import SETUPS
from labkit.measure import _cpu_record, allocator_peak
from labkit.memory import Category
from labkit.simulate import fake_tensors
from labkit.tracker import track

CPU = torch.device("cpu")
# Its kernels' workspaces are not tensors; the tracker's docstring says so.
WORKSPACES = {"convolutions"}


def tracked(name: str, *, fake: bool):
    gc.collect()
    if fake:
        with fake_tensors(as_cuda=False), track(work=True) as tracker:
            for _ in SETUPS[name](CPU):
                pass
    else:
        with track(work=True) as tracker:
            for _ in SETUPS[name](CPU):
                pass
    return tracker.trace()


def test_there_are_enough_set_ups():
    assert len(SETUPS) - len(WORKSPACES) >= 12


@pytest.mark.parametrize("name", SETUPS)
def test_tracked_simulated_and_allocated_agree(name):
    real = tracked(name, fake=False)
    fake = tracked(name, fake=True)
    gc.collect()
    with _cpu_record() as record:
        for _ in SETUPS[name](CPU):
            pass
    truth = allocator_peak(record)
    peak = real.peak()
    assert sum(peak.by_category.values()) == peak.total_bytes
    assert peak.total_bytes == pytest.approx(truth, rel=0.02 if name in WORKSPACES else 0.005)
    if name in WORKSPACES:
        assert peak.total_bytes < truth
    assert fake.peak_bytes == pytest.approx(peak.total_bytes, rel=0.005)
    assert fake.flops == real.flops > 0


def numel(parameters) -> int:
    return sum(p.numel() for p in parameters)


@pytest.mark.parametrize("fake", [False, True])
def test_bytes_per_parameter_are_exact(fake):
    """Weights, gradients and AdamW's two states: 4 + 4 + 8 bytes per parameter, to the byte."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 32))
    count, tensors = numel(model.parameters()), len(list(model.parameters()))

    def step(model, device=CPU):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        return optimizer

    def totals(tracker):
        live = tracker.live_by_category()
        return live[Category.WEIGHTS], live[Category.GRADIENTS], live[Category.OPTIMIZER]

    if fake:
        with fake_tensors(as_cuda=False), track() as tracker:
            model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 32))
            kept = step(model)
            measured = totals(tracker)
    else:
        with track() as tracker:
            kept = step(model)
            measured = totals(tracker)
    assert kept is not None
    # AdamW also keeps one float32 step counter per tensor.
    assert measured == (4 * count, 4 * count, 8 * count + 4 * tensors)
