"""Recipes: what contradicts itself or a card is refused in a sentence, and JSON is not trusted."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.catalogue import gpu, gpus
from labkit.experiment import PRECISIONS
from labkit.memory import InputError
from labkit.recipes import (
    ALL_LINEAR,
    ATTENTIONS,
    MOST_ACCUMULATE,
    MOST_BATCH,
    MOST_RANK,
    MOST_SEQUENCE,
    MOST_TOKENS,
    OFFLOADS,
    OPTIMIZERS,
    QUANTIZATIONS,
    Recipe,
)

FULL = Recipe(
    batch_size=4, seq_len=512, precision="amp-bf16", optimizer="paged-adamw8bit",
    checkpointing=True, attention="flash", lora=16, lora_targets=("q_proj", "v_proj"),
    quantize="nf4-double", accumulate=8, offload="activations", chunked_loss=True,
)  # fmt: skip


def sentence_of(error: InputError) -> str:
    """The message, once it has been found to be one that a person can read."""
    text = str(error)
    assert 10 < len(text) < 400, text
    assert "\n" not in text
    assert text[0].isprintable()
    return text


def refusal(**fields) -> str:
    with pytest.raises(InputError) as caught:
        Recipe(**fields)
    return sentence_of(caught.value)


# --- plain use ----------------------------------------------------------------------------------


def test_a_recipe_says_its_tokens_and_itself():
    assert Recipe().tokens == 1024
    assert FULL.tokens == 4 * 512 * 8
    assert str(Recipe()) == "1 × 1024, fp32, adamw"
    assert str(FULL) == (
        "4 × 512, × 8 accumulated, amp-bf16, paged-adamw8bit, checkpointing, flash attention, "
        "LoRA 16, nf4-double, activations on the host, chunked loss"
    )
    assert str(Recipe(optimizer_in_backward=True)).endswith("adamw, optimizer in backward")


def test_values_are_stored_in_their_plain_form():
    recipe = Recipe(precision="BF16", optimizer="Paged_AdamW8bit", lora=2, lora_targets=["q", "v"])
    assert (recipe.precision, recipe.optimizer) == ("bf16", "paged-adamw8bit")
    assert recipe.lora_targets == ("q", "v")
    assert Recipe(lora=2, lora_targets="q").lora_targets == ("q",)
    assert hash(recipe) == hash(recipe.but())


def test_but_changes_one_field_and_checks_again():
    assert FULL.but(accumulate=1) == Recipe(**{**FULL.to_dict(), "accumulate": 1})
    with pytest.raises(InputError, match="unknown field of a recipe 'batchsize'"):
        FULL.but(batchsize=1)
    with pytest.raises(InputError, match="give them LoRA adapters"):
        FULL.but(lora=None)


@pytest.mark.parametrize("recipe", [Recipe(), FULL])
def test_json_round_trip(recipe):
    record = json.loads(json.dumps(recipe.to_dict(), allow_nan=False))
    assert Recipe.from_dict(record) == recipe
    assert Recipe.from_dict({}) == Recipe()


# --- contradictions -----------------------------------------------------------------------------

CONTRADICTIONS = [
    ({"batch_size": 2, "seq_len": MOST_SEQUENCE}, "tokens in one forward pass"),
    ({"optimizer_in_backward": True, "accumulate": 2}, "none left to accumulate"),
    ({"optimizer_in_backward": True, "precision": "amp-fp16"}, "before the gradient scaler"),
    ({"optimizer_in_backward": True, "offload": "optimizer"}, "every step would wait for a copy"),
    (
        {"optimizer_in_backward": True, "offload": "weights", "checkpointing": True},
        "every step would wait for a copy",
    ),
    ({"quantize": "nf4"}, "quantized weights cannot be trained"),
    ({"quantize": "int8"}, "quantized weights cannot be trained"),
    ({"lora_targets": ("q_proj",)}, "lora_targets without lora"),
    (
        {"quantize": "nf4", "lora": 8, "offload": "weights", "checkpointing": True},
        "cannot fetch them layer by layer",
    ),
    ({"offload": "weights"}, "save nothing without checkpointing"),
    ({"offload": "weights", "checkpointing": True, "precision": "amp-fp16"}, "they are on two"),
    ({"offload": "optimizer", "optimizer": "adamw8bit"}, "where the GPU can reach it"),
    (
        {"offload": "weights", "checkpointing": True, "optimizer": "paged-adamw8bit"},
        "where the GPU can reach it",
    ),
    ({"attention": "flash"}, "computes in half precision only"),
    ({"precision": "fp16"}, "fp16 weights cannot be trained"),
    ({"precision": "FP16"}, "fp16 weights cannot be trained"),
]


@pytest.mark.parametrize(("fields", "reason"), CONTRADICTIONS)
def test_a_contradiction_is_refused_with_its_reason(fields, reason):
    assert reason in refusal(**fields)
    with pytest.raises(InputError, match=reason):
        Recipe.from_dict(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer_in_backward": True, "precision": "amp-bf16", "offload": "activations"},
        {"accumulate": 2, "precision": "amp-fp16", "offload": "optimizer"},
        {"quantize": "int8", "lora": 8, "offload": "activations"},
        {"offload": "weights", "checkpointing": True, "precision": "amp-bf16", "lora": 4},
        {"attention": "flash", "precision": "amp-fp16"},
        {"optimizer": "adamw8bit", "offload": "activations"},
        {"batch_size": 2, "seq_len": MOST_TOKENS // 2},
    ],
)
def test_what_lies_just_beside_a_contradiction_is_a_recipe(fields):
    assert Recipe(**fields).to_dict() == {**Recipe().to_dict(), **fields}


# --- cards --------------------------------------------------------------------------------------

CARDS = [
    ("t4", {"precision": "bf16"}, "emulates it there"),
    ("v100", {"precision": "amp-bf16"}, "emulates it there"),
    ("t4", {"attention": "flash", "precision": "amp-fp16"}, "needs Ampere or later"),
    ("m4-max", {"attention": "flash", "precision": "bf16"}, "not written for"),
    ("m4-max", {"quantize": "nf4", "lora": 8}, "bitsandbytes has no kernels"),
    ("m3-ultra", {"optimizer": "adamw8bit"}, "bitsandbytes has no kernels"),
    ("v100", {"quantize": "int8", "lora": 8}, "int8 tensor cores"),
]


@pytest.mark.parametrize(("card", "fields", "reason"), CARDS)
def test_what_a_card_lacks_is_refused_with_its_name(card, fields, reason):
    with pytest.raises(InputError) as caught:
        Recipe(**fields).check(gpu(card))
    assert reason in sentence_of(caught.value)
    assert gpu(card).name in str(caught.value)


@pytest.mark.parametrize(
    ("card", "fields"),
    [
        ("t4", {"quantize": "int8", "lora": 8, "optimizer": "paged-adamw8bit"}),
        ("v100", {"quantize": "nf4", "lora": 8, "precision": "amp-fp16"}),
        ("m4-max", {"precision": "bf16"}),
        ("mi300x", {"precision": "bf16", "attention": "flash", "quantize": "int8", "lora": 8}),
        ("rtx-3060", {"precision": "amp-bf16", "attention": "flash", "optimizer": "adamw8bit"}),
    ],
)
def test_what_a_card_has_is_accepted(card, fields):
    Recipe(**fields).check(gpu(card))


def test_plain_training_is_accepted_by_every_card():
    for card in gpus():
        Recipe().check(card)
        Recipe(precision="amp-fp16", lora=8, checkpointing=True, chunked_loss=True).check(card)


# --- nothing in the JSON is trusted -------------------------------------------------------------

NESTED: list = []
for _ in range(5000):  # deeper than Python can print
    NESTED = [NESTED]

HOSTILE = [
    None, 3, "a recipe", [], [["batch_size", 1]],
    {"batch_size": "4"}, {"batch_size": 4.0}, {"batch_size": True}, {"batch_size": None},
    {"batch_size": 0}, {"batch_size": -1}, {"batch_size": 10**5000}, {"batch_size": -(10**5000)},
    {"batch_size": MOST_BATCH + 1}, {"seq_len": MOST_SEQUENCE + 1}, {"seq_len": math.nan},
    {"accumulate": math.inf}, {"accumulate": MOST_ACCUMULATE + 1}, {"lora": MOST_RANK + 1},
    {"lora": False}, {"lora": 0}, {"lora": "16"}, {"batch_size": NESTED}, {"seq_len": {"a": 1}},
    {"precision": None}, {"precision": "fp8"}, {"precision": "x" * 100_000},
    {"precision": 10**5000}, {"precision": ["bf16"]}, {"precision": NESTED},
    {"precision": "bf16\nand more"},
    {"optimizer": "adam"}, {"optimizer": {}}, {"attention": 7}, {"offload": None},
    {"quantize": "fp4", "lora": 8}, {"quantize": True, "lora": 8}, {"quantize": [], "lora": 8},
    {"checkpointing": 1}, {"checkpointing": "true"}, {"chunked_loss": None},
    {"optimizer_in_backward": NESTED}, {"checkpointing": "y" * 100_000},
    {"lora_targets": "", "lora": 1}, {"lora_targets": [], "lora": 1},
    {"lora_targets": [""], "lora": 1}, {"lora_targets": [1], "lora": 1},
    {"lora_targets": [10**5000], "lora": 1}, {"lora_targets": ["q"] * 65, "lora": 1},
    {"lora_targets": ["q" * 101], "lora": 1}, {"lora_targets": ["q\nv"], "lora": 1},
    {"lora_targets": ["\ud800"], "lora": 1}, {"lora_targets": {"q": 1}, "lora": 1},
    {"lora_targets": NESTED, "lora": 1}, {"lora_targets": None},
    {"batchsize": 1}, {"z" * 100_000: 1}, {"line\nbreak": 1}, {"__class__": "x"}, {7: 1},
    {(1, 2): 1}, {10**5000: 1}, {None: 1},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_json_is_refused_in_a_sentence(number):
    with pytest.raises(InputError) as caught:
        Recipe.from_dict(HOSTILE[number])
    sentence_of(caught.value)


NAMES = st.text(max_size=20) | st.sampled_from(["q_proj", "all-linear", "x" * 200])
JUNK = st.one_of(
    st.none(), st.booleans(), st.floats(), NAMES, st.integers(), st.just(10**5000),
    st.lists(NAMES, max_size=3), st.dictionaries(NAMES, st.integers(), max_size=2),
)  # fmt: skip


def sometimes(valid: st.SearchStrategy) -> st.SearchStrategy:
    """Mostly a value that is allowed: a record of only wrong ones says little."""
    return st.integers(0, 19).flatmap(lambda n: JUNK if n == 0 else valid)


RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "batch_size": sometimes(st.integers(1, 64)),
        "seq_len": sometimes(st.integers(1, 8192)),
        "precision": sometimes(st.sampled_from(PRECISIONS)),
        "optimizer": sometimes(st.sampled_from(OPTIMIZERS)),
        "optimizer_in_backward": sometimes(st.booleans()),
        "checkpointing": sometimes(st.booleans()),
        "attention": sometimes(st.sampled_from(ATTENTIONS)),
        "lora": sometimes(st.none() | st.integers(1, 256)),
        "lora_targets": sometimes(st.just(list(ALL_LINEAR)) | st.just(["q_proj"])),
        "quantize": sometimes(st.none() | st.sampled_from(QUANTIZATIONS)),
        "accumulate": sometimes(st.integers(1, 64)),
        "offload": sometimes(st.sampled_from(OFFLOADS)),
        "chunked_loss": sometimes(st.booleans()),
    },
)
WITH_UNKNOWN = st.tuples(RECORDS, st.integers(0, 29), NAMES).map(
    lambda drawn: drawn[0] | ({drawn[2]: drawn[1]} if drawn[1] == 0 else {})
)


def test_any_record_is_accepted_or_refused_in_a_sentence():
    outcomes = {"accepted": 0, "refused": 0}
    try_records(outcomes)
    assert min(outcomes.values()) > 1000  # a fair mixture


@settings(max_examples=10_000)
@given(record=WITH_UNKNOWN, card=st.sampled_from(gpus()))
def try_records(outcomes, record, card):
    try:
        recipe = Recipe.from_dict(record)
        assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
        assert len(str(recipe)) < 200
        recipe.check(card)
    except InputError as error:
        sentence_of(error)
        outcomes["refused"] += 1
    else:
        outcomes["accepted"] += 1
