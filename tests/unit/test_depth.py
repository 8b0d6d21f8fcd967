"""A trace extended by depth is the trace of the deep model, event for event."""

from dataclasses import replace

import pytest
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen2Config

from labkit.catalogue import gpu
from labkit.depth import DEEPER, SHALLOW, extend, repeats, same
from labkit.estimates import recipe_log
from labkit.memory import Category, Event, Mark, Phase, Storage, Trace
from labkit.recipes import Recipe
from labkit.replays import replay
from labkit.simulate import simulated_log

CARD = gpu("a100-80gb")
LAYERS = 7
LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=512,
)  # fmt: skip
GPT2 = GPT2Config(
    n_embd=64, n_layer=LAYERS, n_head=4, vocab_size=512, bos_token_id=1, eos_token_id=2
)
RECIPES = {
    "plain": {},
    "autocast": {"precision": "amp-bf16"},
    "scaler": {"precision": "amp-fp16"},
    "bf16, checkpointing": {"precision": "bf16", "checkpointing": True},
    "eager": {"attention": "eager"},
    "optimizer in backward": {"optimizer_in_backward": True},
    "8-bit optimizer": {"optimizer": "adamw8bit"},
    "paged optimizer": {"optimizer": "paged-adamw8bit"},
    "adafactor": {"optimizer": "adafactor"},
    "sgd": {"optimizer": "sgd"},
    "accumulation": {"accumulate": 3},
    "chunked loss": {"chunked_loss": True},
    "LoRA": {"lora": 4},
    "QLoRA": {"lora": 4, "quantize": "nf4-double", "checkpointing": True},
    "int8": {"lora": 4, "quantize": "int8"},
    "activations on the host": {"offload": "activations"},
    "optimizer on the host": {"offload": "optimizer"},
    "weights on the host": {"offload": "weights", "checkpointing": True},
}


@pytest.mark.parametrize("settings", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["Llama", "GPT-2"])
def test_extended_and_whole_trace_agree(config, settings):
    recipe = Recipe(batch_size=2, seq_len=32, **settings)
    found, whole = (recipe_log(config, recipe, CARD, exact=exact) for exact in (False, True))
    assert (found.exact, whole.exact) == (False, True)
    assert found.layer_bytes == whole.layer_bytes
    assert found.log[2:] == whole.log[2:]  # flops and bytes moved
    made, whole = found.log.trace, whole.log
    assert len(made.events) == len(whole.trace.events)
    assert [mark.index for mark in made.marks] == [mark.index for mark in whole.trace.marks]
    for device in ("cpu:0", "cpu"):
        assert made.peak(device).total_bytes == whole.trace.peak(device).total_bytes
        assert made.peak(device).by_category == whole.trace.peak(device).by_category
    assert made.flops == whole.trace.flops
    assert made.work == whole.trace.work
    # The allocator is asked in the same order; which of two equal blocks is freed may differ.
    ours, real = replay(made), replay(whole.trace)
    assert ours.peak_allocated_bytes == pytest.approx(real.peak_allocated_bytes, rel=0.01)
    assert ours.peak_reserved_bytes == pytest.approx(real.peak_reserved_bytes, rel=0.01)


def test_every_storage_is_freed_once_and_as_often_as_it_was_made():
    experiment = Recipe(seq_len=32, checkpointing=True).experiment(LLAMA)
    shallow, deeper = (
        simulated_log(experiment, card=CARD, layers=layers).trace for layers in (SHALLOW, DEEPER)
    )
    made = extend(shallow, deeper, 40)
    seen = {}
    for event in made.events:
        seen.setdefault(event.storage, []).append(event.change_bytes)
    assert all(
        changes in ([s.nbytes], [s.nbytes, -s.nbytes])
        for changes, s in zip((seen[n] for n in range(len(made.storages))), made.storages,
                              strict=True)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "alike"),
    [
        (LLAMA, True),
        (GPT2, True),
        (Qwen2Config(hidden_size=64, intermediate_size=96, num_hidden_layers=6, vocab_size=512,
                     num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True,
                     max_window_layers=3), False),
        (Gemma3TextConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=8,
                          num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                          vocab_size=512), False),
    ],
    ids=["Llama", "GPT-2", "Qwen2 with windows", "Gemma 3"],
)  # fmt: skip
def test_only_alike_layers_repeat(config, alike):
    assert repeats(config) is alike


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
        changes, marks, made = [(0, 8)], [], 1
        for step in range(5):
            marks.append(Mark(len(changes), f"step {step}"))
            if step != place:
                new = range(made, made := made + layers)
                changes += [(n, 4) for n in new] + [(n, -4) for n in reversed(new)]
        return replace(log(*changes), marks=tuple(marks))

    made = extend(steps(1), steps(2), 6)
    assert [b - a for a, b in made.steps()] == [0 if step == place else 12 for step in range(5)]
    assert same(made, steps(6))
    assert not same(made, steps(5))
