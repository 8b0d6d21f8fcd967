"""A trace extended by depth is the trace of the deep model, event for event."""

from dataclasses import replace

import pytest
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    OlmoeConfig,
    Qwen2Config,
    SmolLM3Config,
)

from gpumem.allocator.replay import replay
from gpumem.estimation.estimate import recipe_log
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.weight_shapes import shapes_of
from gpumem.fake_cuda.depth_extension import extend, same
from gpumem.hardware.catalogue import gpu
from gpumem.models.config import find_config
from gpumem.trace import Category, Event, Phase, Storage, Trace

CARD = gpu("a100-80gb")
LAYERS = 5
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "pad_token_id": None,
}
LLAMA = LlamaConfig(**SMALL, num_hidden_layers=LAYERS)
GPT2 = GPT2Config(
    n_embd=64, n_layer=LAYERS, n_head=4, vocab_size=512, bos_token_id=1, eos_token_id=2
)
EXPERTS = OlmoeConfig(
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    vocab_size=512,
    num_experts=8,
    num_experts_per_tok=2,
    eos_token_id=1,
    pad_token_id=0,
)
#: The vision tower is as deep as the decoder, and its layers save more.
IMAGES = LlavaConfig(
    text_config=LLAMA.to_dict(),
    vision_config={
        "model_type": "clip_vision_model",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
    image_token_index=500,
    image_seq_length=16,
)
WINDOWS = Gemma3TextConfig(
    **SMALL, num_hidden_layers=11, head_dim=16, sliding_window=8, sliding_window_pattern=3
)
RECIPES = {
    "autocast": {"precision": "amp-bf16"},
    "scaler": {"precision": "amp-fp16"},
    "eager, optimizer in backward": {"attention": "eager", "optimizer_in_backward": True},
    "paged optimizer": {"optimizer": "paged-adamw8bit"},
    "adafactor": {"optimizer": "adafactor"},
    "accumulation, chunked loss": {"accumulate": 3, "chunked_loss": True},
    "QLoRA": {"lora": 4, "quantize": "nf4-double", "checkpointing": True},
    "optimizer on the host": {"offload": "optimizer"},
    "weights on the host": {"offload": "weights", "checkpointing": True},
    "LoRA, weights on the host": {"lora": 4, "offload": "weights", "checkpointing": True},
}
CASES = [
    *((LLAMA, settings) for settings in RECIPES.values()),
    (GPT2, {}),
    (GPT2, {"precision": "bf16", "checkpointing": True}),
    (GPT2, {"lora": 4, "quantize": "int8", "offload": "activations"}),
    (EXPERTS, {"precision": "bf16", "checkpointing": True}),
    (EXPERTS, {"lora": 4}),
    (IMAGES, {"precision": "bf16", "chunked_loss": True}),
    (IMAGES, {"lora": 4, "quantize": "nf4", "checkpointing": True}),
    (WINDOWS, {"precision": "amp-bf16", "checkpointing": True}),
    (WINDOWS, {"optimizer_in_backward": True}),
    (WINDOWS, {"lora": 4}),
]


NAMES = [
    *RECIPES,
    *("GPT-2", "GPT-2, bf16", "GPT-2, int8"),
    *("experts", "experts, LoRA", "images", "images, QLoRA"),
    *("windows", "windows, optimizer in backward", "windows, LoRA"),
]
AT_NIGHT = (
    *("scaler", "LoRA, weights on the host", "GPT-2, bf16", "experts, LoRA", "images, QLoRA"),
    *("windows, optimizer in backward", "windows, LoRA", "paged optimizer"),
    "optimizer on the host",
)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.nightly if name in AT_NIGHT else ())
        for name, case in zip(NAMES, CASES, strict=True)
    ],
)
def test_extended_and_whole_trace_agree(config, settings):
    recipe = Recipe(batch_size=2, seq_len=32, **settings)
    _, config = find_config(config)
    found, whole = (recipe_log(config, recipe, CARD, exact=exact) for exact in (False, True))
    assert (found.exact, whole.exact) == (False, True)
    assert found.layer_bytes == whole.layer_bytes
    assert found.log.step_work == whole.log.step_work
    made, whole = found.log.trace, whole.log
    assert len(made.events) == len(whole.trace.events)
    assert made.step_starts == whole.trace.step_starts
    for device in ("cpu:0", "cpu"):
        assert made.peak(device).total_bytes == whole.trace.peak(device).total_bytes
        assert made.peak(device).by_category == whole.trace.peak(device).by_category
    assert made.flops == whole.trace.flops
    assert made.work == whole.trace.work
    # The allocator is asked in the same order for the same.
    ours, real = replay(made), replay(whole.trace)
    assert ours.peak_allocated_bytes == real.peak_allocated_bytes
    assert ours.peak_reserved_bytes == real.peak_reserved_bytes


@pytest.mark.parametrize(
    ("config", "period"),
    [
        (LLAMA, 1),
        (GPT2, 1),
        (EXPERTS, 1),
        (IMAGES, 1),
        (WINDOWS, 3),
        (SmolLM3Config(**SMALL, num_hidden_layers=10), 4),
        (SmolLM3Config(**SMALL, num_hidden_layers=8), 0),
        (
            Qwen2Config(**SMALL, num_hidden_layers=6, use_sliding_window=True, max_window_layers=3),
            0,
        ),
    ],
    ids=[
        *("Llama", "GPT-2", "experts", "images", "Gemma 3"),
        *("SmolLM3, positions in three of four", "only two times four", "Qwen2 with windows"),
    ],
)
def test_after_so_many_layers_they_repeat(config, period):
    assert shapes_of(config).period == period


# --- logs that do not differ by whole stretches ---------------------------------------------------


def log(*changes):
    """A log from ``(storage, bytes, size of the storage)``; negative bytes free."""
    sizes = {storage: abs(nbytes) for storage, nbytes in reversed(changes)}
    storages = [
        Storage(sizes[n], Category.TEMPORARY, "cpu", "mul", "", "", Phase.FORWARD, (), "float32")
        for n in sorted(sizes)
    ]
    events = tuple(Event(storage, nbytes, Phase.FORWARD) for storage, nbytes in changes)
    return Trace("cpu", tuple(storages), events)


def test_a_stretch_is_repeated_and_its_newest_freed_first():
    shallow = log((0, 8), (0, -8))
    deeper = log((0, 8), (1, 8), (1, -8), (0, -8))
    made = extend(shallow, deeper, 5)
    assert [event.storage for event in made.events] == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]


def test_the_oldest_is_freed_first_where_it_was():
    shallow = log((0, 8), (0, -8))
    deeper = log((0, 8), (1, 8), (0, -8), (1, -8))
    made = extend(shallow, deeper, 5)
    assert [event.storage for event in made.events] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("shallow", "deeper"),
    [
        (log((0, 8), (1, 4)), log((0, 8), (1, 16), (2, 8))),  # something is missing
        (log((0, 8), (0, -8)), log((0, 16), (0, -16))),  # sizes that depend on the depth
        (log((0, 8), (0, 8)), log((0, 8), (0, 8), (1, 8))),  # a storage that grows
    ],
    ids=["missing", "sizes", "grows"],
)
def test_other_differences_are_refused(shallow, deeper):
    assert extend(shallow, deeper, 6) is None


@pytest.mark.parametrize("place", [0, 2, 4], ids=["first", "middle", "last"])
def test_a_step_without_events_stays_one(place):
    """In each step a layer's storage is made and freed; one step does nothing."""

    def steps(layers):
        changes, starts, made = [(0, 8)], [], 1
        for step in range(5):
            starts.append(len(changes))
            if step != place:
                new = range(made, made := made + layers)
                changes += [(n, 4) for n in new] + [(n, -4) for n in reversed(new)]
        return replace(log(*changes), step_starts=tuple(starts))

    made = extend(steps(1), steps(2), 6)
    assert [b - a for a, b in made.steps()] == [0 if step == place else 12 for step in range(5)]
    assert same(made, steps(6))
    assert not same(made, steps(5))
