"""Advice on answering: every option is an estimate that was run, and the mildest comes first."""

import json
from dataclasses import replace

import pytest
from transformers import LlamaConfig

import gpumem
from gpumem.estimation.serving_search import ANSWER, NOTHING, ROUNDING, needed_bytes
from gpumem.hardware.catalogue import MARGIN, room_bytes
from gpumem.hardware.catalogue import gpu as gpu_named
from gpumem.inputs import InputError

GPU = gpu_named("1GiB:8.0")
SHORT = {"prompt_tokens": 500, "new_tokens": 2}


def llama(hidden, intermediate):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 1024}
    return LlamaConfig(vocab_size=1000, hidden_size=hidden, intermediate_size=intermediate, **sizes)


SMALL, LARGE = llama(256, 512), llama(4096, 8192)  # 2 MiB of weights, and 655 MiB


def estimated(config, option):
    """The same estimate by itself, on the GPU without the margin; vLLM has its own."""
    gpu = GPU if option.gpu == GPU.key else gpu_named(option.gpu)
    if option.serving.cache != "paged":
        room = room_bytes(gpu.budget_bytes, MARGIN)
        gpu = replace(gpu, usable_bytes=gpu.context_bytes + room)
    return gpumem.serve(config, gpu=gpu, serving=option.serving)


@pytest.fixture(scope="module")
def crowded():
    """More users than fit."""
    return gpumem.advise_serving(SMALL, GPU, users=2000, **SHORT)


@pytest.fixture(scope="module")
def heavy():
    """Weights that do not fit as they are."""
    return gpumem.advise_serving(LARGE, GPU, users=1, prompt_tokens=100, new_tokens=2)


@pytest.mark.parametrize("found", ["crowded", "heavy"])
def test_every_option_is_an_estimate_that_fits(found, request):
    config, advice = {"crowded": SMALL, "heavy": LARGE}[found], request.getfixturevalue(found)
    assert not advice.fits
    assert advice.options
    for option in advice.options:
        again = estimated(config, option)
        assert again.fits
        assert needed_bytes(again) == option.needed_bytes
        assert option.needed_bytes <= room_bytes(gpu_named(option.gpu).budget_bytes, MARGIN)
        assert option.code
    order = [(NOTHING, ROUNDING, ANSWER).index(option.changes) for option in advice.options]
    assert order == sorted(order)
    assert len({option.name for option in advice.options}) == len(advice.options)
    record = json.loads(json.dumps(advice.to_dict(), allow_nan=False))
    assert record["options"][0]["serving"]["prompt_tokens"] == advice.serving.prompt_tokens
    text = str(advice)
    for option in advice.options:
        assert option.name in text
        assert all(line in text for line in option.code.splitlines())


def test_fewer_users_more_gpus_or_shorter_prompts_answer_a_crowd(crowded):
    by_name = {option.name: option for option in crowded.options}
    turns = by_name[f"{crowded.most_users} of the users at a time"]
    assert turns.serving.users == crowded.most_users
    assert not estimated(
        SMALL, replace(turns, serving=turns.serving.but(users=crowded.most_users + 1))
    ).fits
    [copies] = [option for option in crowded.options if option.gpus > 1]
    assert copies.serving.users * copies.gpus >= 2000 > copies.serving.users * (copies.gpus - 1)
    assert crowded.options[-1].changes == ANSWER
    assert crowded.options[-1].serving.prompt_tokens + 2 == crowded.longest_tokens
    shared = gpumem.advise_serving(SMALL, GPU, users=2000, gpus=copies.gpus, **SHORT)
    assert shared.fits
    assert shared.options == ()
    assert shared.most_users == copies.gpus * crowded.most_users


def test_weights_that_are_too_large_are_rounded_or_go_to_a_larger_gpu(heavy):
    assert (heavy.most_users, heavy.longest_tokens) == (0, 0)
    assert {option.changes for option in heavy.options} == {NOTHING, ROUNDING}
    assert all(option.gpu != GPU.key for option in heavy.options if option.changes == NOTHING)
    kinds = [option.serving.quantize for option in heavy.options if option.changes == ROUNDING]
    assert kinds[:2] == ["int8", "nf4"]
    assert heavy.ruled_out >= 4  # a static or a paged cache, and FP8 in both, save no weights
    assert "load_in_8bit=True" in str(heavy)


def test_where_rounding_alone_is_too_little_users_take_turns_too():
    found = gpumem.advise_serving(LARGE, GPU, users=64, **SHORT)
    [turns] = [option for option in found.options if option.gpu == GPU.key]
    assert turns.changes == ROUNDING
    assert 0 < turns.serving.users < 64
    assert turns.serving.quantize


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"users": 0}, "users must be from 1"),
        ({"gpus": 0}, "gpus must be from 1"),
        ({"margin": 1}, "margin must be a share"),
        ({"cache": "pagd"}, "Did you mean 'paged'"),
        ({"gpu": "t4"}, "precision 'fp16' instead"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(changes, reason):
    with pytest.raises(InputError, match=reason):
        gpumem.advise_serving(SMALL, **{"gpu": GPU} | changes)
