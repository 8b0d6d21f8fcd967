"""Each technique of a recipe does what it says, and simulating it gives the bytes."""

import gc

import pytest
import torch
from torch.testing import assert_close

import labkit as lab
from benchmarks.setups import TINY as SIZES
from gpumem.estimation import model_building
from gpumem.estimation.model_building import build_model
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.techniques import chunked_loss
from gpumem.estimation.training import _Job, images_for
from gpumem.estimation.weight_shapes import shapes_of
from gpumem.inputs import InputError
from gpumem.models import catalogue
from gpumem.models.config import config_from_dict
from gpumem.trace import Category
from gpumem.tracker import track

CPU = torch.device("cpu")
LLAMA = config_from_dict({"model_type": "llama", **SIZES})
TIED = config_from_dict({"model_type": "llama", **SIZES, "tie_word_embeddings": True})
GPT2 = config_from_dict(
    {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 512,
        "n_positions": 128,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
)
GEMMA2 = config_from_dict(
    {
        **SIZES,
        "model_type": "gemma2",
        "num_hidden_layers": 2,
        "head_dim": 32,
        "final_logit_softcapping": 0.5,
    }
)
EXPERTS = config_from_dict(
    {
        **SIZES,
        "model_type": "olmoe",
        "intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
)
IMAGES = config_from_dict(
    {
        "model_type": "llava",
        "text_config": {"model_type": "llama", **SIZES},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        "image_token_index": 500,
        "image_seq_length": 16,
    }
)
SMALL = {"batch_size": 2, "seq_len": 24}


def tokens(batch_size=2, seq_len=24, vocabulary=512, seed=7):
    shape = (batch_size, seq_len)
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def built(config, recipe, weights=None):
    """The recipe's own model and job, with given weights where they are to be compared."""
    torch.manual_seed(1)
    model = build_model(config, recipe, CPU, None)
    if weights is not None:
        named = dict(model.named_parameters())
        assert named.keys() == weights.keys()
        with torch.no_grad():
            for name, value in weights.items():
                named[name].copy_(value)
    return model, _Job(model, recipe, CPU, keeps_outputs=False)


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(recipe, weights, batches, config=LLAMA):
    """Losses, and the weights afterwards."""
    model, job = built(config, recipe, weights)
    losses = []
    for ids in batches:
        losses.append(job.add(ids).item())
        if job.ready:
            job.step()
    return losses, weights_of(model)


@pytest.fixture(scope="module")
def start():
    return weights_of(built(LLAMA, Recipe(**SMALL))[0])


# --- the bytes: simulated against the CPU's allocator -------------------------------------------

SIZE = {"batch_size": 4, "seq_len": 96}
HALF = {"batch_size": 2, "seq_len": 32}  # half precision is slow on most CPUs
QLORA = {"lora": 8, "quantize": "nf4-double", "checkpointing": True}
HOSTED = {"offload": "weights", "checkpointing": True}
RECIPES = [
    {"attention": "eager", "accumulate": 3, "optimizer": "adafactor", "offload": "activations"},
    {"chunked_loss": True, "checkpointing": True, "optimizer_in_backward": True},
    HOSTED,
    {"lora": 8, "quantize": "int8"},
    {"precision": "amp-fp16", "offload": "optimizer", "accumulate": 2, **HALF},
    {"precision": "bf16", "optimizer": "paged-adamw8bit", **QLORA, **HALF},
]
MORE_RECIPES = [
    {"optimizer": "sgd"},
    {"optimizer_in_backward": True, "optimizer": "adamw8bit"},
    {"lora": 4, **HOSTED},
    {"lora": 8, "quantize": "nf4"},
    {"precision": "amp-bf16", **HALF},
    {"precision": "bf16", "attention": "flash", **HALF},
]
SLOW = [pytest.param(fields, marks=pytest.mark.nightly) for fields in MORE_RECIPES]


def assert_simulated_as_measured(config, recipe):
    experiment = lab.training(config, recipe)
    simulated = lab.simulate(experiment)
    gc.collect()
    truth = lab.measure(experiment, steps=2, track=False)
    assert simulated.peak_bytes == pytest.approx(truth.peak_bytes, rel=0.01)
    assert all(0 < loss < 12 for loss in truth.losses)


@pytest.mark.filterwarnings("ignore:MatMul8bitLt", "ignore:.*[Pp]aged")
@pytest.mark.parametrize("fields", [*RECIPES, *SLOW], ids=lambda f: str(Recipe(**SIZE | f)))
def test_simulated_bytes_are_the_allocators(fields):
    assert_simulated_as_measured(LLAMA, Recipe(**SIZE | fields))


def test_gpt2_with_its_own_kind_of_layer():
    recipe = Recipe(batch_size=2, seq_len=64, lora=4, quantize="nf4")
    assert_simulated_as_measured(GPT2, recipe)


# --- the arithmetic: the same as without --------------------------------------------------------


def test_the_loss_in_chunks_is_the_models_own():
    for config, attention in ((LLAMA, "sdpa"), (TIED, "sdpa"), (GPT2, "sdpa"), (GEMMA2, "eager")):
        model, _ = built(config, Recipe(**SMALL, attention=attention))
        ids = tokens()
        own = model(input_ids=ids, labels=ids).loss
        wanted = torch.autograd.grad(own, list(model.parameters()))
        chunked = chunked_loss(model, ids, 10)  # 46 tokens: four chunks and a rest
        assert_close(chunked, own)
        found = torch.autograd.grad(chunked, list(model.parameters()))
        assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    model.config.final_logit_softcapping = None  # Gemma 2 is the last: without it, another loss
    assert abs(chunked_loss(model, ids, 10) - chunked) > 1e-4


@pytest.mark.parametrize(
    "record",
    [
        {"model_type": "granite", "logits_scaling": 8.0},
        {"model_type": "cohere", "logit_scale": 0.0625},
        {"model_type": "bert"},
    ],
)
def test_a_model_that_scales_its_logits_is_refused_a_chunked_loss(record):
    config = config_from_dict({**SIZES, **record, "pad_token_id": 0})
    with pytest.raises(InputError, match="cannot be computed in chunks"):
        lab.simulate(lab.training(config, Recipe(**SMALL, chunked_loss=True)))


def test_the_logits_of_a_chunked_loss_exist_a_chunk_at_a_time():
    config, size = LLAMA, {"batch_size": 4, "seq_len": 1025}
    whole = lab.simulate(lab.training(config, Recipe(**size)))
    chunks = lab.simulate(lab.training(config, Recipe(**size, chunked_loss=True)))

    def largest(run):
        return max(s.nbytes for s in run.trace.storages if s.category is not Category.WEIGHTS)

    assert largest(whole) >= 4 * 1024 * 2048 * 4
    assert largest(chunks) <= 4 * 1024 * max(1025, 2048)  # one chunk of float32 logits


def test_accumulated_gradients_are_those_of_the_large_batch(start):
    ids = tokens(batch_size=6)
    together = Recipe(batch_size=6, seq_len=24, optimizer="sgd")
    apart = Recipe(batch_size=2, seq_len=24, optimizer="sgd", accumulate=3)
    _, whole = trained(together, start, [ids])
    _, thirds = trained(apart, start, ids.split(2))
    assert_close(thirds, whole, rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(value, start[name]) for name, value in whole.items())


@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        # SGD shows a gradient of the wrong size, AdamW has states to lose.
        ("sgd", {"optimizer_in_backward": True}),
        ("adamw", {"optimizer_in_backward": True}),
        ("sgd", {"offload": "optimizer"}),
        ("adamw", {"offload": "optimizer"}),
        ("sgd", HOSTED),
        ("adamw", HOSTED),
        ("sgd", {"offload": "activations"}),
        ("adamw", {"offload": "activations", "checkpointing": True, "chunked_loss": True}),
    ],
)
def test_training_ends_at_the_same_weights(start, optimizer, fields):
    batches = [tokens(seed=seed) for seed in range(2)]
    plain_losses, plain = trained(Recipe(**SMALL, optimizer=optimizer), start, batches)
    recipe = Recipe(**SMALL, optimizer=optimizer, **fields)
    names = names_of(recipe)  # fetched layers have other names
    losses, weights = trained(recipe, dict(zip(names, start.values(), strict=True)), batches)
    weights = dict(zip(start, weights.values(), strict=True))
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    assert_close(weights, plain, rtol=1e-4, atol=2e-6)


def names_of(recipe):
    return [name for name, _ in build_model(LLAMA, recipe, CPU, None).named_parameters()]


def test_tied_weights_train_the_same_on_the_host(start):
    tied = weights_of(built(TIED, Recipe(**SMALL))[0])
    batches = [tokens(seed=seed) for seed in range(2)]
    _, plain = trained(Recipe(**SMALL), tied, batches, TIED)
    for fields in (HOSTED, {"offload": "optimizer"}, {"optimizer_in_backward": True}):
        _, weights = trained(Recipe(**SMALL, **fields), tied, batches, TIED)
        assert_close(weights, plain, rtol=1e-4, atol=2e-6)


def test_attention_is_the_one_asked_for():
    operators = {}
    for attention in ("sdpa", "eager", "flash"):
        recipe = Recipe(**SMALL, precision="bf16", attention=attention)
        run = lab.simulate(lab.training(LLAMA, recipe), gpu="a100-80gb")
        operators[attention] = {s.operator for s in run.trace.storages}
    flash = "_scaled_dot_product_flash_attention"
    assert flash in operators["flash"]
    assert flash not in operators["eager"]
    assert "_softmax" in operators["eager"]
    assert "_softmax" not in operators["flash"]


def test_the_scaler_of_amp_fp16_scales(start):
    recipe = Recipe(**SMALL, precision="amp-fp16", optimizer="sgd")
    model, job = built(LLAMA, recipe, start)
    assert job.scaler.is_enabled()
    job.add(tokens())
    scaled = model.lm_head.weight.grad.abs().max()
    assert model.lm_head.weight.dtype == torch.float32
    job.step()
    plain_model, plain = built(LLAMA, Recipe(**SMALL, optimizer="sgd"), start)
    plain.add(tokens())
    assert scaled / plain_model.lm_head.weight.grad.abs().max() == pytest.approx(65536, rel=0.05)
    plain.step()
    assert_close(weights_of(model), weights_of(plain_model), rtol=1e-2, atol=1e-4)


def test_an_overflow_skips_the_step_also_with_the_optimizer_on_the_host(start):
    for offload in ("none", "optimizer"):
        recipe = Recipe(**SMALL, precision="amp-fp16", offload=offload)
        model, job = built(LLAMA, recipe, start)
        job.add(tokens())
        model.lm_head.weight.grad[0, 0] = torch.inf
        job.step()
        assert_close(weights_of(model), start, rtol=0, atol=0)
        assert job.scaler.get_scale() < 65536
        job.add(tokens())
        job.step()
        assert not torch.equal(model.lm_head.weight, start["lm_head.weight"])


# --- adapters and quantized weights -------------------------------------------------------------


def test_adapters_train_and_the_rest_does_not():
    recipe = Recipe(**SMALL, lora=4, lora_targets=("q_proj", "v_proj"))
    model, job = built(LLAMA, recipe)
    before = weights_of(model)
    assert len(job.trained) == 2 * 2 * 3  # two matrices, two targets, three layers
    assert sum(p.numel() for p in job.trained) == 3 * 4 * ((128 + 128) + (128 + 64))
    for seed in range(2):
        job.add(tokens(seed=seed))
        job.step()
    for name, value in weights_of(model).items():
        assert torch.equal(value, before[name]) != ("lora_" in name), name


@pytest.mark.parametrize(
    ("config", "adapted"),
    [
        (EXPERTS, "q_proj k_proj v_proj o_proj"),
        (IMAGES, "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
    ],
    ids=["experts", "images"],
)
def test_adapters_join_no_experts_and_no_vision_tower(config, adapted):
    recipe = Recipe(**SMALL, lora=4)
    assert all(loss < 9 for loss in lab.measure(lab.training(config, recipe), steps=2).losses)
    model = build_model(config, recipe, torch.device("meta"), None)
    found = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[-4] for name in found} == set(adapted.split())
    assert not any("vision_tower" in name or "experts" in name for name in found)
    shapes = shapes_of(config)
    assert len(shapes.adapted) == 3 * len(adapted.split())
    assert shapes.adapters(4) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_vision_tower_is_trained_too_and_starts_as_transformers_starts_it():
    model, job = built(IMAGES, Recipe(**SMALL, offload="weights", checkpointing=True))
    ids = tokens()
    job.add(ids, **images_for(IMAGES, ids))
    assert ids[0].tolist().count(500) == 16
    tower = model.model.vision_tower
    assert tower.embeddings.position_ids.tolist() == [list(range(17))]
    used = [p.grad is not None for p in tower.encoder.layers.parameters()]
    assert used == 32 * [True] + 16 * [False]  # what the projector reads is the last layer but one
    with pytest.raises(InputError, match="16 tokens are too few: an image takes 16"):
        lab.simulate(lab.training(IMAGES, Recipe(seq_len=16)))


def test_experts_are_not_quantized_but_refused():
    with pytest.raises(InputError, match="experts, which are most of it"):
        lab.estimate(EXPERTS, gpu="a100-80gb", lora=4, quantize="nf4", seq_len=24)


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (("q_proj", "v_porj"), "unknown layer in lora_targets 'v_porj'. Did you mean 'v_proj'"),
        (("input_layernorm",), "LoRA finds nothing to adapt"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused_in_a_sentence(targets, reason):
    recipe = Recipe(**SMALL, lora=4, lora_targets=targets)
    with pytest.raises(InputError, match=reason):
        lab.simulate(lab.training(LLAMA, recipe))


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("config", [LLAMA, TIED, GPT2], ids=["llama", "tied", "gpt2"])
@pytest.mark.parametrize("quantize", ["nf4-double", "int8"])
def test_every_linear_layer_but_the_output_is_quantized(config, quantize):
    from bitsandbytes import nn as quantized
    from transformers.pytorch_utils import Conv1D

    model, job = built(config, Recipe(**SMALL, lora=4, quantize=quantize))
    base = model.get_base_model()
    head = base.get_output_embeddings()
    kind = quantized.Linear8bitLt if quantize == "int8" else quantized.Linear4bit
    linear = {
        name: module
        for name, module in base.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and "lora_" not in name
    }
    layers = [module for module in linear.values() if isinstance(module, kind)]
    assert [module for module in linear.values() if not isinstance(module, kind)] == [head]
    assert len(layers) == config.num_hidden_layers * (4 if config is GPT2 else 7)
    assert {m.weight.dtype for m in layers} == {torch.int8 if quantize == "int8" else torch.uint8}
    assert (base.get_input_embeddings().weight is head.weight) == config.tie_word_embeddings
    losses = [job.add(tokens(vocabulary=512)).item()]
    job.step()
    losses.append(job.add(tokens(vocabulary=512)).item())
    assert losses[1] < losses[0] < 9
    assert not any(p.device.type == "meta" for p in model.parameters())


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize(("quantize", "tolerance"), [("nf4", 0.2), ("int8", 0.05)])
@pytest.mark.parametrize("transposed", [False, True])
def test_quantized_layers_compute_nearly_what_the_plain_ones_do(quantize, tolerance, transposed):
    from transformers.pytorch_utils import Conv1D

    plain = Conv1D(64, 128) if transposed else torch.nn.Linear(128, 64)
    x = torch.randn(16, 128)
    wanted = plain(x).detach()
    layer = model_building._quantized(plain, Recipe(lora=1, quantize=quantize), CPU)
    assert 0 < (layer(x) - wanted).norm() / wanted.norm() < tolerance


def test_a_quantized_model_never_exists_unquantized():
    recipe = Recipe(batch_size=1, seq_len=8, lora=1, quantize="nf4")
    config = config_from_dict({"model_type": "llama", **SIZES, "num_hidden_layers": 12})
    with track(device="cpu") as tracker:
        model = build_model(config, recipe, CPU, None)
    layers = 12 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 344)
    rest = 2 * 2048 * 128 * 4
    one_layer_bytes = 3 * 4 * 128 * 344  # its largest matrix, in float32 and on its way to 4 bits
    assert tracker.trace().peak_bytes < rest + layers * 0.6 + 2 * one_layer_bytes
    assert model is not None


# --- tied weights and materialising -------------------------------------------------------------


def test_a_model_made_on_meta_is_whole():
    torch.manual_seed(3)
    recipe = Recipe(**SMALL, offload="weights", checkpointing=True)
    for config in (LLAMA, TIED, GPT2):
        model = build_model(config, recipe, CPU, None)
        plain = catalogue.model(config)
        assert model.training
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert (head.weight is embedding.weight) == (config is not LLAMA)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert ours.device == CPU
            assert ours.shape == theirs.shape
            # Drawn from the same distribution: norms are exactly one or zero, the rest is random.
            # GPT-2 scales one matrix of a block by its depth, which is left out.
            scale = 2 if name.endswith("c_proj.weight") else 1
            std = scale * theirs.std().item()
            assert ours.std().item() == pytest.approx(std, rel=0.2, abs=1e-9), name
        for (name, ours), (_, theirs) in zip(
            model.named_buffers(), plain.named_buffers(), strict=True
        ):
            assert torch.equal(ours, theirs), name


# --- where things live on a GPU -----------------------------------------------------------------


def simulated(config=LLAMA, **fields):
    return lab.simulate(lab.training(config, Recipe(**SMALL, **fields)), gpu="a100-80gb").trace


def bytes_on(trace, device, category):
    """Bytes of a category alive at the end, where weights and optimizer state are."""
    live = trace.live_at(len(trace.events) - 1, device)
    return sum(s.nbytes for s in live if s.category is category)


def numel():
    """Parameters of the layers, and of the rest."""
    embeddings = 2 * 2048 * 128
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 344 + 2 * 128
    return 3 * layer, embeddings + 128


LAYERS, REST, ALL, NONE = (1, 0), (0, 1), (1, 1), (0, 0)


@pytest.mark.parametrize(
    ("fields", "weights", "states", "host_weights", "host_states"),
    [
        ({}, ALL, ALL, NONE, NONE),
        (HOSTED, REST, REST, LAYERS, LAYERS),
        ({"offload": "optimizer"}, ALL, NONE, ALL, ALL),  # with copies of the weights
        ({"offload": "activations"}, ALL, ALL, NONE, NONE),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_weights_and_states_are_where_the_recipe_says(
    fields, weights, states, host_weights, host_states
):
    trace = simulated(**fields)
    for device, held, stepped in (
        (trace.device, weights, states),
        ("cpu", host_weights, host_states),
    ):
        held, stepped = (each[0] * numel()[0] + each[1] * numel()[1] for each in (held, stepped))
        assert bytes_on(trace, device, Category.WEIGHTS) == 4 * held
        counters_bytes = bytes_on(trace, device, Category.OPTIMIZER) - 8 * stepped
        assert 0 <= counters_bytes < 1000
    gradients = [s for s in trace.storages if s.category is Category.GRADIENTS]
    on_host = sum(s.nbytes for s in gradients if s.device == "cpu")
    assert (on_host >= 4 * numel()[0]) == (fields in (HOSTED, {"offload": "optimizer"}))


def test_fetched_weights_are_dropped_layer_by_layer():
    deep = {**SIZES, "hidden_size": 256, "vocab_size": 64}
    peaks = []
    for layers in (2, 5):
        config = config_from_dict({"model_type": "llama", **deep, "num_hidden_layers": layers})
        recipe = Recipe(batch_size=1, seq_len=8, **HOSTED)
        run = lab.simulate(lab.training(config, recipe), gpu="a100-80gb")
        peaks.append(run.trace.peak_bytes)
    one_layer_bytes = 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 344)
    assert peaks[1] - peaks[0] < one_layer_bytes / 4  # three layers more: their inputs alone


# --- how an experiment behaves ------------------------------------------------------------------


def test_an_experiment_is_named_and_cut_to_another_depth():
    recipe = Recipe(**SMALL)
    experiment = lab.training(LLAMA, recipe)
    assert experiment.__name__ == f"Llama: {recipe}"
    shallow = lab.simulate(experiment, layers=1)
    assert shallow.peak_bytes < lab.simulate(experiment).peak_bytes
    assert LLAMA.num_hidden_layers == 3


def test_out_of_memory_is_not_reported_as_the_models_fault():
    huge = lab.training(LLAMA, Recipe(batch_size=4096, seq_len=1024))
    assert lab.simulate(huge, gpu="t4").oom is not None
