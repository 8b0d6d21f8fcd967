"""Workspaces of cuBLAS and sums: how large, how many, and where in the log.

In tests/phantom those of attention and sums are held to PyTorch's own code.
"""

import pytest
import torch
from torch import nn

import labkit as lab
from gpumem.allocator.workspaces import DEFAULT_BYTES, with_workspaces, workspace_bytes
from gpumem.hardware.catalogue import gpu
from gpumem.simulation import simulated_log
from gpumem.torch_release import following
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


# What PyTorch's CUDA builds of these releases request on phantoms, for cuBLAS and its second
# library: what forward and backward of a layer with bias keep, and take and give back.
RELEASES = {
    ("2.8", "t4"): ([DEFAULT_BYTES, DEFAULT_BYTES], [MIB, MIB]),
    ("2.7", "rtx-5090"): ([DEFAULT_BYTES, DEFAULT_BYTES], [MIB, MIB]),
    ("2.11", "t4"): ([DEFAULT_BYTES, MIB, DEFAULT_BYTES], []),
    ("2.11", "h100"): ([32 * MIB, MIB, 32 * MIB], []),
    ("2.11", "b200"): ([DEFAULT_BYTES, MIB, DEFAULT_BYTES], []),
    ("2.12", "b200"): ([32 * MIB, 32 * MIB], []),
    ("2.13", "rtx-5090"): ([32 * MIB, 32 * MIB], []),
}


@pytest.mark.parametrize(("release", "name"), RELEASES)
def test_each_release_gives_cublas_its_blocks(release, name):
    kept, passing = RELEASES[release, name]
    plain = simulated_log(linear, gpu=gpu(name)).trace
    with following(release):
        trace = with_workspaces(plain, gpu(name))
    added = [s.nbytes for s in trace.storages if s.category is Category.UNATTRIBUTED]
    held = [s.nbytes for s in trace.live_at(len(trace.events) - 1)]
    assert [nbytes for nbytes in added if nbytes in held] == kept
    assert [nbytes for nbytes in added if nbytes not in held] == passing


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


# --- sums ----------------------------------------------------------------------------------------


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
