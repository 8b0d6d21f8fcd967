"""Whose model: names, folders, files and hub ids; hostile configs cost a sentence, nothing more."""

import json
import pickle
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

import labkit as lab
from gpumem.estimation.recipe import ATTENTIONS, OFFLOADS, OPTIMIZERS, QUANTIZATIONS, Recipe
from gpumem.hardware.catalogue import gpus
from gpumem.inputs import PRECISIONS, InputError
from gpumem.models.catalogue import has_fused_attention
from gpumem.models.config import config_from_dict, find_config

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
    "tie_word_embeddings": True, "rope_theta": 12345.0,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 300,
        "n_positions": 64}  # fmt: skip


def sentence_of(error: InputError) -> str:
    """The message, once it has been found to be one that a person can read."""
    text = str(error)
    assert 10 < len(text) < 400, text
    assert "\n" not in text
    return text


def refusal(source) -> str:
    with pytest.raises(InputError) as caught:
        find_config(source)
    return sentence_of(caught.value)


def write(folder, record, name="config.json"):
    path = folder / name
    path.write_text(json.dumps(record))
    return path


# --- names, folders, files, hub ids --------------------------------------------------------------


@pytest.mark.parametrize("text", ["Llama-3.2-1B", "llama-3.2-1b", "LLAMA_3.2_1b"])
def test_a_name_of_the_table(text):
    name, config = find_config(text)
    assert (name, config.hidden_size, config.use_cache) == ("Llama-3.2-1B", 2048, False)


def test_a_folder_and_a_file(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    path = write(folder, LLAMA)
    for source in (folder, str(folder), path, str(path)):
        name, config = find_config(source)
        assert name == "my-model"
        assert isinstance(config, LlamaConfig)
        assert (config.num_hidden_layers, config.use_cache) == (2, False)
        assert config.rope_parameters["rope_theta"] == 12345.0
    other = write(folder, GPT2, "other.json")
    assert find_config(other)[1].n_embd == 32


def test_a_config_already_made_is_copied():
    theirs = LlamaConfig(**{**LLAMA, "use_cache": True})
    name, config = find_config(theirs)
    assert name == "Llama"
    assert config is not theirs
    assert (theirs.use_cache, config.use_cache) == (True, False)


def test_a_hub_id_is_asked_for_by_its_config_alone(tmp_path, monkeypatch):
    asked = []

    def download(repo, filename):
        asked.append((repo, filename))
        if repo == "somebody/offline":
            raise ConnectionError("no route\nto the hub" * 100)
        return str(write(tmp_path, LLAMA))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    name, config = find_config("somebody/some-model")
    assert (name, config.hidden_size) == ("somebody/some-model", 32)
    assert asked == [("somebody/some-model", "config.json")]
    text = refusal("somebody/offline")
    assert "could not be had from the hub (ConnectionError: no route" in text


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("Llama-3.2-1C", "Did you mean 'Llama-3.2-1B'"),
        ("", "unknown model"),
        ("x" * 5000, "unknown model"),
        ("two\nlines and a nul\0", "unknown model"),
        ("/no/such/folder/at/all", "unknown model"),
        (42, "not 42"),
    ],
)
def test_what_is_no_model_is_refused_in_a_sentence(source, reason):
    assert reason in refusal(source)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe\x00\x01", "not valid JSON"),
        (b"[]", "no object with a 'model_type'"),
        (b"{}", "no object with a 'model_type'"),
    ],
)
def test_a_broken_file_is_refused_in_a_sentence(tmp_path, content, reason):
    assert "there is no config.json in" in refusal(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    assert reason in refusal(tmp_path)


# --- what a config may not do ---------------------------------------------------------------------


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_code_that_a_config_names_and_weights_beside_it_are_never_run(tmp_path):
    touched = tmp_path / "touched"
    for name in ("pytorch_model.bin", "model.safetensors", "training_args.bin", "tokenizer.json"):
        (tmp_path / name).write_bytes(pickle.dumps(Touches(touched)))
    code = f"open({str(touched)!r}, 'w').close()\nclass Evil: pass\n"
    (tmp_path / "evil_module.py").write_text(code)
    record = {
        **LLAMA, "trust_remote_code": True, "architectures": ["Evil"],
        "auto_map": {"AutoConfig": "evil_module.Evil", "AutoModelForCausalLM": "evil_module.Evil"},
    }  # fmt: skip
    write(tmp_path, record)
    _, config = find_config(tmp_path)
    assert not hasattr(config, "auto_map")
    run = lab.simulate(lab.training(tmp_path, Recipe(seq_len=8)))
    assert run.peak_bytes > 0
    assert not touched.exists()
    assert not [name for name in sys.modules if "evil_module" in name]


def test_what_a_recipe_says_is_left_out():
    plain = config_from_dict(LLAMA)
    loaded = config_from_dict({
        **LLAMA, "quantization_config": {"load_in_4bit": True}, "use_cache": True,
        "return_dict": False, "output_attentions": True, "_attn_implementation": "eager",
    })  # fmt: skip
    assert loaded.to_dict() == plain.to_dict()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"model_type": 7}, "no object with a 'model_type'"),
        ({"model_type": "x" * 10_000}, "which transformers lacks"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"model_type": "bart"}, "is the decoder alone"),
        ({"model_type": "whisper"}, "is the decoder alone"),
        ({"model_type": "llama4"}, "is the decoder alone"),
        ({"model_type": "mamba"}, "num_attention_heads must be"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1000"),
        ({**GPT2, "n_layer": 10**9}, "n_layer must be at most 1000"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers must be a whole number"),
        ({**LLAMA, "hidden_size": "32"}, "cannot be a llama model"),
        ({**LLAMA, "hidden_size": None}, "cannot be a llama model"),
        ({**LLAMA, "hidden_size": 1 << 20}, "hidden_size must be a whole number"),
        ({**LLAMA, "vocab_size": 10**4000}, "vocab_size must be a whole number"),
        ({**LLAMA, "rope_parameters": 3}, "cannot be a llama model"),
    ],
)
def test_a_hostile_config_is_refused_in_a_sentence(record, reason):
    with pytest.raises(InputError, match=reason) as caught:
        config_from_dict(record)
    sentence_of(caught.value)


def test_a_model_without_fused_attention_is_estimated_with_eager():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    config = config_from_dict({"model_type": "gemma2", **sizes, **heads})
    assert not has_fused_attention(config)
    asked = lab.estimate(config, gpu="t4", seq_len=16)
    assert asked.recipe.attention == "eager"
    plain = lab.estimate(config, gpu="t4", seq_len=16, attention="eager")
    assert plain.peak_reserved_bytes == asked.peak_reserved_bytes
    with pytest.raises(InputError, match="no fused attention for gemma2"):
        lab.estimate(config, gpu="a100-80gb", precision="bf16", attention="flash")


def test_a_config_of_ones_own_class_is_refused_in_a_sentence():
    class Own(LlamaConfig):
        pass

    assert "no causal language model for Own" in refusal(Own())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 3},
        {"hidden_size": 36},  # nine per head: positions need pairs
        {"hidden_size": 1 << 18, "num_attention_heads": 1 << 18, "head_dim": 1 << 40},
        {"hidden_act": "no such function"},
    ],
)
def test_sizes_that_do_not_go_together_are_refused_at_the_latest_when_trained(changes):
    with pytest.raises(InputError) as caught:
        lab.simulate(lab.training(config_from_dict({**LLAMA, **changes}), Recipe(seq_len=8)))
    sentence_of(caught.value)


def test_more_tokens_than_a_table_of_positions_has_are_refused():
    config = config_from_dict(GPT2)
    assert lab.simulate(lab.training(config, Recipe(seq_len=64))).peak_bytes > 0
    with pytest.raises(InputError, match="65 tokens are too many: this model knows 64 positions"):
        lab.simulate(lab.training(config, Recipe(seq_len=65)))
    # Rotary positions are computed, and go on.
    short = config_from_dict({**LLAMA, "max_position_embeddings": 64})
    assert lab.simulate(lab.training(short, Recipe(seq_len=65))).peak_bytes > 0


# --- random configs and recipes, simulated --------------------------------------------------------


@st.composite
def tiny_models(draw) -> dict:
    kind = draw(st.sampled_from(["llama", "gpt2", "qwen2", "mistral", "gemma"]))
    layers, heads = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 2, 4]))
    width = heads * draw(st.sampled_from([2, 4, 7, 8, 8, 16]))
    vocabulary = draw(st.sampled_from([5, 64, 300]))
    if kind == "gpt2":
        return {
            "model_type": kind, "n_embd": width, "n_layer": layers, "n_head": heads,
            "vocab_size": vocabulary, "n_positions": draw(st.sampled_from([16, 64])),
        }  # fmt: skip
    return {
        "model_type": kind, "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": vocabulary, "head_dim": width // heads,
        "num_key_value_heads": draw(st.sampled_from([1, 2, heads])), "pad_token_id": None,
        "intermediate_size": draw(st.sampled_from([8, 24, 64])),
        "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip


@st.composite
def tiny_recipes(draw) -> Recipe:
    choose = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    lora = choose(None, None, 1, 4)
    offload = choose(*OFFLOADS)
    fields = {
        "batch_size": choose(1, 2, 3), "seq_len": choose(1, 2, 16, 40),
        "precision": choose(*PRECISIONS), "optimizer": choose(*OPTIMIZERS),
        "optimizer_in_backward": choose(False, False, True),
        "checkpointing": offload == "weights" or choose(False, True),
        "attention": choose(*ATTENTIONS), "lora": lora, "offload": offload,
        "quantize": choose(None, *QUANTIZATIONS) if lora else None,
        "accumulate": choose(1, 1, 1, 2), "chunked_loss": choose(False, True),
    }  # fmt: skip
    if lora and choose(False, False, True):
        fields["lora_targets"] = choose(("q_proj", "v_proj"), ("c_attn",), ("lm_head",), ("norm",))
    try:
        return Recipe(**fields)
    except InputError:
        return Recipe(seq_len=fields["seq_len"], precision=fields["precision"])


def test_any_recipe_on_any_small_model_is_simulated_or_refused():
    outcomes = {"simulated": 0, "refused": 0}

    @settings(suppress_health_check=list(HealthCheck))
    @given(record=tiny_models(), recipe=tiny_recipes(), card=st.sampled_from(gpus()),
           steps=st.sampled_from([1, 1, 2]))  # fmt: skip
    def try_recipe(record, recipe, card, steps):
        try:
            experiment = lab.training(config_from_dict(record), recipe)
            run = lab.simulate(experiment, gpu=card.key, steps=steps)
        except InputError as error:
            sentence_of(error)
            outcomes["refused"] += 1
        else:
            assert sum(run.by_category.values()) == run.peak_bytes > 0
            assert run.reserved_bytes >= run.peak_bytes
            assert run.fits
            outcomes["simulated"] += 1

    try_recipe()
    assert outcomes["simulated"] > 0
