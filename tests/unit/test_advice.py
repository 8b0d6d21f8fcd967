"""Advice: its bounds rule out nothing that fits, its answers are estimates, its text is true."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import labkit as lab
from gpumem.estimation import recipes_to_try, search
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.weight_shapes import shapes_of
from gpumem.hardware.catalogue import GPUS, gpus
from gpumem.hardware.least_seconds import least_seconds
from gpumem.inputs import InputError
from gpumem.models import catalogue
from gpumem.units import GIB, MIB

SIZE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
TINY = catalogue.config("SmolLM2-135M", **SIZE)
RTX = GPUS["rtx-4090"]
#: A GPU on which the tiny model needs memory techniques.
SMALL_GPU = replace(RTX, usable_bytes=RTX.context_bytes + 120 * MIB)


@pytest.fixture(scope="module", params=["full", pytest.param(None, marks=pytest.mark.nightly)])
def advised(request):
    return lab.advise(TINY, SMALL_GPU, seq_len=512, only=request.param)


def all_levels(gpu, gpus=1):
    return [
        level
        for configuration in recipes_to_try.configurations(gpu, 64, None)
        for level in recipes_to_try.levels(configuration, gpu, gpus)
    ]


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("rtx-4090", {"precision": "amp-bf16"}),
        ("rtx-4090", {"precision": "bf16", "optimizer": "adamw8bit"}),
        ("rtx-4090", {"precision": "amp-bf16", "lora": 16, "quantize": "nf4-double"}),
        ("t4", {"precision": "amp-fp16", "lora": 16, "quantize": "int8"}),
        ("t4", {"precision": "amp-fp16", "optimizer": "adafactor"}),
    ],
)
def test_what_arithmetic_rules_out_would_not_fit(key, fields):
    """The bound is below what the simulation allocates, and not idle: weights are in it."""
    for level in recipes_to_try.levels(Recipe(seq_len=64, **fields), GPUS[key], 1):
        least = recipes_to_try.least_bytes(level, shapes_of(TINY))
        found = lab.estimate(TINY, gpu=key, recipe=level)
        assert 0 < least <= found.peak_allocated_bytes
        lasting = found.by_category["weights"] + found.by_category.get("optimizer", 0)
        assert least > 0.4 * lasting


def test_ddp_stores_every_gradient_twice():
    shapes = shapes_of(TINY)
    plain = Recipe(precision="bf16")
    assert recipes_to_try.bucket_bytes(plain, shapes, 1) == 0
    assert recipes_to_try.bucket_bytes(plain.but(lora=16), shapes, 8) == 4 * shapes.adapters(16)
    more = recipes_to_try.least_bytes(plain, shapes, 2) - recipes_to_try.least_bytes(
        plain, shapes, 1
    )
    assert more == 2 * shapes.parameters


def test_data_parallel_forbids_what_ddp_cannot_do():
    gpu = GPUS["a100-80gb"]
    for each in recipes_to_try.configurations(gpu, 1024, None):
        alone, together = recipes_to_try.levels(each, gpu, 1), recipes_to_try.levels(each, gpu, 2)
        copies = [level for level in together if level.ranks == 1]
        assert not any(r.optimizer_in_backward or r.offload == "weights" for r in copies)
        able = each.optimizer in ("adamw", "sgd") and each.precision != "amp-fp16"
        assert {r.ranks for r in together} == ({1, 2} if able and not each.quantize else {1})
        if each.optimizer == "adamw":
            shared = {r.optimizer for r in together if r.ranks > 1 and r.offload == "none"}
            assert each.quantize or shared == {"adamw" if each.lora else "fused-adamw"}
            assert any(r.offload == "weights" for r in alone) == (each.quantize is None)


def test_no_offload_where_host_and_gpu_share_memory():
    found = all_levels(GPUS["m4-max-128gb"])
    assert {level.offload for level in found} == {"none"}
    assert not any(level.quantize or "8bit" in level.optimizer for level in found)


@pytest.mark.parametrize("key", ["v100", "rtx-4090", "mi300x"])
def test_every_candidate_runs_on_its_gpu_and_is_tried_once(key):
    found = all_levels(GPUS[key])
    for level in found:
        level.check(GPUS[key])
    chunked = [level for level in found if level.chunked_loss]
    assert len(chunked) == len(set(chunked))


def test_bytes_over_the_link():
    shapes = shapes_of(TINY)
    on_host = Recipe(offload="weights", checkpointing=True)
    assert recipes_to_try.link_bytes(Recipe(), shapes, 7) == 0
    assert recipes_to_try.link_bytes(Recipe(offload="activations"), shapes, 7) == 14
    assert (
        recipes_to_try.link_bytes(Recipe(offload="optimizer"), shapes, 7) == 8 * shapes.parameters
    )
    assert recipes_to_try.link_bytes(on_host, shapes, 7) == 12 * shapes.in_layers
    frozen = on_host.but(lora=8, precision="bf16")
    assert recipes_to_try.link_bytes(frozen, shapes, 7) == 4 * shapes.in_layers


def test_the_bound_is_the_roofline_and_the_link():
    gpu = GPUS["a100-80gb"]  # 312 TFLOPS, 19.5 in FP32, 2039 GB/s, PCI Express 4
    flops = 312 * 10**12
    assert least_seconds(gpu, {"bf16": 2 * flops}, 1) == pytest.approx(2)
    assert least_seconds(gpu, {"fp32": flops // 8}, 1) == pytest.approx(2)  # not TF32's 156
    assert least_seconds(gpu, {"bf16": flops, "fp32": flops // 8}, 1) == pytest.approx(1 + 2)
    assert least_seconds(gpu, {"bf16": 1}, 4078 * 10**9) == pytest.approx(2)
    assert least_seconds(gpu, {"bf16": 2 * flops}, 1, 63 * 10**9) == pytest.approx(2 + 2)
    assert least_seconds(gpu, {"bf16": flops}, 1, 63 * 10**9, 900 * 10**9) == pytest.approx(3 + 2)
    assert [GPUS[key].peer_gb_per_s for key in ("t4", "h100", "m4-max-128gb")] == [15.75, 450, None]
    assert GPUS["t4"].link_gb_per_s == 15.75
    assert GPUS["h100"].link_gb_per_s == 63
    assert GPUS["m4-max-128gb"].link_gb_per_s is None
    by_bytes = least_seconds(GPUS["m4-max-128gb"], {"bf16": 10**18}, 546 * 10**9, 10**18)
    assert by_bytes == pytest.approx(1)  # Apple publishes no rate


@settings(max_examples=50)
@given(
    fixed=st.integers(0, 1 << 34), each=st.integers(1 << 20, 1 << 33), spare=st.integers(0, 1 << 38)
)
def test_the_largest_batch_is_found_with_few_simulations(fixed, each, spare):
    """On a straight line it is exact, from any bound below the fixed part."""
    room = fixed + spare
    tried, batch = {}, 1
    while batch is not None:
        assert batch not in tried
        tried[batch] = fixed + each * batch
        batch = search.next_batch(tried, room, fixed // 2)
    fitting = [batch for batch, nbytes in tried.items() if nbytes <= room]
    most = spare // each
    if most == 0:
        assert fitting == []
        assert tried == {1: fixed + each}
    else:
        assert max(fitting) == min(1 << int(math.log2(most)), search.MOST_BATCH)
        assert len(tried) <= 5


# --- text -----------------------------------------------------------------------------------------


def test_what_is_given_up_and_what_is_paid_is_said():
    shapes = shapes_of(TINY)
    assert recipes_to_try.changes(Recipe(precision="amp-bf16", checkpointing=True)) == ()
    quantized = recipes_to_try.changes(
        Recipe(precision="bf16", lora=16, quantize="nf4-double"), shapes
    )
    assert quantized == (
        f"only adapters are trained, {shapes.adapters(16) / shapes.parameters:.1%} of the "
        "parameters",
        "the frozen weights are rounded to 4 bits",
    )
    assert len(recipes_to_try.changes(Recipe(precision="bf16", optimizer="sgd"))) == 3
    assert recipes_to_try.costs(Recipe(), 0) == ()
    assert "+33 %" in recipes_to_try.costs(Recipe(checkpointing=True), 0)[0]
    assert "+50 %" in recipes_to_try.costs(Recipe(checkpointing=True, lora=4), 0)[0]
    sentences = recipes_to_try.costs(Recipe(offload="activations", chunked_loss=True), 3 * GIB)
    assert sentences[1:] == ("activations cross the PCIe link twice: 3 GiB a step",)


# --- the search -----------------------------------------------------------------------------------


def test_every_answer_is_confirmed_by_an_estimate(advised):
    assert advised.fitting
    for option in {*advised.best.values(), *advised.options[-1:]}:
        recipe = Recipe.from_dict(json.loads(json.dumps(option.to_dict()))["recipe"])
        found = lab.estimate(TINY, gpu=SMALL_GPU, recipe=recipe)
        assert found.peak_reserved_bytes == option.needed_bytes
        assert found.run.host_bytes == option.host_bytes
        assert option.fits == (option.needed_bytes <= advised.room_bytes)
        assert option.fits <= found.fits
        assert found.run.flops == option.flops


def test_same_training_comes_first_then_fewer_changes(advised):
    keys = [option.sort_key() for option in advised.options]
    assert keys == sorted(keys)
    assert set(advised.best) == {"same", "changed"}
    assert advised.best["same"] == advised.fitting[0]
    for option in advised.options:
        assert (option.group == "same") == (option.changes == ())
        assert option.recipe.seq_len == 512
        assert option.recipe.batch_size.bit_count() == 1
        assert option.needed_bytes >= recipes_to_try.least_bytes(option.recipe, shapes_of(TINY))


def test_the_frontier_is_what_nothing_beats(advised):
    best = advised.frontier
    for option in advised.fitting:
        beaten = [
            other
            for other in advised.fitting
            if other.group == option.group
            and other != option
            and other.needed_bytes <= option.needed_bytes
            and other.seconds_per_token <= option.seconds_per_token
        ]
        assert (option in best) == (not beaten)


def test_of_two_that_need_as_much_the_faster_is_on_the_frontier(advised):
    changed = next(option for option in advised.fitting if option.changes)
    slow = replace(changed, changes=("one",), seconds_per_token=2.0)
    fast = replace(changed, changes=("one", "two"), seconds_per_token=1.0)
    assert replace(advised, options=(slow, fast)).frontier == (fast,)


def test_only_one_kind_and_the_same_answer_each_time(guessed):
    lora, again = (lab.advise(TINY, SMALL_GPU, seq_len=128, only="lora") for _ in range(2))
    assert lora == again
    assert all(option.recipe.lora for option in lora.options)
    assert "The same training: was not asked for." in str(lora)
    full = lab.advise(TINY, SMALL_GPU, seq_len=128, only="full")
    assert not any(option.recipe.lora for option in full.options)


def test_nothing_fits(guessed):
    gpu = replace(RTX, usable_bytes=RTX.context_bytes + 4 * MIB)
    found = lab.advise(TINY, gpu, seq_len=128)
    assert found.fitting == ()
    assert found.best == {}
    assert found.larger_gpu == gpus()[0].key  # any GPU of the catalogue holds so small a model
    text = str(found)
    assert f"({gpus()[0].key})" in text
    assert "--gpus N tries that" in text
    with pytest.raises(InputError, match="nothing fits"):
        found.write("never.py")


def test_bounds_of_an_unlisted_gpu_are_those_of_the_nearest(guessed):
    listed, described = (lab.advise("GPT-2", gpu, only="lora") for gpu in ("l4", "22GiB:8.9"))
    assert (listed.rated_as, described.rated_as) == ("l4", "l4")
    sentence = "Nothing is known of this GPU's speed: bounds are those of NVIDIA L4."
    assert sentence in str(described)
    assert sentence not in str(listed)
    assert described.options[0].seconds_per_token == listed.options[0].seconds_per_token
    assert described.to_dict()["rated_as"] == "l4"


def test_a_larger_gpu_is_one_with_memory_of_its_own(guessed):
    l4, llama = GPUS["l4"], catalogue.config("Llama-3.1-8B")
    asked = search.Search(llama, l4, 1, 64, None, 0.05, None)
    recipe = Recipe(seq_len=64, precision="bf16", optimizer="sgd")  # weights and gradients: 30 GiB
    assert asked.larger_gpu(recipe) == "a100-40gb"  # not the M4 Max of 48 GB
    assert len(guessed) == 1  # those that arithmetic rules out are not tried


def test_data_parallel_halves_the_bound(guessed):
    one = lab.advise(TINY, SMALL_GPU, seq_len=128, only="lora")
    two = lab.advise(TINY, SMALL_GPU, seq_len=128, only="lora", gpus=2)
    alone = {option.recipe: option for option in one.options}
    both = [option for option in two.options if option.recipe in alone]
    assert both
    for option in both:
        before = alone[option.recipe]
        assert option.seconds_per_token == before.seconds_per_token / 2
        assert option.needed_bytes == before.needed_bytes + 4 * shapes_of(TINY).adapters(16)
    assert two.best["changed"].recipe.ranks == 1
    with pytest.raises(InputError, match="a copy on each"):
        two.write("never.py")


def test_what_the_host_cannot_hold_does_not_fit(guessed):
    question = {"model": "Llama-2-70B", "gpu": "rtx-4090", "only": "full"}
    for count, gib, fits in ((1, 31, True), (2, 59, False), (2, 61, True)):
        found = lab.advise(**question, gpus=count, host_memory_bytes=gib * GIB)
        assert bool(found.fitting) == fits
        assert f"The host has {gib}.0 GiB" in str(found)
        if not fits:
            assert found.larger_gpu is None
            assert f"The smallest needs {30 * count}.0 GiB of the host: " in str(found)


def test_what_arithmetic_rules_out_is_not_simulated(guessed):
    found = lab.advise("Llama-2-70B", "a100-80gb")
    shapes = shapes_of(catalogue.config("Llama-2-70B"))
    assert found.ruled_out > 10
    assert guessed == list(dict.fromkeys(guessed))
    assert all(recipes_to_try.least_bytes(r, shapes) <= found.room_bytes for r in guessed)
    assert not any(recipe.lora is None and recipe.offload == "none" for recipe in guessed)


def test_where_much_fits_little_is_tried(guessed):
    """Compute-bound from the start: checkpointing is tried once, with one sequence or a larger
    batch, and never preferred. No greater change is tried where a smaller one will do."""
    best = lab.advise("SmolLM2-135M", "rtx-4090").best["same"].recipe
    assert best == best.but(checkpointing=False, offload="none", chunked_loss=False)
    assert best.batch_size == search.MOST_BATCH
    assert not any(recipe.precision == "fp32" for recipe in guessed)
    assert not any(recipe.optimizer in ("sgd", "adafactor") for recipe in guessed)
    assert not any(recipe.optimizer == "paged-adamw8bit" for recipe in guessed)
    assert any(recipe.quantize for recipe in guessed)


def test_what_cannot_be_simulated_is_named(monkeypatch, guessed):
    plain = search.estimate

    def refusing(config, *, gpu, recipe, loops):
        if recipe.lora:
            raise InputError("this model takes no adapters")
        return plain(config, gpu=gpu, recipe=recipe, loops=loops)

    monkeypatch.setattr(search, "estimate", refusing)
    found = lab.advise("SmolLM2-135M", "rtx-4090")
    assert any("takes no adapters" in sentence for sentence in found.refused)
    assert "Not tried: " in str(found)
    with pytest.raises(InputError, match="takes no adapters"):
        lab.advise("SmolLM2-135M", "rtx-4090", only="lora")


def test_a_margin_is_a_share():
    with pytest.raises(InputError, match="margin must be a share"):
        lab.advise("Llama-3.1-8B", "t4", margin=float("nan"))


def test_the_default_length_is_what_the_model_takes(guessed):
    config = catalogue.config("GPT-2", n_positions=256)
    assert lab.advise(config, "t4").seq_len == 256
    with pytest.raises(InputError, match="at most 256"):
        lab.advise(config, "t4", seq_len=257)
