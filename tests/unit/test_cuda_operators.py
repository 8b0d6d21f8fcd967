"""What CUDA's kernels keep where the CPU's keep something else."""

import pytest
import torch
from torch.nn import functional as F

from labkit.catalogue import gpu
from labkit.fake_mode import GPU_DEVICE, fake_tensors
from labkit.memory import Category
from labkit.tracker import track

SIDE = 256


def kept_bytes(device, card):
    with fake_tensors(card), track(device=str(device)) as tracker:
        x = torch.ones(SIDE, SIDE, device=device, requires_grad=True)
        loss = F.dropout(x, 0.1).sum()
        kept = tracker.live_by_category().get(Category.ACTIVATIONS, 0)
        loss.backward()
        assert x.grad.shape == x.shape
    return kept


def test_dropout_keeps_a_byte_per_element_on_cuda():
    assert kept_bytes(GPU_DEVICE, gpu("t4")) == SIDE * SIDE


def test_dropout_keeps_a_mask_of_the_inputs_type_on_the_cpu():
    assert kept_bytes(torch.device("cpu"), None) == 4 * SIDE * SIDE
    assert kept_bytes(torch.device("cpu"), gpu("t4")) == 4 * SIDE * SIDE  # the host beside a GPU


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False)])
def test_dropout_that_drops_nothing_keeps_nothing(p, train):
    with fake_tensors(gpu("t4")), track(device=str(GPU_DEVICE)) as tracker:
        x = torch.ones(SIDE, SIDE, device=GPU_DEVICE, requires_grad=True)
        F.dropout(x, p, training=train).sum().backward()
    assert Category.ACTIVATIONS not in {s.category for s in tracker.trace().storages}


def test_pinning_is_a_copy_on_the_host():
    with fake_tensors(gpu("t4")), track(device="cpu") as tracker:
        plain = torch.ones(SIDE)
        pinned = plain.pin_memory()
        assert pinned.device.type == "cpu"
        assert pinned.device.index is None
        assert tracker.live_bytes["cpu"] == 2 * 4 * SIDE
        assert pinned.to(GPU_DEVICE, non_blocking=True).device == GPU_DEVICE


@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true")
def test_a_data_loader_with_pinned_memory_feeds_a_simulation():
    with fake_tensors(gpu("t4")):
        data = torch.utils.data.TensorDataset(torch.randn(16, 4))
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, pin_memory=True)
        shapes = [tuple(rows.to(GPU_DEVICE).shape) for [rows] in loader]
    assert shapes == [(4, 4)] * 4


def test_the_real_operators_are_back_afterwards():
    with pytest.raises(ZeroDivisionError), fake_tensors(gpu("t4")):
        raise ZeroDivisionError
    x = torch.ones(SIDE, requires_grad=True)
    with track(device="cpu") as tracker:
        F.dropout(x, 0.5).sum().backward()
    assert "native_dropout" not in {s.operator for s in tracker.trace().storages}
