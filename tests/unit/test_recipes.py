"""Recipes: contradictions and what a GPU cannot do are refused in a sentence; JSON is validated."""

import json
import math

import pytest

from gpumem.estimation.recipe import MOST_SEQUENCE, MOST_TOKENS, Recipe
from gpumem.hardware.catalogue import gpu
from gpumem.inputs import InputError

FULL = Recipe(
    batch_size=4,
    seq_len=512,
    precision="amp-bf16",
    optimizer="paged-adamw8bit",
    checkpointing=True,
    attention="flash",
    lora=16,
    lora_targets=("q_proj", "v_proj"),
    quantize="nf4-double",
    accumulate=8,
    offload="activations",
    chunked_loss=True,
)


def test_a_recipe_as_text():
    assert Recipe().tokens == 1024
    assert FULL.tokens == 4 * 512 * 8
    assert str(Recipe()) == "1 × 1024, fp32, adamw"
    assert str(FULL) == (
        "4 × 512, × 8 accumulated, amp-bf16, paged-adamw8bit, checkpointing, flash attention, "
        "LoRA 16, nf4-double, activations on the host, chunked loss"
    )
    assert str(Recipe(optimizer_in_backward=True)).endswith("adamw, optimizer in backward")
    assert str(Recipe(ranks=8)).endswith("adamw, sharded over 8")


def test_values_are_stored_in_their_plain_form():
    recipe = Recipe(precision="BF16", optimizer="Paged_AdamW8bit", lora=2, lora_targets=["q", "v"])
    assert (recipe.precision, recipe.optimizer) == ("bf16", "paged-adamw8bit")
    assert recipe.lora_targets == ("q", "v")
    assert Recipe(lora=2, lora_targets="q").lora_targets == ("q",)
    assert hash(recipe) == hash(recipe.but())


def test_but_changes_one_field_and_checks_again():
    assert FULL.but(accumulate=1).tokens == 4 * 512
    with pytest.raises(InputError, match="unknown field of a recipe 'batchsize'"):
        FULL.but(batchsize=1)
    with pytest.raises(InputError, match="give them LoRA adapters"):
        FULL.but(lora=None)


@pytest.mark.parametrize("recipe", [FULL, Recipe(ranks=8, precision="amp-bf16")])
def test_json_round_trip(recipe):
    record = json.loads(json.dumps(recipe.to_dict(), allow_nan=False))
    assert Recipe.from_dict(record) == recipe
    assert Recipe.from_dict({}) == Recipe()


HOST_WEIGHTS = {"offload": "weights", "checkpointing": True}
CONTRADICTIONS = [
    ({"batch_size": 2, "seq_len": MOST_SEQUENCE}, "tokens in one forward pass"),
    ({"optimizer_in_backward": True, "accumulate": 2}, "none left to accumulate"),
    ({"optimizer_in_backward": True, "precision": "amp-fp16"}, "before the gradient scaler"),
    ({"optimizer_in_backward": True, "offload": "optimizer"}, "every step would wait for a copy"),
    ({"optimizer_in_backward": True, **HOST_WEIGHTS}, "every step would wait for a copy"),
    ({"quantize": "int8"}, "quantized weights cannot be trained"),
    ({"lora_targets": ("q_proj",)}, "lora_targets without lora"),
    ({"quantize": "nf4", "lora": 8, **HOST_WEIGHTS}, "cannot fetch quantized weights"),
    ({"offload": "weights"}, "save nothing without checkpointing"),
    ({"precision": "amp-fp16", **HOST_WEIGHTS}, "here they are on several"),
    ({"offload": "optimizer", "optimizer": "adamw8bit"}, "where the GPU can reach it"),
    ({"optimizer": "paged-adamw8bit", **HOST_WEIGHTS}, "where the GPU can reach it"),
    ({"attention": "flash"}, "computes in half precision only"),
    ({"precision": "FP16"}, "fp16 weights cannot be trained"),
    ({"ranks": 2, "precision": "amp-fp16"}, "gradient scaler"),
    ({"offload": "optimizer", "optimizer": "fused-adamw"}, "a kernel of the GPU's"),
    ({"ranks": 2, "optimizer": "adamw8bit"}, "its own part"),
    ({"ranks": 2, "optimizer": "adafactor"}, "its own part"),
    ({"ranks": 2, "quantize": "nf4", "lora": 8}, "cut by rows"),
    ({"ranks": 2, "optimizer_in_backward": True}, "summed it"),
    ({"ranks": 2, "offload": "activations"}, "shares as a whole"),
    ({"ranks": 2, "offload": "optimizer"}, "shares as a whole"),
]


@pytest.mark.parametrize(("fields", "reason"), CONTRADICTIONS)
def test_a_contradiction_is_refused_with_its_reason(fields, reason):
    with pytest.raises(InputError, match=reason):
        Recipe(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer_in_backward": True, "precision": "amp-bf16", "offload": "activations"},
        {"accumulate": 2, "precision": "amp-fp16", "offload": "optimizer"},
        {"quantize": "int8", "lora": 8, "offload": "activations"},
        {"precision": "amp-bf16", "lora": 4, **HOST_WEIGHTS},
        {"attention": "flash", "precision": "amp-fp16"},
        {"optimizer": "adamw8bit", "offload": "activations"},
        {"batch_size": 2, "seq_len": MOST_TOKENS // 2},
        {"ranks": 2, "offload": "weights"},
    ],
)
def test_what_almost_contradicts_itself_is_a_recipe(fields):
    assert Recipe(**fields).to_dict() == {**Recipe().to_dict(), **fields}


@pytest.mark.parametrize(
    ("key", "fields", "reason"),
    [
        ("t4", {"precision": "bf16"}, "emulates it there"),
        ("v100", {"precision": "amp-bf16"}, "emulates it there"),
        ("t4", {"attention": "flash", "precision": "amp-fp16"}, "needs Ampere or later"),
        ("m4-max-128gb", {"attention": "flash", "precision": "bf16"}, "not written for"),
        ("m4-max-128gb", {"quantize": "nf4", "lora": 8}, "bitsandbytes has no kernels"),
        ("m3-ultra", {"optimizer": "adamw8bit"}, "bitsandbytes has no kernels"),
        ("v100", {"quantize": "int8", "lora": 8}, "int8 tensor cores"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused_with_its_name(key, fields, reason):
    with pytest.raises(InputError, match=reason) as caught:
        Recipe(**fields).check(gpu(key))
    assert gpu(key).name in str(caught.value)


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("t4", {"quantize": "int8", "lora": 8, "optimizer": "paged-adamw8bit"}),
        ("v100", {"quantize": "nf4", "lora": 8, "precision": "amp-fp16"}),
        ("m4-max-128gb", {"precision": "bf16"}),
        ("mi300x", {"precision": "bf16", "attention": "flash", "quantize": "int8", "lora": 8}),
        ("rtx-3060", {"precision": "amp-bf16", "attention": "flash", "optimizer": "adamw8bit"}),
    ],
)
def test_what_a_gpu_can_do_is_accepted(key, fields):
    Recipe(**fields).check(gpu(key))


# --- JSON is validated --------------------------------------------------------------------------

HOSTILE = {
    "no object": [None, 3, "a recipe", [["batch_size", 1]]],
    "batch_size": ["4", 4.0, True, None, 0, -1, 10**5000, 65_537],
    "seq_len": [MOST_SEQUENCE + 1, math.nan],
    "ranks": [0, 10**6],
    "lora": [1 << 20, False, "16"],
    "precision": [None, "fp8", "x" * 100_000, ["bf16"], "bf16\nand more"],
    "quantize": ["fp4", True],
    "checkpointing": [1, "true"],
    "lora_targets": ["", [], [""], [1], ["q\nv"], ["\ud800"], {"q": 1}, None],
    "batchsize": [1],
    "line\nbreak": [1],
    7: [1],
}


@pytest.mark.parametrize("field", HOSTILE)
def test_hostile_json_is_refused_in_a_sentence(field):
    for value in HOSTILE[field]:
        record = value if field == "no object" else {"lora": 1, field: value}
        with pytest.raises(InputError) as caught:
            Recipe.from_dict(record)
        text = str(caught.value)
        assert 10 < len(text) < 400
        assert "\n" not in text
