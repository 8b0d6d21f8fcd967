"""Estimates: what they hold, that growing jobs never take less, experiments of one's own."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

import labkit as lab
from labkit.estimates import argument_value, estimate, floor_bytes, one_layer_bytes
from labkit.memory import Category, InputError
from labkit.recipes import Recipe
from labkit.simulate import simulated_log

TINY = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=512,
)  # fmt: skip
OWN = """
import torch

def train(device, batch_size=4, width=64, bias=True):
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width, bias=bias, device=device), torch.nn.ReLU(),
        torch.nn.Linear(width, width, device=device),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        loss = model(torch.randn(batch_size, width, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss

def not_one(device):
    return 3

NUMBER = 3
"""


def tensor_bytes(found):
    """The peak without what the allocator's rounding adds, which is no function of the size."""
    return found.peak_allocated_bytes - found.by_category.get("unattributed", 0)


# --- what an estimate says ------------------------------------------------------------------------


def test_its_parts_agree():
    found = estimate(TINY, gpu="t4", batch_size=2, seq_len=64)
    assert sum(found.by_category.values()) == found.peak_allocated_bytes
    assert found.peak_allocated_bytes <= found.peak_reserved_bytes <= found.capacity_bytes
    assert found.floor_bytes <= found.peak_allocated_bytes
    assert found.fits
    assert found.failure is None
    assert found.context_bytes == lab.gpu("t4").context_bytes
    assert found.capacity_bytes + found.context_bytes == lab.gpu("t4").usable_bytes
    assert found.recipe == Recipe(batch_size=2, seq_len=64)


def test_json_has_every_field_and_the_recipe_comes_back():
    found = estimate(TINY, gpu="a100-80gb", precision="bf16", lora=4, quantize="nf4")
    record = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert {
        "peak_allocated_bytes", "peak_reserved_bytes", "floor_bytes", "by_category",
        "context_bytes", "fits", "flops", "seconds_to_estimate", "recipe", "host_bytes",
    } <= set(record)  # fmt: skip
    assert Recipe.from_dict(record["recipe"]) == found.recipe
    assert set(record["by_category"]) <= {str(category) for category in Category}


def test_what_does_not_fit_names_the_request_that_fails():
    found = estimate("Llama-3.1-8B", gpu="t4", precision="fp32", seq_len=128)
    assert not found.fits
    assert found.peak_reserved_bytes > found.capacity_bytes
    assert found.failure.startswith("out of memory: asked for")


def test_repeating_layers_gives_what_tracing_all_gives():
    kind = {"gpu": "t4", "batch_size": 2, "seq_len": 64, "checkpointing": True}
    quick, whole = estimate(TINY, **kind), estimate(TINY, exact=True, **kind)
    assert (quick.exact, whole.exact) == (False, True)
    assert tensor_bytes(quick) == tensor_bytes(whole)
    assert quick.flops == whole.flops
    assert quick.peak_reserved_bytes == pytest.approx(whole.peak_reserved_bytes, rel=0.01)
    assert quick.floor_bytes == whole.floor_bytes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "t4", "precision": "bf16"}, "no bfloat16"),
        ({"gpu": "nope"}, "unknown GPU"),
        ({"lora_rank": 4}, "unknown field of a recipe"),
        ({"parameters": {"width": 3}}, "experiment of your own"),
        ({"quantize": "nf4"}, "LoRA adapters"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_input_is_refused(changes, reason):
    with pytest.raises(InputError, match=reason):
        estimate(TINY, **changes)


# --- the floor ------------------------------------------------------------------------------------


def test_the_floor_is_weights_states_a_gradient_and_a_layer():
    found = estimate(TINY, gpu="t4", batch_size=2, seq_len=64)
    weights = found.by_category["weights"]
    log = simulated_log(Recipe(batch_size=2, seq_len=64).experiment(TINY), card=lab.gpu("t4"))
    layer = one_layer_bytes(log.trace)
    largest = 4 * TINY.vocab_size * TINY.hidden_size
    workspaces = 2 * 8_519_680
    assert found.floor_bytes == pytest.approx(
        weights + 2 * weights + found.by_category.get("buffers", 0) + largest + layer + workspaces,
        rel=1e-4,
    )


def test_accumulated_gradients_all_count():
    once = estimate(TINY, gpu="t4", seq_len=64)
    twice = estimate(TINY, gpu="t4", seq_len=64, accumulate=2)
    weights = once.by_category["weights"]
    largest = 4 * TINY.vocab_size * TINY.hidden_size
    assert twice.floor_bytes - once.floor_bytes == weights - largest


def test_many_accumulated_batches_are_not_traced_one_by_one():
    kind = {"gpu": "t4", "seq_len": 64, "accumulate": 7}
    quick, whole = estimate(TINY, **kind), estimate(TINY, exact=True, **kind)
    assert (quick.exact, whole.exact) == (False, True)
    assert (quick.flops, quick.moved_bytes) == (whole.flops, whole.moved_bytes)
    assert quick.floor_bytes == whole.floor_bytes
    # Each batch leaves its loss, one block, until the step is over.
    assert quick.peak_allocated_bytes == pytest.approx(whole.peak_allocated_bytes, rel=1e-3)
    assert quick.recipe.accumulate == 7


def test_a_layers_activations_do_not_depend_on_checkpointing_and_grow_with_the_batch():
    card = lab.gpu("t4")

    def layer(**changes):
        recipe = Recipe(seq_len=64, **changes)
        return one_layer_bytes(simulated_log(recipe.experiment(TINY), card=card).trace)

    assert layer(checkpointing=True) == pytest.approx(layer(), rel=0.05)
    assert layer(batch_size=4) == pytest.approx(4 * layer(), rel=0.01)


def test_an_empty_trace_has_no_floor():
    trace = simulated_log(Recipe(seq_len=8).experiment(TINY), card=lab.gpu("t4")).trace
    empty = type(trace)(trace.device, (), ())
    assert floor_bytes(empty, 0) == one_layer_bytes(empty) == 0


# --- growing jobs ---------------------------------------------------------------------------------

KINDS = st.sampled_from([
    {}, {"precision": "amp-bf16"}, {"precision": "bf16", "checkpointing": True},
    {"attention": "eager"}, {"optimizer": "adafactor"}, {"optimizer_in_backward": True},
    {"lora": 4}, {"precision": "bf16", "lora": 4, "quantize": "nf4-double"},
    {"chunked_loss": True}, {"offload": "activations"}, {"accumulate": 2},
])  # fmt: skip


def size_of(kind, **changes):
    layers = changes.pop("layers", TINY.num_hidden_layers)
    config = LlamaConfig(**{**TINY.to_dict(), "num_hidden_layers": layers, "layer_types": None})
    return tensor_bytes(estimate(config, gpu="a100-80gb", **{"seq_len": 32, **kind, **changes}))


@settings(max_examples=20)
@given(
    kind=KINDS,
    grows=st.sampled_from(["batch_size", "seq_len", "layers"]),
    small=st.integers(1, 40),
    more=st.integers(1, 40),
)
def test_estimates_never_fall_when_a_job_grows(kind, grows, small, more):
    if grows == "layers":
        small, more = 1 + small % 6, 1 + more % 4
    assert size_of(kind, **{grows: small}) <= size_of(kind, **{grows: small + more})


@settings(max_examples=6)
@given(
    rank=st.integers(1, 32),
    more=st.integers(1, 32),
    quantize=st.sampled_from([None, "nf4", "int8"]),
)
def test_estimates_never_fall_when_the_rank_grows(rank, more, quantize):
    kind = {"precision": "bf16", "quantize": quantize}
    assert size_of(kind, lora=rank) <= size_of(kind, lora=rank + more)


# --- an experiment of one's own -------------------------------------------------------------------


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


def test_the_users_own_step_is_estimated(own):
    found = estimate(f"{own}:train", gpu="t4", parameters={"width": 256, "batch_size": 2})
    parameters = 2 * (256 * 256 + 256)
    assert found.by_category["weights"] == 4 * parameters
    assert found.parameters == {"width": 256, "batch_size": 2, "bias": True}
    assert found.recipe is None
    assert found.exact
    assert found.to_dict()["recipe"] is None
    assert 0 < found.floor_bytes <= found.peak_allocated_bytes
    assert math.isclose(found.flops, 6 * 2 * 2 * 256 * 256, rel_tol=0.2)  # no input gradient


def test_a_function_will_do(own):
    scope = {}
    exec(OWN, scope)
    assert estimate(scope["train"], gpu="t4").by_category["weights"] == 4 * 2 * (64 * 64 + 64)


@pytest.mark.parametrize(
    ("which", "reason"),
    [
        ("{own}:nothing", "has no function 'nothing'; it has"),
        ("{own}:NUMBER", "has no function 'NUMBER'"),
        ("{own}:not_one", "generator function"),
        ("{own}", "say which function"),
        ("/nowhere/at_all.py:train", "there is no file"),
    ],
)
def test_a_wrong_file_or_function_is_named(own, which, reason):
    with pytest.raises(InputError, match=reason):
        estimate(which.format(own=own), gpu="t4")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def broken(", "SyntaxError"),
        ("raise KeyError('x')", "KeyError"),
        ("import nope_x", "nope"),
    ],
)
def test_a_file_that_cannot_be_run_is_a_sentence(tmp_path, text, reason):
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(InputError, match=f"cannot be run: .*{reason}"):
        estimate(f"{path}:train", gpu="t4")


def test_a_recipes_field_does_not_change_ones_own_experiment(own):
    with pytest.raises(InputError, match="takes its own arguments"):
        estimate(f"{own}:train", gpu="t4", precision="bf16")


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("0.5", 0.5), ("True", True), ("None", None), ("bf16", "bf16"), ("'8'", "8"),
     ("[1]", "[1]"), ("__import__('os')", "__import__('os')"), ("", "")],
)  # fmt: skip
def test_arguments_from_text(text, value):
    assert argument_value(text) == value
