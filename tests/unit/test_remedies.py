"""What `--fix` makes of a model and an optimizer, on the CPU."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch

from phantom_gpu import remedies
from phantom_gpu.report_records import OPTIMIZER


@pytest.mark.parametrize("change", [remedies._autocast, remedies.activations_on_host])
def test_a_copy_of_a_changed_model_has_its_own_weights(monkeypatch, change):
    monkeypatch.setattr(remedies, "_autocast_dtype", lambda: torch.bfloat16)
    model = torch.nn.Linear(2, 2)
    arguments = inspect.signature(model.forward)
    change(model)
    averaged = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in averaged.parameters():
            parameter.zero_()
        assert averaged(torch.ones(2)).abs().sum() == 0
        assert model(torch.ones(2)).abs().sum() > 0
    assert inspect.signature(model.forward) == arguments  # Trainer drops what it has not


@pytest.mark.parametrize("change", [remedies.step_in_backward, remedies.every_second_step])
@pytest.mark.filterwarnings("error::UserWarning")  # "lr_scheduler.step() before optimizer.step()"
def test_a_schedule_sets_the_rate_of_a_changed_optimizer(change):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    change(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n // 2)
    for _ in range(4):  # two at the rate 1, two at 0
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert weight.item() == (-1 if change is remedies.step_in_backward else 0)


def test_blocks_within_blocks_are_computed_again_once():
    blocks = [torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(3)]
    calls = []
    for block in blocks:
        block[0].register_forward_pre_hook(lambda *_: calls.append(1))
    net = torch.nn.Sequential(*blocks)
    remedies.checkpoint_blocks(net, "Sequential")
    net(torch.ones(2)).sum().backward()
    assert len(calls) == 2 * len(blocks)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_an_optimizer_of_8_bits_decays_weights_as_the_scripts_own(kind):
    remedy = next(each for each in remedies.REMEDIES if each.name == "8bit-adam")
    [way] = [way[OPTIMIZER] for way in remedy.ways if OPTIMIZER in way]
    own = getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(1))])
    path = way.codes["class"](SimpleNamespace(stepped={"here": own}), "here", "optimizer")
    package, _, name = path.rpartition(".")
    made = getattr(__import__(package, fromlist=[name]), name)
    assert (inspect.signature(made).parameters["weight_decay"].default, name) == (
        own.defaults["weight_decay"],
        f"{kind}8bit",
    )
