"""Advice: its bounds rule out nothing that fits, it holds what it says, its words are true."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import labkit as lab
from labkit import candidates, models, recipe_search
from labkit.catalogue import GPUS, gpus
from labkit.memory import GIB, MIB, InputError, Mark, Trace
from labkit.recipes import Recipe

SIZE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    return models.config("SmolLM2-135M", **SIZE)


@pytest.fixture(scope="module")
def small_card():
    """A card on which the tiny model needs its savers."""
    card = GPUS["rtx-4090"]
    return replace(card, usable_bytes=card.context_bytes + 120 * MIB)


@pytest.fixture(scope="module")
def advised(tiny, small_card):
    return lab.advise(tiny, small_card, seq_len=512)


# --- arithmetic -----------------------------------------------------------------------------------


def test_sizes_are_counted(tiny):
    sizes = candidates.sizes_of(tiny)
    attention, mlp, norms = 2 * 256 * 256 + 2 * 256 * 128, 3 * 256 * 512, 2 * 256
    assert sizes.in_layers == 2 * (attention + mlp + norms)
    assert sizes.linear == 2 * (attention + mlp)
    assert sizes.parameters == sizes.in_layers + 4096 * 256 + 256
    assert sizes.largest == 4096 * 256
    ends = 2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 512)
    assert sizes.adapters == 16 * 2 * ends


def rungs_to_check():
    for key, names in {
        "rtx-4090": ("amp-bf16 adamw", "bf16 adamw8bit", "nf4-double"),
        "t4": ("amp-fp16 adafactor", "int8"),
    }.items():
        card = GPUS[key]
        for way in candidates.ways(card, 64, None):
            name = way.quantize or ("lora" if way.lora else f"{way.precision} {way.optimizer}")
            if name in names:
                yield from ((card, rung) for rung in candidates.rungs(way, card, 1))


@pytest.mark.parametrize(
    ("card", "rung"), list(rungs_to_check()), ids=lambda value: getattr(value, "key", str(value))
)
def test_what_arithmetic_rules_out_would_not_fit(tiny, card, rung):
    """The bound is below what the simulation allocates, and not idle: weights are in it."""
    least = candidates.least_bytes(rung, candidates.sizes_of(tiny))
    found = lab.estimate(tiny, gpu=card, recipe=rung)
    assert 0 < least <= found.peak_allocated_bytes
    lasting = found.by_category["weights"] + found.by_category.get("optimizer", 0)
    assert least > 0.4 * lasting


def test_ddp_keeps_every_gradient_twice(tiny):
    sizes = candidates.sizes_of(tiny)
    plain = Recipe(precision="bf16")
    assert candidates.bucket_bytes(plain, sizes, 1) == 0
    assert candidates.bucket_bytes(plain, sizes, 2) == 2 * sizes.parameters
    assert candidates.bucket_bytes(plain.but(lora=16), sizes, 8) == 4 * sizes.adapters
    more = candidates.least_bytes(plain, sizes, 2) - candidates.least_bytes(plain, sizes, 1)
    assert more == 2 * sizes.parameters


def test_data_parallel_forbids_what_ddp_cannot_do():
    card = GPUS["a100-80gb"]
    for way in candidates.ways(card, 1024, None):
        alone, together = candidates.rungs(way, card, 1), candidates.rungs(way, card, 2)
        copies = [rung for rung in together if rung.ranks == 1]
        assert not any(r.optimizer_in_backward or r.offload == "weights" for r in copies)
        able = way.optimizer in ("adamw", "sgd") and way.precision != "amp-fp16"
        assert {r.ranks for r in together} == ({1, 2} if able and not way.quantize else {1})
        if way.optimizer == "adamw":
            assert any(rung.offload == "weights" for rung in alone) == (way.quantize is None)


def test_no_offload_where_host_and_card_share_memory():
    card = GPUS["m4-max"]
    found = [r for way in candidates.ways(card, 64, None) for r in candidates.rungs(way, card, 1)]
    assert found
    assert {rung.offload for rung in found} == {"none"}
    assert not any(rung.quantize or "8bit" in rung.optimizer for rung in found)


@pytest.mark.parametrize("key", GPUS)
def test_every_candidate_runs_on_its_card_and_is_tried_once(key):
    card = GPUS[key]
    found = [r for way in candidates.ways(card, 64, None) for r in candidates.rungs(way, card, 1)]
    for rung in found:
        rung.check(card)
    unlike = [rung for rung in found if rung.chunked_loss]
    assert len(unlike) == len(set(unlike))


def test_bytes_over_the_link(tiny):
    sizes = candidates.sizes_of(tiny)
    on_host = Recipe(offload="weights", checkpointing=True)
    assert candidates.link_bytes(Recipe(), sizes, 7) == 0
    assert candidates.link_bytes(Recipe(offload="activations"), sizes, 7) == 14
    assert candidates.link_bytes(Recipe(offload="optimizer"), sizes, 7) == 8 * sizes.parameters
    assert candidates.link_bytes(on_host, sizes, 7) == 12 * sizes.in_layers
    frozen = on_host.but(lora=8, precision="bf16")
    assert candidates.link_bytes(frozen, sizes, 7) == 4 * sizes.in_layers


def test_the_bound_is_the_roofline_and_the_link():
    card = GPUS["a100-80gb"]  # 312 TFLOPS, 2039 GB/s, PCI Express 4
    assert recipe_search.least_seconds(card, "bf16", 624 * 10**12, 1, 0) == pytest.approx(2)
    assert recipe_search.least_seconds(card, "fp32", 624 * 10**12, 1, 0) == pytest.approx(4)
    assert recipe_search.least_seconds(card, "bf16", 1, 4078 * 10**9, 0) == pytest.approx(2)
    crossing = recipe_search.least_seconds(card, "bf16", 624 * 10**12, 1, 63 * 10**9)
    assert crossing == pytest.approx(2 + 2)
    assert candidates.link_gb_per_s(GPUS["t4"]) == 15.75
    assert candidates.link_gb_per_s(GPUS["h100"]) == 63
    assert candidates.link_gb_per_s(GPUS["m4-max"]) is None
    by_bytes = recipe_search.least_seconds(GPUS["m4-max"], "bf16", 10**18, 546 * 10**9, 10**18)
    assert by_bytes == pytest.approx(1)  # Apple publishes no rate


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
        batch = recipe_search.next_batch(tried, room, fixed // 2)
    fitting = [batch for batch, nbytes in tried.items() if nbytes <= room]
    most = spare // each
    if most == 0:
        assert fitting == []
        assert tried == {1: fixed + each}
    else:
        assert max(fitting) == min(1 << int(math.log2(most)), recipe_search.MOST_BATCH)
        assert len(tried) <= 5


# --- words ----------------------------------------------------------------------------------------


def test_what_is_given_up_is_said(tiny):
    sizes = candidates.sizes_of(tiny)
    assert candidates.changes(Recipe(precision="amp-bf16", checkpointing=True)) == ()
    assert "1/256" in candidates.changes(Recipe(precision="bf16"))[0]
    quantised = candidates.changes(Recipe(precision="bf16", lora=16, quantize="nf4-double"), sizes)
    share = f"{sizes.adapters / sizes.parameters:.1%}"
    assert quantised == (
        f"only adapters are trained, {share} of the parameters",
        "the frozen weights are rounded to 4 bits",
    )
    assert len(candidates.changes(Recipe(optimizer="sgd"))) == 2
    assert candidates.changes(Recipe(optimizer="adamw8bit")) == candidates.changes(
        Recipe(optimizer="paged-adamw8bit")
    )


def test_what_is_paid_is_said():
    assert candidates.costs(Recipe(), 0, 0) == ()
    recipe = Recipe(precision="amp-fp16", checkpointing=True, chunked_loss=True)
    assert len(candidates.costs(recipe, 0, 0)) == 3
    assert "+33 %" in candidates.costs(Recipe(checkpointing=True), 0, 0)[0]
    assert "+50 %" in candidates.costs(Recipe(checkpointing=True, lora=4), 0, 0)[0]
    sentences = candidates.costs(Recipe(offload="activations"), 3 * GIB, 2 * GIB)
    assert sentences == ("activations cross the PCIe link twice: 3 GiB a step",
                         "2.00 GiB of host memory")  # fmt: skip


def test_bf16_loses_small_updates():
    """The sentence about 1/256: half a unit in the last place of eight bits."""
    import torch

    weight = torch.tensor(1.0, dtype=torch.bfloat16)
    assert weight + weight.new_tensor(1 / 256 - 1e-4) == weight
    assert weight + weight.new_tensor(1 / 256 + 1e-4) > weight


# --- the search -----------------------------------------------------------------------------------


def test_every_answer_holds_when_it_is_estimated_again(advised, tiny, small_card):
    assert advised.fitting
    for option in {*advised.best.values(), advised.smallest}:
        recipe = Recipe.from_dict(json.loads(json.dumps(option.to_dict()))["recipe"])
        found = lab.estimate(tiny, gpu=small_card, recipe=recipe)
        assert found.peak_reserved_bytes == option.needed_bytes
        assert option.fits == (option.needed_bytes <= advised.room_bytes)
        assert option.fits <= found.fits
        assert found.flops == option.flops


def test_same_training_comes_first_then_fewer_changes(advised):
    ranks = [option.rank() for option in advised.options]
    assert ranks == sorted(ranks)
    assert set(advised.best) == {"same", "changed"}
    assert advised.best["same"] == advised.fitting[0]
    for option in advised.options:
        assert (option.group == "same") == (option.changes == ())
        assert option.recipe.seq_len == 512
        assert option.recipe.batch_size.bit_count() == 1
        assert option.needed_bytes >= candidates.least_bytes(
            option.recipe, candidates.sizes_of(models.config("SmolLM2-135M", **SIZE))
        )


def test_the_frontier_is_what_nothing_beats(advised):
    best = advised.frontier
    for option in advised.fitting:
        beaten = [
            other for other in advised.fitting
            if other.group == option.group and other != option
            and other.needed_bytes <= option.needed_bytes
            and other.seconds_per_token <= option.seconds_per_token
        ]  # fmt: skip
        assert (option in best) == (not beaten)


def test_the_same_question_has_the_same_answer(tiny, small_card, guessed):
    advised, again = (lab.advise(tiny, small_card, seq_len=512) for _ in range(2))
    assert again == advised
    first, second = advised.to_dict(), again.to_dict()
    first.pop("seconds"), second.pop("seconds")
    assert json.dumps(first) == json.dumps(second)
    assert first["options"][first["best"]["same"]]["group"] == "same"
    assert [first["options"][i]["fits"] for i in first["frontier"]] == [True] * len(
        advised.frontier
    )


def test_only_one_kind(tiny, small_card, guessed):
    lora = lab.advise(tiny, small_card, seq_len=128, only="lora")
    assert all(option.recipe.lora for option in lora.options)
    assert "The same training: was not asked for." in str(lora)
    full = lab.advise(tiny, small_card, seq_len=128, only="full")
    assert not any(option.recipe.lora for option in full.options)


def test_nothing_fits(tiny, guessed):
    card = GPUS["rtx-4090"]
    card = replace(card, usable_bytes=card.context_bytes + 4 * MIB)
    found = lab.advise(tiny, card, seq_len=128)
    assert found.fitting == ()
    assert found.best == {}
    assert found.larger_gpu == gpus()[0].key  # any card of the catalogue holds so small a model
    text = str(found)
    assert f"({gpus()[0].key})" in text
    assert "--gpus N tries that, too" in text
    with pytest.raises(InputError, match="nothing fits"):
        found.write("never.py")


def test_data_parallel_halves_the_bound(tiny, small_card, guessed):
    one = lab.advise(tiny, small_card, seq_len=128, only="lora")
    two = lab.advise(tiny, small_card, seq_len=128, only="lora", gpus=2)
    shared = {o.recipe: o for o in one.options}.keys() & {o.recipe: o for o in two.options}.keys()
    assert shared
    alone = {option.recipe: option for option in one.options}
    for option in two.options:
        if option.recipe in shared:
            before = alone[option.recipe]
            assert option.seconds_per_token == before.seconds_per_token / 2
            extra = 4 * candidates.sizes_of(tiny).adapters
            assert option.needed_bytes == before.needed_bytes + extra
    assert two.best["changed"].recipe.ranks == 1
    with pytest.raises(InputError, match="a copy on each"):
        two.write("never.py")


@pytest.fixture
def guessed(monkeypatch):
    """Estimates by a formula; the recipes that were asked for, in order."""
    asked = []

    def estimate(config, *, gpu, recipe):
        asked.append(recipe)
        least = candidates.least_bytes(recipe, candidates.sizes_of(config))
        each = 30 * MIB if recipe.checkpointing or recipe.offload == "activations" else 100 * MIB
        needed = least + each * recipe.batch_size
        again = 1 + 0.3 * recipe.checkpointing + 0.02 * recipe.chunked_loss
        work = 10**12 * recipe.tokens * again
        run = SimpleNamespace(trace=Trace("cpu:0", (), (), (Mark(0, "step 1"),)))
        return SimpleNamespace(
            peak_reserved_bytes=needed, host_bytes=0, flops=int(work), moved_bytes=10**9,
            sent_bytes=10**9 * (recipe.ranks > 1), fits=needed <= gpu.budget_bytes, run=run,
        )  # fmt: skip

    monkeypatch.setattr(recipe_search, "estimate", estimate)
    return asked


def test_what_arithmetic_rules_out_is_not_simulated(guessed):
    found = lab.advise("Llama-2-70B", "a100-80gb")
    sizes = candidates.sizes_of(models.config("Llama-2-70B"))
    assert found.ruled_out > 10
    assert guessed == list(dict.fromkeys(guessed))
    assert all(candidates.least_bytes(r, sizes) <= found.room_bytes for r in guessed)
    assert not any(recipe.lora is None and recipe.offload == "none" for recipe in guessed)


def test_float32_and_greater_changes_are_left_out_where_less_will_do(guessed):
    lab.advise("SmolLM2-135M", "rtx-4090")
    assert not any(recipe.precision == "fp32" for recipe in guessed)
    assert not any(recipe.optimizer in ("sgd", "adafactor") for recipe in guessed)
    assert not any(recipe.optimizer == "paged-adamw8bit" for recipe in guessed)
    assert any(recipe.quantize for recipe in guessed)


def test_savers_stop_where_they_lower_the_bound_no_further(guessed):
    """Compute-bound from the start: checkpointing is tried once, with one sequence or a larger
    batch, and never preferred."""
    found = lab.advise("SmolLM2-135M", "rtx-4090")
    best = found.best["same"].recipe
    assert best == best.but(checkpointing=False, offload="none", chunked_loss=False)
    assert best.batch_size == recipe_search.MOST_BATCH


def test_what_a_larger_batch_would_still_bring(advised):
    one = advised.options[0]
    at = {b: replace(one, recipe=one.recipe.but(batch_size=b), fits=b < 8, seconds_per_token=c)
          for b, c in {1: 3.0, 2: 2.0, 4: 1.5, 8: 1.25}.items()}  # fmt: skip
    assert recipe_search.left_to_gain([at[1]]) == 1
    assert recipe_search.left_to_gain([at[8]]) == 1
    assert recipe_search.left_to_gain([at[1], at[2]]) == pytest.approx(1 / 2)  # 1 + 2 / batch
    assert recipe_search.left_to_gain([at[2], at[8], at[4]]) == pytest.approx(0.5 / 1.5)


def test_a_way_that_cannot_be_simulated_is_named(monkeypatch, guessed):
    plain = recipe_search.estimate

    def refusing(config, *, gpu, recipe):
        if recipe.lora:
            raise InputError("this model takes no adapters")
        return plain(config, gpu=gpu, recipe=recipe)

    monkeypatch.setattr(recipe_search, "estimate", refusing)
    found = lab.advise("SmolLM2-135M", "rtx-4090")
    assert any("takes no adapters" in sentence for sentence in found.refused)
    assert "Not tried: " in str(found)
    with pytest.raises(InputError, match="takes no adapters"):
        lab.advise("SmolLM2-135M", "rtx-4090", only="lora")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu": "rtx-4091"}, "Did you mean 'rtx-4090'"),
        ({"model": "Lama-3.1-8B"}, "Did you mean 'Llama-3.1-8B'"),
        ({"gpus": 0}, "gpus must be from 1"),
        ({"gpus": True}, "gpus must be a whole number"),
        ({"seq_len": 0}, "seq_len must be from 1"),
        ({"seq_len": 10**6}, "at most 131072"),
        ({"only": "half"}, "unknown kind of training"),
        ({"margin": 1}, "margin must be a share"),
        ({"margin": float("nan")}, "margin must be a share"),
        ({"margin": "5%"}, "margin must be a share"),
    ],
)
def test_bad_questions(options, words):
    with pytest.raises(InputError, match=words):
        lab.advise(**{"model": "Llama-3.1-8B", "gpu": "t4", **options})


def test_the_default_length_is_what_the_model_takes(guessed):
    config = models.config("GPT-2", n_positions=256)
    assert lab.advise(config, "t4").seq_len == 256
    with pytest.raises(InputError, match="at most 256"):
        lab.advise(config, "t4", seq_len=257)


def test_write_takes_the_best_of_a_group(advised, tmp_path):
    with pytest.raises(InputError, match="unknown group 'best'"):
        advised.write(tmp_path / "t.py", which="best")
    for which, option in advised.best.items():
        path = advised.write(tmp_path / f"{which}.py", which=which)
        assert str(option.recipe) in " ".join(path.read_text(encoding="utf-8").split())
    path = advised.write(tmp_path / "first.py")
    assert path.read_text() == (tmp_path / "same.py").read_text()
    path = advised.write(tmp_path / "small.py", which=advised.smallest)
    assert f"BATCH_SIZE, SEQ_LEN = {advised.smallest.recipe.batch_size}, 512" in path.read_text()
