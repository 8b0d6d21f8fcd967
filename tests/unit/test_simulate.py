"""What a simulation refuses, answers, and leaves alone."""

import contextlib
import functools
import gc

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import labkit as lab
from gpumem.fake_cuda.fake_tensors import GPU_DEVICE, fake_tensors
from gpumem.hardware.catalogue import gpu


def test_another_device_is_refused_with_a_sentence():
    def stubborn(device):
        weight = torch.randn(8, 8, device="xpu", requires_grad=True)
        yield (weight * 2).sum()

    with pytest.raises(lab.InputError, match="Use the device that it is given"):
        lab.simulate(stubborn, gpu="t4")


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_are_refused_for_a_gpu(layer):
    """A GPU's kernels keep more for backward: 24 MB more for two layers of 64."""

    def experiment(device):
        with torch.device(device):
            yield layer(8, 8)(torch.ones(4, 2, 8))[0].sum()

    with pytest.raises(lab.InputError, match=r"recurrent layer.*labkit phantom"):
        lab.simulate(experiment, gpu="t4", steps=1)
    lab.simulate(experiment, steps=1)


def test_a_model_made_outside_is_left_alone():
    outside = nn.Linear(16, 16)
    before = outside.weight.detach().clone()

    def careless(device):
        optimizer = torch.optim.AdamW(outside.parameters())
        outside(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        yield torch.zeros(())

    with pytest.raises(lab.InputError, match="made outside it"):
        lab.simulate(careless)
    assert torch.equal(outside.weight, before)


def closure_step(optimizer_class, ask):
    def experiment(device):
        layer = nn.Linear(16, 16)
        optimizer = optimizer_class(layer.parameters(), lr=0.1)

        def closure():
            loss = layer(torch.randn(4, 16)).sum()
            loss.backward()
            if ask:
                loss.item()
            return loss

        while True:
            yield optimizer.step(closure)

    return experiment


@pytest.mark.parametrize(
    ("optimizer", "ask"), [(torch.optim.SGD, True), (torch.optim.LBFGS, False)]
)
def test_questions_whose_answer_would_matter_are_refused(optimizer, ask):
    with pytest.raises(lab.InputError, match="asks for a value"):
        lab.simulate(closure_step(optimizer, ask))


def test_a_closure_that_asks_nothing_is_simulated():
    assert lab.simulate(closure_step(torch.optim.SGD, ask=False)).peak_bytes > 0


def test_a_partial_has_a_name_and_keyword_arguments_are_recorded():
    def flexible(device, **settings):
        yield torch.zeros(settings["batch_size"]).sum()

    run = lab.simulate(functools.partial(flexible), batch_size=4, steps=1)
    assert (run.name, run.parameters) == ("flexible", {"batch_size": 4})


@pytest.mark.parametrize("frozen", [True, False])
def test_what_the_collector_is_told_to_leave_out_stays_so(frozen):
    if not frozen:  # what stands before each test is (tests/conftest.py)
        gc.unfreeze()
    lab.simulate(closure_step(torch.optim.SGD, ask=False))
    assert (gc.get_freeze_count() > 0) == frozen


def test_on_a_gpu_that_is_not_listed():
    def step(device):
        loss = torch.ones(64, 64, device=device, requires_grad=True).square().sum()
        loss.backward()
        yield loss

    run, listed = (lab.simulate(step, gpu=name, steps=1) for name in ("2GiB:8.9", "rtx-4090"))
    assert run.device == "NVIDIA GPU with 2.00 GiB and compute capability 8.9"
    assert run.capacity_bytes == gpu("2GiB:8.9").budget_bytes
    assert run.peak_bytes == listed.peak_bytes > 0


# --- the GPU and the host are two devices ------------------------------------------------------

HOST = torch.device("cpu")


def on_gpu(*size):
    return torch.zeros(*size, device=GPU_DEVICE)


MADE_ON_THE_GPU = {
    "tensor": lambda: torch.tensor([1.0, 2.0], device=GPU_DEVICE),
    "tensor with a type": lambda: torch.tensor([[1], [2]], dtype=torch.long, device="cpu:0"),
    "as_tensor": lambda: torch.as_tensor([1.0, 2.0], device=GPU_DEVICE),
    "asarray": lambda: torch.asarray([1.0, 2.0], device=GPU_DEVICE),
    "new_tensor": lambda: on_gpu(2).new_tensor([1.0, 2.0]),
    "new_tensor from the host": lambda: torch.zeros(2).new_tensor([1.0, 2.0], device=GPU_DEVICE),
    "new_zeros": lambda: on_gpu(2).new_zeros(3),
    "arange": lambda: torch.arange(4, device=GPU_DEVICE),
    "randn": lambda: torch.randn(4, generator=None, device=GPU_DEVICE),
    "randn of a generator": lambda: torch.randn(
        4, generator=torch.Generator(GPU_DEVICE), device=GPU_DEVICE
    ),
    "zeros_like": lambda: torch.zeros_like(on_gpu(3)),
    "zeros_like of the host's": lambda: torch.zeros_like(torch.zeros(3), device=GPU_DEVICE),
    "a default device": lambda: within(GPU_DEVICE, lambda: torch.zeros(3)),
    "to": lambda: torch.zeros(3).to(GPU_DEVICE),
    "to, by name": lambda: torch.zeros(3).to("cpu:0", non_blocking=True),
    "to another's": lambda: torch.zeros(3).to(on_gpu(1)),
    "move of a number": lambda: torch.tensor(3.0).to(GPU_DEVICE),
    "from_numpy": lambda: torch.from_numpy(np.zeros(3)).to(GPU_DEVICE),
    "parameter": lambda: nn.Parameter(on_gpu(3)),
    "module": lambda: nn.Linear(3, 3, device=GPU_DEVICE).weight,
    "module moved": lambda: nn.Linear(3, 3).to(GPU_DEVICE).weight,
    "buffer moved": lambda: nn.BatchNorm1d(3).to(GPU_DEVICE).running_mean,
    "indexed by the host": lambda: on_gpu(3)[torch.tensor([0, 1])],
    "with a number of the host": lambda: on_gpu(3) + torch.zeros(()),
}
MADE_ON_THE_HOST = {
    "tensor": lambda: torch.tensor([1.0]),
    "randn": lambda: torch.randn(3),
    "cpu": lambda: on_gpu(3).cpu(),
    "to": lambda: on_gpu(3).to("cpu"),
    "new_tensor": lambda: on_gpu(3).new_tensor([1.0], device="cpu"),
    "pinned": lambda: torch.empty(3, pin_memory=True),
    "copied into": lambda: torch.zeros(3).copy_(on_gpu(3)),
    "module": lambda: nn.Linear(3, 3, device=GPU_DEVICE).cpu().weight,
}
MIXED = {
    "sum": lambda: on_gpu(3) + torch.zeros(3),
    "sum in place": lambda: on_gpu(3).add_(torch.zeros(3)),
    "cat": lambda: torch.cat([on_gpu(3), torch.zeros(3)]),
    "layer": lambda: nn.Linear(3, 3)(on_gpu(3)),
    "tokens": lambda: nn.Embedding(3, 3).to(GPU_DEVICE)(torch.zeros(2, dtype=torch.long)),
    "targets": lambda: F.cross_entropy(on_gpu(2, 3), torch.zeros(2, dtype=torch.long)),
    "attention": lambda: F.scaled_dot_product_attention(
        on_gpu(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8)
    ),
}


def within(device, make):
    with device:
        return make()


@pytest.mark.parametrize("name", MADE_ON_THE_GPU)
def test_what_is_made_on_the_gpu_is_there(name):
    with fake_tensors(gpu("t4")):
        assert MADE_ON_THE_GPU[name]().device == GPU_DEVICE


def test_a_tensor_made_from_data_is_a_leaf():
    with fake_tensors(gpu("t4")):
        made = torch.tensor([1.0, 2.0], device=GPU_DEVICE, requires_grad=True)
        made.sum().backward()
        assert made.grad.device == GPU_DEVICE


def test_a_parameter_can_be_moved_by_its_data():
    with fake_tensors(gpu("t4")):
        layer = nn.Linear(3, 3, device=GPU_DEVICE)
        layer.weight.data = layer.weight.data.to("cpu")
        assert layer.weight.device == HOST
        layer.weight.data = layer.weight.data.to(GPU_DEVICE)
        assert layer(on_gpu(2, 3)).device == GPU_DEVICE


@pytest.mark.parametrize("name", MADE_ON_THE_HOST)
def test_what_is_made_on_the_host_is_there(name):
    with fake_tensors(gpu("t4")):
        assert MADE_ON_THE_HOST[name]().device == HOST


@pytest.mark.parametrize("name", MIXED)
def test_mixing_devices_is_refused_as_by_cuda(name):
    with fake_tensors(gpu("t4")), pytest.raises(RuntimeError, match="same device"):
        MIXED[name]()


def saving(device, how, tokens=64):
    """Two layers whose activations go to the host, one way or another."""
    layers = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).to(device)
    hooks = {
        "plain": contextlib.nullcontext(),
        "save_on_cpu": torch.autograd.graph.save_on_cpu(),
        "pinned": torch.autograd.graph.save_on_cpu(pin_memory=True),
        "to": torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.device, t.to("cpu")), lambda kept: kept[1].to(kept[0])
        ),
    }[how]
    while True:
        inputs = torch.randn(tokens, 256, device=device)
        with hooks:
            loss = layers(inputs).sum()
        loss.backward()
        layers.zero_grad()
        yield loss


@pytest.mark.parametrize("how", ["save_on_cpu", "pinned", "to"])
def test_what_is_saved_on_the_host_is_counted_there(how):
    plain = lab.simulate(saving, gpu="t4", how="plain")
    run = lab.simulate(saving, gpu="t4", how=how)
    activation, weight = 64 * 256 * 4, 256 * 256 * 4
    assert plain.host_bytes == plain.trace.peak("cpu").total_bytes
    # The inputs, the first result, its GELU, and the second layer's weight are saved.
    saved = [s for s in run.trace.storages if s.device == "cpu" and s.category == "activations"]
    assert sum(s.nbytes for s in saved) == 2 * (3 * activation + weight)  # in two steps
    in_steps = run.trace.peak("cpu", start=run.trace.steps()[1][0]).total_bytes
    assert in_steps == 3 * activation + weight

    def kept_bytes(run):
        stays = [s for s in run.trace.storages if s.device == "cpu:0"]
        return sum(s.nbytes for s in stays if s.category == "activations")

    assert kept_bytes(run) == 0
    assert kept_bytes(plain) == 2 * 3 * activation  # the weight is where it was


def test_a_simulated_loop_that_keeps_nothing_does_not_grow():
    def train(device, steps=4):
        model = lab.model("SmolLM2-tiny", device=device, layers=1)
        for ids in lab.batches(device=device, batch_size=1, seq_len=64, steps=steps):
            model(input_ids=ids, labels=ids).loss.backward()
            yield torch.zeros(())

    trace = lab.simulate(train, gpu="t4", steps=4).trace
    third, fourth = trace.step_starts[-2:]
    held = [sum(s.nbytes for s in trace.live_at(index - 1)) for index in (third, fourth)]
    assert held[0] == held[1]
