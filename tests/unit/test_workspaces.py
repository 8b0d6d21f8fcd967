"""Workspaces of cuBLAS, flash attention and sums: how large, how many, and where in the log."""

import pytest
import torch
from torch import nn

import labkit as lab
from gpumem.allocator.reductions import sum_workspaces
from gpumem.allocator.workspaces import DEFAULT_BYTES, with_workspaces, workspace_bytes
from gpumem.hardware.catalogue import gpu
from gpumem.simulation import simulated_log
from gpumem.trace import Category, Phase
from gpumem.units import MIB


def linear(device):
    layer = nn.Linear(256, 256, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    while True:
        loss = layer(torch.randn(64, 256, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("t4", 8_519_680), ("a100-80gb", 8_519_680), ("rtx-4090", 8_519_680),
        ("h100", 32 * MIB), ("h200", 32 * MIB), ("mi300x", 128 * MIB), ("m3-ultra", 0),
    ],
)  # fmt: skip
def test_sizes_are_those_of_pytorchs_source(name, nbytes):
    assert workspace_bytes(gpu(name)) == nbytes


def test_forward_and_backward_have_one_each_and_keep_it():
    card = gpu("t4")
    plain = simulated_log(linear, gpu=card).trace
    trace = with_workspaces(plain, card)
    added = [s for s in trace.storages if s.category is Category.UNATTRIBUTED]
    assert [s.phase for s in added] == [Phase.FORWARD, Phase.BACKWARD]
    assert len(trace.events) == len(plain.events) + 2
    assert trace.peak_bytes == plain.peak_bytes + 2 * DEFAULT_BYTES
    held = trace.live_at(len(trace.events) - 1)
    assert sum(s.nbytes for s in held if s.category is Category.UNATTRIBUTED) == 2 * DEFAULT_BYTES
    # Each stands just behind the first product of its thread.
    for event in (e for e, s in enumerate(trace.events) if trace.storages[s.storage] in added):
        assert trace.storages[trace.events[event - 1].storage].operator in ("addmm", "mm")
    # Both steps begin where they began.
    first, second = (trace.events[start] for start in trace.step_starts)
    assert first == plain.events[plain.step_starts[0]]
    assert second == plain.events[plain.step_starts[1]]
    assert lab.simulate(linear).bytes_of("unattributed") == 0  # the CPU has none


def attention(device, heads=8, key_heads=2):
    q = torch.randn(1, heads, 200, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, key_heads, 200, 64, device=device, dtype=torch.bfloat16,
                        requires_grad=True) for _ in range(2))  # fmt: skip
    while True:
        out = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=heads != key_heads)
        out.float().sum().backward()
        yield out.float().mean()


@pytest.mark.parametrize(
    ("key_heads", "more"),
    [
        (8, []),
        (2, 2 * [2 * 8 * 200 * 64]),  # keys and values for every query head
    ],
)
def test_flash_backward_takes_what_its_source_says(key_heads, more):
    # A number for each row, float32, tokens in whole 128s; then the query's gradient.
    blocks = [4 * 8 * 256, 4 * 8 * 256 * 64, *more]
    card = gpu("a100-80gb")
    plain = simulated_log(attention, gpu=card, key_heads=key_heads).trace
    trace = with_workspaces(plain, card)
    added = [n for n, s in enumerate(trace.storages) if s.category is Category.UNATTRIBUTED]
    changes = [e.change_bytes for e in trace.events if e.storage in added]
    assert changes == 2 * [*blocks, *(-nbytes for nbytes in reversed(blocks))]  # in both steps


# --- sums ----------------------------------------------------------------------------------------


def test_a_sum_of_many_rows_takes_a_buffer_and_counters():
    """Held to PyTorch's own kernels in tests/phantom/test_sums.py."""
    h100, bf16 = lab.gpu("h100"), torch.bfloat16
    gradients = torch.empty(2048, 896, dtype=bf16)
    # 7 blocks side by side, 32 parts: 4 bytes for each of 32 rows of threads with 4 columns each.
    assert sum_workspaces(gradients, [0], bf16, h100) == (4 * 896 * 32 * 32 * 4, 4 * 7)
    assert sum_workspaces(gradients[:64], [0], bf16, h100) == ()
    assert sum_workspaces(gradients, [1], bf16, h100) == ()


def test_softmax_multiplies_in_a_tensor_of_its_own_in_backward():
    def attention(device):
        scores = torch.ones(64, 64, device=device, requires_grad=True)
        while True:
            loss = (scores * scores).softmax(-1).square().sum()
            loss.backward()
            yield loss

    def taken(gpu):
        trace = lab.simulate(attention, gpu=gpu).trace
        return [
            change_bytes
            for _, storage, change_bytes in trace.changes()
            if storage.operator == "_softmax_backward_data"
        ]

    # The result, which goes when the scores have their gradient, and the product, before that.
    assert taken("t4")[:3] == [64 * 64 * 4, 64 * 64 * 4, -64 * 64 * 4]
    assert len(taken("m3-ultra")) == len(taken(None))


def test_a_simulated_step_takes_them_and_frees_them_at_once():
    def bias(device):
        layer = torch.nn.Linear(896, 896, device=device, dtype=torch.bfloat16)
        while True:
            loss = layer(torch.ones(2048, 896, device=device, dtype=torch.bfloat16)).square().sum()
            loss.backward()
            layer.zero_grad()
            yield loss

    trace = lab.simulate(bias, gpu="h100").trace
    taken = [
        (storage.nbytes, change_bytes)
        for _, storage, change_bytes in trace.changes()
        if storage.operator == "sum" and storage.category is Category.UNATTRIBUTED
    ]
    assert (4 * 896 * 32 * 32 * 4, 4 * 896 * 32 * 32 * 4) in taken
    assert sum(change_bytes for _, change_bytes in taken) == 0
    assert Category.UNATTRIBUTED not in lab.simulate(bias).trace.peak().by_category  # of a CPU
