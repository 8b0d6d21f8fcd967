"""Models by name: the table against published counts, building, precisions, checkpointing."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gpumem import inputs
from gpumem.inputs import InputError
from gpumem.models import catalogue, precisions, text
from gpumem.models.catalogue import MODELS
from gpumem.models.config import find_config


def tiny(**options):
    torch.manual_seed(0)
    return catalogue.model("SmolLM2-tiny", **{"layers": 2, **options})


def step_gradients(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def ids(rows=2, length=32):
    return next(text.batches(device="cpu", batch_size=rows, seq_len=length))


# --- the table -----------------------------------------------------------------------------------


def parameter_count(name, **options):
    return sum(p.numel() for p in catalogue.model(name, device="meta", **options).parameters())


@pytest.mark.parametrize("name", catalogue.MODELS)
def test_counts_are_the_published_ones(name):
    info = catalogue.model_info(name)
    assert parameter_count(name) == info.parameters
    assert "https://" in info.source or info.source.startswith("ours")
    assert info.license


def test_fewer_layers_take_away_whole_layers():
    two, one = (parameter_count("Llama-3.1-8B", layers=n) for n in (2, 1))
    assert parameter_count("Llama-3.1-8B") - one == 31 * (two - one)
    # GPT-2 calls its layers n_layer; transformers knows both names.
    assert catalogue.config("GPT-2", layers=3).n_layer == 3
    assert parameter_count("GPT-2", layers=1) < parameter_count("GPT-2", n_layer=2)


def test_a_config_is_a_fresh_copy():
    first = catalogue.config("Llama-3.2-1B")
    first.hidden_size = 1
    first.rope_parameters["factor"] = 1.0
    assert catalogue.config("Llama-3.2-1B").hidden_size == 2048
    assert catalogue.config("Llama-3.2-1B").rope_parameters["factor"] == 32.0


@pytest.mark.parametrize(
    ("hub_id", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("meta-llama/Llama-2-70b-chat-hf", "Llama-2-70B"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B"),
        ("gpt2", "GPT-2"),
        ("mistralai/Mistral-7B-v0.1", None),
        ("unsloth/Llama-3.2-1B-bnb-4bit", None),
        ("meta-llama/Llama-3.1-80B", None),
    ],
)
def test_a_hubs_name_finds_its_model_and_no_other(hub_id, name):
    found = catalogue.hub_config(hub_id)
    assert found == (name and catalogue.hub_config(name))
    if name is not None:
        info = catalogue.model_info(name)
        assert found == {**info.config, "model_type": info.model_type, "dtype": info.dtype}


def test_one_models_dtype_does_not_stick_to_the_next():
    assert tiny(dtype=torch.bfloat16).dtype == torch.bfloat16
    assert tiny().dtype == torch.float32


# --- building ------------------------------------------------------------------------------------


#: One model of those whose configs differ in sizes alone.
ARCHITECTURES = {
    (info.model_type, *sorted(info.config)): name for name, info in MODELS.items()
}.values()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_trains_a_step_on_fake_tensors_without_a_warning(name):
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = catalogue.model(name, layers=1, dtype=torch.bfloat16)
        [tokens] = text.batches(device="cpu", batch_size=2, seq_len=64, steps=1)
        loss, gradients = step_gradients(model, tokens)
    assert isinstance(loss, FakeTensor)
    unseen = {p for n, p in model.named_parameters() if "vision_tower" in n or "projector" in n}
    assert len(gradients) - gradients.count(None) == len(list(model.parameters())) - len(unseen)
    assert {g.dtype for g in gradients if g is not None} == {torch.bfloat16}
    assert model.training
    assert model.config.get_text_config().use_cache is False
    assert model.loss_type == "ForCausalLM"  # else transformers logs a complaint


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "lama-3.2-1b"}, "Did you mean 'Llama-3.2-1B'"),
        ({"device": "cdua"}, "'cdua'"),
        ({"layers": 0}, "layers must be from 1"),
        ({"dtype": "bf16"}, "'bf16'"),
        ({"attention": "flash"}, "sdpa, eager"),
        ({"hidden_sise": 64}, "Did you mean 'hidden_size'"),
        ({"hidden_size": "64"}, "'64'"),
        ({"hidden_size": -192}, "cannot be built with this config"),
        ({"num_attention_heads": 5}, "num_attention_heads=5"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments, says):
    name = arguments.pop("name", "SmolLM2-tiny")
    with pytest.raises(InputError) as error:
        catalogue.model(name, **arguments)
    assert says in str(error.value)


# --- precision -----------------------------------------------------------------------------------


def test_every_precision_says_what_weights_and_products_are():
    left, right = torch.ones(2, 2), torch.ones(2, 2)
    seen = {}
    for precision in inputs.PRECISIONS:
        with precisions.autocast("cpu", precision):
            seen[precision] = (precisions.dtype_of(precision), (left @ right).dtype)
    assert seen == {
        "fp32": (torch.float32, torch.float32),
        "amp-fp16": (torch.float32, torch.float16),
        "amp-bf16": (torch.float32, torch.bfloat16),
        "bf16": (torch.bfloat16, torch.float32),  # no autocast: inputs decide
    }
    with pytest.raises(InputError, match="Did you mean 'amp-fp16'"):
        precisions.autocast("cpu", "amp-fp1")


# --- checkpointing -------------------------------------------------------------------------------


def forward_saves(model):
    """Bytes that autograd is handed to keep during a forward pass."""
    saved = []

    def keep(tensor):
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids(), labels=ids())
    return sum(saved)


def test_checkpointing_keeps_gradients_to_the_bit_and_fewer_activations():
    model = tiny()
    plain_bytes = forward_saves(model)
    loss, gradients = step_gradients(model, ids())

    model = tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        catalogue.checkpointing(model)
    loss_again, gradients_again = step_gradients(model, ids())
    assert torch.equal(loss, loss_again)
    assert all(map(torch.equal, gradients, gradients_again))
    assert 0 < forward_saves(model) < plain_bytes / 2

    catalogue.checkpointing(model, False)
    assert forward_saves(model) == plain_bytes


def test_checkpointing_finds_the_switch_of_older_releases():
    older, calls = torch.nn.Identity(), []
    older.gradient_checkpointing_enable = calls.append
    catalogue.checkpointing(older)
    assert calls == [{"use_reentrant": False}]
    with pytest.raises(InputError, match="Linear has no checkpointing switch"):
        catalogue.checkpointing(torch.nn.Linear(1, 1))


def test_only_gemma_attends_to_a_window():
    """transformers gives one to every Mistral whose config does not say null."""
    configs = {name: find_config(name)[1].get_text_config() for name in MODELS}
    windows = {name: getattr(config, "sliding_window", None) for name, config in configs.items()}
    found = {name: window for name, window in windows.items() if window}
    assert found == {"Gemma-3-1B": 512}
