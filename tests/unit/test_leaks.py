"""After a run nothing stays: every recipe is measured, and the tensors that live are counted."""

import gc
import weakref

import pytest
import torch
from transformers import LlamaConfig

import labkit as lab
from gpumem.estimation.recipe import Recipe

TINY = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=512,
)
RECIPES = [
    {"precision": "amp-bf16", "attention": "eager"},
    {"precision": "amp-fp16", "accumulate": 2},
    {"checkpointing": True, "chunked_loss": True},
    {"optimizer": "adafactor"},
    {"optimizer": "paged-adamw8bit"},
    {"optimizer_in_backward": True, "checkpointing": True, "optimizer": "adamw8bit"},
    {"lora": 2, "quantize": "nf4-double", "checkpointing": True},
    {"lora": 2, "quantize": "int8"},
    {"offload": "activations"},
    {"offload": "optimizer"},
    {"offload": "weights", "checkpointing": True},
]


@pytest.fixture(autouse=True)
def only_a_runs_own_collections():
    """No automatic garbage collection."""
    gc.disable()
    yield
    gc.enable()


def living_tensors() -> set[int]:
    return {id(thing) for thing in gc.get_objects() if isinstance(thing, torch.Tensor)}


@pytest.mark.filterwarnings("ignore:MatMul8bitLt|Paged optimizers")
@pytest.mark.parametrize("fields", RECIPES, ids=lambda fields: ", ".join(fields) or "plain")
def test_no_tensor_outlives_its_run(fields):
    experiment = lab.training(TINY, Recipe(batch_size=1, seq_len=8, **fields))
    if fields.get("quantize"):
        lab.measure(experiment, steps=1)  # bitsandbytes keeps its tables from the first use on
    before = living_tensors()
    run = lab.measure(experiment, steps=3)
    assert len(run.losses) == 3
    assert living_tensors() <= before


def test_no_tensor_outlives_running_out_of_memory():
    """With hooks; without: test_measure."""
    recipe = Recipe(batch_size=1, seq_len=8, optimizer_in_backward=True)
    experiment = lab.training(TINY, recipe)
    peak_bytes = lab.measure(experiment, steps=2).peak_bytes
    before = living_tensors()
    with lab.pretend(budget_bytes=peak_bytes - 1):
        assert lab.measure(experiment, steps=2).oom is not None
    # What waited when a backward failed on the CPU stays in autograd's queue until the next one.
    torch.ones(1, requires_grad=True).sum().backward()
    assert living_tensors() <= before


def test_a_parameter_that_is_garbage_is_not_kept_by_its_hook():
    """Why the optimizer is the caller's: the collector does not see autograd's hooks."""
    from gpumem.estimation.techniques import step_in_backward

    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.01)
    step_in_backward(parameter, optimizer)
    parameter.sum().backward()
    assert parameter.grad is None
    assert (parameter < 1).all()
    watched = weakref.ref(parameter)
    del parameter, optimizer
    assert watched() is None
