"""Estimates: their parts agree, growing jobs never take less."""

import json
from dataclasses import replace
from importlib.metadata import version

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.lib.pretty import pretty
from transformers import LlamaConfig

import labkit as lab
from benchmarks.setups import TINY as SIZES
from benchmarks.sixty_estimates import FILE, computed
from gpumem.estimation.estimate import estimate, one_layer_bytes, recipe_log
from gpumem.estimation.recipe import Recipe
from gpumem.hardware import this_machine
from gpumem.inputs import InputError
from gpumem.models.config import find_config
from gpumem.simulation import run_of, simulated_log
from gpumem.units import MIB

TINY = LlamaConfig(**SIZES | {"num_hidden_layers": 5})


def tensor_bytes(found):
    """The peak without what the allocator's rounding adds, which is no function of the size."""
    return found.peak_allocated_bytes - found.by_category.get("unattributed", 0)


# --- what must not move ---------------------------------------------------------------------------


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.nightly)])
def test_estimates_are_those_that_were_stored(every):
    """If they move and should: `python benchmarks/sixty_estimates.py --write`, and say why."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    if any(version(name) != wanted for name, wanted in stored["versions"].items()):
        pytest.skip(f"stored with {stored['versions']}")
    found = computed(every)
    assert found
    assert found == {name: stored["estimates"][name] for name in found}


# --- what an estimate says ------------------------------------------------------------------------


def test_its_parts_agree():
    found = estimate(TINY, gpu="t4", batch_size=2, seq_len=64)
    assert sum(found.by_category.values()) == found.peak_allocated_bytes
    assert found.peak_allocated_bytes <= found.peak_reserved_bytes <= found.capacity_bytes
    assert found.floor_bytes <= found.peak_allocated_bytes
    assert found.fits
    assert found.run.oom is None
    assert found.capacity_bytes + found.gpu.context_bytes == lab.gpu("t4").usable_bytes
    record = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert record["flops"] == found.run.flops
    assert (record["gpu"], record["failure"], record["fits"]) == ("t4", None, True)
    assert Recipe.from_dict(record["recipe"]) == Recipe(batch_size=2, seq_len=64)


def test_an_estimate_follows_the_release_that_will_train():
    job = {"lora": 16, "precision": "amp-fp16", "attention": "eager", "checkpointing": True}
    older = estimate("SmolLM2-135M", gpu="t4", torch="2.11.0", **job)
    newer = estimate("SmolLM2-135M", gpu="t4", torch="2.13", **job)
    assert (older.torch, newer.torch) == (older.to_dict()["torch"], "2.13") == ("2.11", "2.13")
    assert older.peak_reserved_bytes > newer.peak_reserved_bytes
    assert not older.otherwise  # far from the limit
    assert "The allocator's rules are those of PyTorch 2.11." in str(older)


KEPT = Recipe(precision="bf16", batch_size=8, seq_len=512)


def kept_bytes_of(config, recipe, gpu):
    log = recipe_log(config, recipe, gpu, keeps_outputs=True).log
    return run_of(log, gpu, name="").peak_bytes


@pytest.mark.parametrize("fields", [{}, {"accumulate": 5}, {"checkpointing": True}], ids=str)
def test_a_loop_that_keeps_its_outputs_has_its_logits_twice(fields):
    recipe, gpu = KEPT.but(**fields), lab.gpu("a100-80gb")
    config = find_config(LlamaConfig(**SIZES | {"vocab_size": 32_000}))[1]
    freed = estimate(config, gpu=gpu, recipe=recipe)
    assert freed.kept_outputs_bytes is None  # far from the limit
    more_bytes = kept_bytes_of(config, recipe, gpu) - freed.peak_allocated_bytes
    assert more_bytes == pytest.approx(8 * 512 * 32_000 * 2, rel=0.01)
    chunked = recipe.but(chunked_loss=True)
    freed = estimate(config, gpu=gpu, recipe=chunked)
    assert kept_bytes_of(config, chunked, gpu) < freed.peak_allocated_bytes + MIB


def test_near_the_limit_a_loop_that_keeps_its_outputs_is_tried_too():
    recipe, large = KEPT.but(lora=2, quantize="int8"), lab.gpu("a100-80gb")
    config = find_config(LlamaConfig(**SIZES | {"vocab_size": 32_000}))[1]
    kept_bytes = kept_bytes_of(config, recipe, large)
    tight = replace(large, usable_bytes=kept_bytes - MIB + large.context_bytes)
    found = estimate(config, gpu=tight, recipe=recipe)
    assert found.fits
    assert found.kept_outputs_bytes > found.peak_reserved_bytes
    assert "to spare, but only in a loop that keeps no outputs" in str(found)
    assert found.to_dict()["kept_outputs_bytes"] == found.kept_outputs_bytes
    assert estimate(config, gpu=tight, recipe=recipe, loops=False).kept_outputs_bytes is None


@pytest.mark.parametrize("release", ["2.5", "2.16", "3.0", "newest", "2", 2.13, "2.13.0+cu130", ""])
def test_releases_whose_rules_are_not_known_are_refused(release):
    with pytest.raises(InputError, match="PyTorch"):
        estimate(TINY, gpu="t4", torch=release)


@pytest.mark.slow
def test_the_hosts_memory_is_judged_where_it_is_given():
    kind = {"gpu": "h100", "seq_len": 64, "offload": "weights", "checkpointing": True, "ranks": 2}
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 2})
    free = estimate(config, **kind)
    assert free.run.host_bytes > MIB
    assert free.fits
    enough = estimate(config, host_memory_bytes=2 * free.run.host_bytes, **kind)
    assert enough.fits
    assert f"for each GPU, which has {lab.format_bytes(2 * free.run.host_bytes)}" in str(enough)
    short = estimate(config, host_memory_bytes=2 * free.run.host_bytes - MIB, **kind)
    assert short.run.fits
    assert not short.fits
    assert "does not fit the host's memory, 1.00 MiB too much" in str(short)
    assert pretty(short) == str(short)  # as a notebook shows it
    assert not short.to_dict()["fits"]


@pytest.mark.parametrize(
    ("fields", "key", "reason"),
    [
        ({}, "t4", "the NVIDIA T4 is the smallest common one that can run this"),
        ({"precision": "bf16"}, "l4", "the NVIDIA L4 is the smallest common one"),
    ],
)
def test_a_gpu_that_can_run_the_recipe_is_assumed(monkeypatch, fields, key, reason):
    here = replace(this_machine.machine(), kind="cpu")
    monkeypatch.setattr(this_machine, "machine", lambda: here)
    found = estimate(TINY, seq_len=8, **fields)
    assert found.gpu.key == found.to_dict()["gpu"] == key
    assert f"No GPU was named: {reason}" in str(found)
    with lab.pretend("a100-80gb"):
        assert estimate(TINY, seq_len=8, **fields).gpu.key == "a100-80gb"


def test_this_machines_gpu_is_assumed(monkeypatch):
    here = replace(this_machine.machine(), kind="cuda")
    monkeypatch.setattr(this_machine, "machine", lambda: here)
    monkeypatch.setattr(this_machine, "this_gpu", lambda: lab.gpu("rtx-3090"))
    found = estimate(TINY, seq_len=8)
    assert found.gpu.key == "rtx-3090"
    assert "this machine has an NVIDIA GeForce RTX 3090" in str(found)
    assert "No GPU was named" not in str(estimate(TINY, gpu="t4", seq_len=8))


# --- the floor ------------------------------------------------------------------------------------


def test_the_floor_is_weights_states_a_gradient_and_a_layer():
    found = estimate(TINY, gpu="t4", batch_size=2, seq_len=64)
    weights = found.by_category["weights"]
    log = simulated_log(lab.training(TINY, Recipe(batch_size=2, seq_len=64)), gpu=lab.gpu("t4"))
    layer = one_layer_bytes(log.trace)
    largest = 4 * TINY.vocab_size * TINY.hidden_size
    workspaces = 2 * 8_519_680
    assert found.floor_bytes == pytest.approx(
        weights + 2 * weights + found.by_category.get("buffers", 0) + largest + layer + workspaces,
        rel=1e-4,
    )


def test_chunks_of_a_loss_are_not_held_at_the_same_time():
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 5, "vocab_size": 32768})
    kind = {"checkpointing": True, "chunked_loss": True}
    found = estimate(config, gpu="t4", batch_size=128, seq_len=64, **kind)
    scores_bytes = 4 * 128 * 64 * config.vocab_size
    assert scores_bytes > found.peak_allocated_bytes >= found.floor_bytes


def test_accumulated_gradients_all_count():
    once = estimate(TINY, gpu="t4", seq_len=64)
    twice = estimate(TINY, gpu="t4", seq_len=64, accumulate=2)
    weights = once.by_category["weights"]
    largest = 4 * TINY.vocab_size * TINY.hidden_size
    assert twice.floor_bytes - once.floor_bytes == weights - largest


@pytest.mark.slow
@pytest.mark.nightly
def test_many_accumulated_batches_are_not_traced_one_by_one():
    kind = {"gpu": "t4", "seq_len": 64, "accumulate": 7}
    quick, whole = estimate(TINY, **kind), estimate(TINY, exact=True, **kind)
    assert (quick.exact, whole.exact) == (False, True)
    assert quick.run.flops == whole.run.flops
    assert quick.run.moved_bytes == whole.run.moved_bytes
    assert quick.floor_bytes == whole.floor_bytes
    # Each batch leaves its loss, one block, until the step is over.
    assert quick.peak_allocated_bytes == pytest.approx(whole.peak_allocated_bytes, rel=1e-3)
    assert quick.recipe.accumulate == 7


def test_a_layers_activations_do_not_depend_on_checkpointing_and_grow_with_the_batch():
    card = lab.gpu("t4")

    def layer(**changes):
        recipe = Recipe(seq_len=64, **changes)
        return one_layer_bytes(simulated_log(lab.training(TINY, recipe), gpu=card).trace)

    assert layer(checkpointing=True) == pytest.approx(layer(), rel=0.05)
    assert layer(batch_size=4) == pytest.approx(4 * layer(), rel=0.01)


# --- growing jobs ---------------------------------------------------------------------------------

QLORA = {"precision": "bf16", "lora": 4, "quantize": "nf4-double"}
KINDS = st.sampled_from(
    [
        {},
        {"attention": "eager", "optimizer": "adafactor"},
        {"optimizer_in_backward": True},
        {"chunked_loss": True, "precision": "amp-bf16", "checkpointing": True},
        {"offload": "activations", "accumulate": 2},
        QLORA,
    ]
)


def size_of(kind, **changes):
    layers = changes.pop("layers", TINY.num_hidden_layers)
    config = LlamaConfig(**{**TINY.to_dict(), "num_hidden_layers": layers, "layer_types": None})
    return tensor_bytes(estimate(config, gpu="a100-80gb", **{"seq_len": 32, **kind, **changes}))


@settings(max_examples=8)
@given(
    kind=KINDS,
    grows=st.sampled_from(["batch_size", "seq_len", "layers"]),
    small=st.integers(1, 40),
    more=st.integers(1, 40),
)
@pytest.mark.nightly
def test_estimates_never_fall_when_a_job_grows(kind, grows, small, more):
    if grows == "layers":
        small, more = 1 + small % 6, 1 + more % 4
    assert size_of(kind, **{grows: small}) <= size_of(kind, **{grows: small + more})


def test_estimates_never_fall_when_the_rank_grows():
    assert size_of(QLORA) <= size_of({**QLORA, "lora": 5}) <= size_of({**QLORA, "lora": 32})
