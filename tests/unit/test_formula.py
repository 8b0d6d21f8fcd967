"""The formula: exact where it says so, the published numbers where it does not."""

import pytest
from transformers import GPT2Config, LlamaConfig

import labkit as lab
from gpumem.estimation.textbook_formula import Part, formula_estimate
from gpumem.estimation.weight_shapes import shapes_of
from gpumem.inputs import InputError

LLAMA = LlamaConfig(
    hidden_size=256,
    intermediate_size=320,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
    tie_word_embeddings=False,
)
GPT2 = GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=1000, n_positions=64)
STORED = (Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER)
SMALL = {"batch_size": 2, "seq_len": 32}


def rows_of(config, gpu="a100-80gb", **how):
    trace = lab.estimate(config, gpu=gpu, **how)
    return {row.part: row for row in formula_estimate(config, **how).beside(trace.run)}, trace


# --- what is stored -------------------------------------------------------------------------------


#: With biases, tied embeddings, and layers of another kind: for both models.
FOR_BOTH = [
    {},
    {"optimizer": "adafactor"},
    {"precision": "bf16", "lora": 4, "quantize": "nf4-double"},
    {"precision": "bf16", "lora": 8, "quantize": "int8"},
]
FOR_ONE = [
    {"precision": "bf16"},
    {"precision": "amp-bf16", "optimizer": "sgd"},
    {"precision": "bf16", "optimizer": "adamw8bit"},
    {"precision": "bf16", "optimizer": "paged-adamw8bit"},
    {"precision": "bf16", "lora": 4},
    {"precision": "amp-fp16", "lora": 4},
    {"precision": "bf16", "lora": 4, "quantize": "nf4"},
    {"accumulate": 2},
]
CASES = [*((GPT2, how) for how in FOR_BOTH), *((LLAMA, how) for how in FOR_BOTH + FOR_ONE)]


@pytest.mark.parametrize(
    ("config", "how"), CASES, ids=[f"{config.model_type} {how}" for config, how in CASES]
)
def test_what_is_stored_is_exact(config, how):
    rows, _ = rows_of(config, **SMALL, **how)
    for part in STORED:
        assert rows[part].formula_bytes == rows[part].highest_bytes, part


def test_adapters_on_named_layers_only():
    how = {"precision": "bf16", "lora": 4, "lora_targets": ("q_proj", "v_proj")}
    rows, _ = rows_of(LLAMA, **SMALL, **how)
    # q_proj is 256 × 256, v_proj 128 × 256; adapters are float32.
    assert rows[Part.GRADIENTS].formula_bytes == 4 * 3 * 4 * (256 + 256 + 128 + 256)


def test_in_backward_at_least_the_largest_gradient_is_alive():
    rows, _ = rows_of(LLAMA, **SMALL, optimizer_in_backward=True)
    row = rows[Part.GRADIENTS]
    assert row.formula_bytes == 4 * 1000 * 256 <= row.highest_bytes


# --- what is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "attention", "per_channel", "per_score"),
    [
        ("fp32", "eager", 66, 9),  # the masks stay one byte
        ("amp-bf16", "eager", 34, 5),
        ("bf16", "sdpa", 34, 0),
    ],
)
def test_the_published_terms(precision, attention, per_channel, per_score):
    batch, seq = 3, 700
    formula = formula_estimate(
        LLAMA, batch_size=batch, seq_len=seq, precision=precision, attention=attention
    )
    tokens = batch * seq
    layer = tokens * 256 * per_channel + per_score * 4 * seq * tokens
    assert formula.by_part[Part.ACTIVATIONS] == 3 * layer
    assert formula.by_part[Part.LOGITS] == 4 * tokens * 1000
    assert formula.total_bytes == sum(term.nbytes for term in formula.terms)


def test_checkpointing_saves_inputs_and_a_chunked_loss_a_piece():
    formula = formula_estimate(
        LLAMA, batch_size=8, seq_len=512, precision="bf16", checkpointing=True
    )
    assert formula.by_part[Part.ACTIVATIONS] == 2 * 3 * 8 * 512 * 256
    chunked = formula_estimate(LLAMA, batch_size=8, seq_len=512, chunked_loss=True)
    assert chunked.by_part[Part.LOGITS] == 4 * 1024 * 1000
    short = formula_estimate(LLAMA, batch_size=1, seq_len=512, chunked_loss=True)
    assert short.by_part[Part.LOGITS] == 4 * 512 * 1000


# --- beside a trace -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"precision": "amp-bf16"}, {"checkpointing": True}])
def test_the_parts_sum_to_the_peak(how):
    rows, trace = rows_of(LLAMA, batch_size=4, seq_len=128, **how)
    assert sum(row.peak_bytes for row in rows.values()) == trace.peak_allocated_bytes
    assert all(row.highest_bytes >= row.peak_bytes >= 0 for row in rows.values())


def test_copies_of_logits_and_of_weights_are_counted():
    with_copies, _ = rows_of(LLAMA, batch_size=4, seq_len=128, precision="amp-bf16")
    without, _ = rows_of(LLAMA, batch_size=4, seq_len=128, precision="bf16")
    assert without[Part.LOGITS].highest_bytes == 3 * without[Part.LOGITS].formula_bytes
    matrices = shapes_of(LLAMA).in_linear
    assert with_copies[Part.COPIES].highest_bytes == 2 * (matrices + 1000 * 256)
    assert with_copies[Part.COPIES].formula_bytes is None
    assert Part.COPIES not in without


# --- bad input ------------------------------------------------------------------------------------


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="no term for what lives on the host"):
        formula_estimate(LLAMA, offload="optimizer")
