"""What a simulation refuses, answers, and leaves alone."""

import functools

import pytest
import torch
from torch import nn

import labkit as lab


def test_another_device_is_refused_with_a_sentence():
    def stubborn(device):
        weight = torch.randn(8, 8, device="cuda", requires_grad=True)
        yield (weight * 2).sum()

    with pytest.raises(lab.InputError, match="Use the device that it is given"):
        lab.simulate(stubborn, gpu="t4")


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


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler_finds_no_infinity(unscale):
    def scaled(device):
        layer = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(layer.parameters())
        scaler = torch.amp.GradScaler(device.type)
        while True:
            with torch.autocast(device.type, dtype=torch.float16):
                loss = layer(torch.randn(4, 64)).float().square().mean()
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield loss

    run = lab.simulate(scaled, gpu="t4", steps=3)
    assert run.bytes_of("optimizer") >= 2 * 4 * 64 * 65


def test_a_partial_has_a_name_and_keyword_arguments_are_recorded():
    def flexible(device, **settings):
        yield torch.zeros(settings["batch_size"]).sum()

    run = lab.simulate(functools.partial(flexible), batch_size=4, steps=1)
    assert (run.name, run.parameters) == ("flexible", {"batch_size": 4})
