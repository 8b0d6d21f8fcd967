"""CUDA's autocast rules on the CPU: which type each operator gives, and that they go away."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpumem.fake_cuda.autocast import FLOAT32, cuda_autocast_rules
from gpumem.fake_cuda.fake_tensors import GPU_DEVICE, fake_tensors
from gpumem.hardware.catalogue import gpu
from gpumem.trace import Category
from gpumem.tracker import track

HALF, FULL = torch.bfloat16, torch.float32
TARGET = torch.tensor([0, 1, 0, 1])

# Operator, its result's type under CUDA's rules, and under the CPU's own (input in half precision).
TABLE = {
    "linear": (lambda x, w: F.linear(x, w), HALF, HALF),
    "matmul": (lambda x, w: x @ w, HALF, HALF),
    "bmm": (lambda x, w: torch.bmm(x[None], w[None]), HALF, HALF),
    "attention": (lambda x, w: F.scaled_dot_product_attention(*3 * [x[None]]), HALF, HALF),
    "relu": (lambda x, w: F.relu(x), HALF, HALF),
    "gelu": (lambda x, w: F.gelu(x), HALF, HALF),
    "silu": (lambda x, w: F.silu(x), HALF, HALF),
    "add": (lambda x, w: x + x, HALF, HALF),
    "mean": (lambda x, w: x.mean(), HALF, HALF),
    "softmax": (lambda x, w: F.softmax(x, -1), FULL, HALF),
    "log_softmax": (lambda x, w: F.log_softmax(x, -1), FULL, HALF),
    "layer_norm": (lambda x, w: F.layer_norm(x, (4,)), FULL, HALF),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,)), FULL, HALF),
    "group_norm": (lambda x, w: F.group_norm(x, 2), FULL, HALF),
    "exp": (lambda x, w: x.exp(), FULL, HALF),
    "log": (lambda x, w: x.log(), FULL, HALF),
    "pow": (lambda x, w: x.pow(2), FULL, HALF),
    "rsqrt": (lambda x, w: x.rsqrt(), FULL, HALF),
    "sum": (lambda x, w: x.sum(), FULL, HALF),
    "cumsum": (lambda x, w: x.cumsum(0), FULL, HALF),
    "softplus": (lambda x, w: F.softplus(x), FULL, HALF),
    "norm": (lambda x, w: x.norm(), FULL, HALF),
    "logsumexp": (lambda x, w: x.logsumexp(-1), FULL, HALF),
    "interpolate": (lambda x, w: F.interpolate(x[None], scale_factor=2.0), FULL, HALF),
    "huber_loss": (lambda x, w: F.huber_loss(x, x), FULL, None),
    "cross_entropy": (lambda x, w: F.cross_entropy(x, TARGET), FULL, None),
    "mse_loss": (lambda x, w: F.mse_loss(x, x), FULL, None),
}


def given(name):
    x = torch.ones(4, 4, dtype=HALF)
    with torch.autocast("cpu", dtype=HALF):
        return TABLE[name][0](x, x.clone()).dtype


def table():
    return {name: given(name) for name in TABLE}


@pytest.mark.parametrize("name", TABLE)
def test_types_inside_and_outside(name):
    _, as_cuda, as_cpu = TABLE[name]
    before = given(name)
    assert as_cpu in (before, None)
    with cuda_autocast_rules():
        assert given(name) == as_cuda
    assert given(name) == before


def test_the_cpus_rules_are_back_after_an_error():
    before = table()
    with pytest.raises(ZeroDivisionError), cuda_autocast_rules():
        raise ZeroDivisionError
    assert table() == before


def test_the_list_is_the_installed_pytorchs_own():
    """The macros that CUDA's autocast is built from ship with every PyTorch as a C++ header."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    macros = dict(
        re.findall(r"#define (AT_FORALL_FP32\w*)\(_\)(.*?)\n\n", header.read_text(), re.DOTALL)
    )
    assert set(macros) == {"AT_FORALL_FP32", "AT_FORALL_FP32_SET_OPT_DTYPE"}
    operators = {name for body in macros.values() for name in re.findall(r"_\((\w+)", body)}
    assert {"layer_norm", "softmax", "sum"} <= operators
    assert operators - set(FLOAT32) == set()


def test_float64_and_whole_numbers_are_left_alone():
    with cuda_autocast_rules(), torch.autocast("cpu", dtype=HALF):
        assert torch.ones(2, dtype=torch.float64).exp().dtype == torch.float64
        assert torch.ones(2, dtype=torch.int64).sum().dtype == torch.int64
        assert torch.ones(2, dtype=torch.int64).cumsum(0).tolist() == [1, 2]


def test_arguments_reach_the_operator():
    x = torch.randn(3, 4, dtype=HALF)
    with cuda_autocast_rules(), torch.autocast("cpu", dtype=HALF):
        assert torch.equal(x.sum(dim=1, keepdim=True), x.float().sum(dim=1, keepdim=True))
        assert torch.equal(x.softmax(0), x.float().softmax(0))
        assert torch.equal(x.pow(3), x.float().pow(3))
        assert torch.equal(F.layer_norm(x, (4,), eps=0.1), F.layer_norm(x.float(), (4,), eps=0.1))
        assert x.sum(dtype=torch.float64).dtype == torch.float64


def test_fake_tensors_follow_the_rules_and_hold_the_same_bytes():
    def step():
        layers = nn.LayerNorm(16), nn.Linear(16, 16), nn.Softmax(-1), nn.Linear(16, 4)
        with torch.autocast("cpu", dtype=HALF):
            logits = nn.Sequential(*layers)(torch.ones(16, 16))
            loss = F.cross_entropy(logits, torch.zeros(16, dtype=torch.long))
        loss.backward()
        return logits.dtype, loss.dtype

    with cuda_autocast_rules(), track() as real:
        expected = step()
    with fake_tensors(gpu("t4")), track() as fake:
        assert step() == expected
    assert fake.trace().peak_bytes == real.trace().peak_bytes
    with fake_tensors(None), track() as cpu:
        step()
    assert cpu.trace().peak_bytes < fake.trace().peak_bytes  # float32 results are kept
    assert given("softmax") == HALF


# --- operators that keep other tensors on CUDA than on the CPU ----------------------------------

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
