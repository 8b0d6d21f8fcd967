"""What answering takes: its parts agree, passes repeat exactly, and one user more does not fit."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, Gemma3TextConfig, LlamaConfig

import gpumem
import labkit as lab
from benchmarks.setups import TINY as SIZES
from gpumem.allocator.workspaces import with_workspaces
from gpumem.estimation import generation, paged
from gpumem.estimation.serving import CACHE, DECODE, PREFILL, _play, decoding_of, passes_log
from gpumem.fake_cuda.depth_extension import single_lives
from gpumem.fake_cuda.pass_extension import passes_of
from gpumem.hardware.catalogue import gpu as gpu_named
from gpumem.inputs import InputError
from gpumem.models import catalogue
from gpumem.units import GIB

TINY = LlamaConfig(**SIZES | {"num_hidden_layers": 5, "max_position_embeddings": 4096})
KINDS = {"users": 3, "prompt_tokens": 120, "new_tokens": 24}


def serve(config=TINY, gpu="a100-80gb", **changes):
    return gpumem.serve(config, gpu=gpu, **KINDS | changes)


# --- what is repeated is what would be traced -----------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_passes_that_are_repeated_are_those_of_a_trace_of_all(cache):
    serving = gpumem.Serving(cache=cache, **KINDS)
    gpu = gpu_named("a100-80gb")
    log = passes_log("tiny", TINY, serving, gpu, 0, serving.new_tokens - 1, None)
    traced = passes_of(single_lives(with_workspaces(log.trace, gpu)))
    repeated = list(decoding_of("tiny", TINY, serving, gpu).passes())
    assert len(traced) == len(repeated) - 1
    assert len({id(stretch) for _, stretch in repeated}) < 6
    before = other_before = None
    for passed, (number, stretch) in zip(traced, repeated, strict=False):
        assert passed.sizes == stretch.sizes(number)
        assert freed(passed, before) == freed(stretch.passed, other_before)
        before, other_before = passed, stretch.passed


def freed(passed, before):
    """What a pass takes and frees; of what the pass before has left, that one's number."""
    left = {} if before is None else before.left
    return [change if isinstance(change, int) else left.get(change) for change in passed.changes]


def test_its_parts_agree():
    found = serve()
    assert sum(found.parts.values()) == found.peak_allocated_bytes
    assert found.peak_allocated_bytes <= found.peak_reserved_bytes <= found.capacity_bytes
    assert found.peak_allocated_bytes == max(found.pass_allocated_bytes)
    assert found.peak_reserved_bytes == found.pass_reserved_bytes[-1]
    heads, size = TINY.num_key_value_heads, TINY.hidden_size // TINY.num_attention_heads
    per_token = 2 * 5 * heads * size * 2
    assert found.cache_bytes_per_token == per_token
    assert found.cache_bytes == 3 * (120 + 24 - 1) * per_token
    assert found.fits
    assert found.failed_in is None
    record = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert record["parts"][CACHE] > 0
    assert "most_users" not in record
    with_bound = gpu_named("a100-80gb").bandwidth_gb_per_s * 1e9
    least = found.read_bytes + 3 * 120 * per_token
    assert found.bound_tokens_per_second < 3 * with_bound / least


def test_where_the_peak_lies_follows_the_lengths():
    assert serve(prompt_tokens=1000, new_tokens=2).peak_in == PREFILL
    assert serve(prompt_tokens=4, new_tokens=400).peak_in == DECODE
    assert serve(new_tokens=1).bound_tokens_per_second is None


def test_kinds_of_cache_and_numbers_take_what_they_must():
    whole, static = serve(), serve(cache="static")
    assert static.cache_bytes_per_token == whole.cache_bytes_per_token
    assert static.cache_bytes >= whole.cache_bytes
    assert serve(precision="fp32").cache_bytes == 2 * whole.cache_bytes
    assert serve(precision="fp16").peak_allocated_bytes == whole.peak_allocated_bytes
    halved = serve(kv_dtype="fp8")
    assert halved.cache_bytes_per_token == whole.cache_bytes_per_token // 2


WINDOWS = Gemma3TextConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=128,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    num_hidden_layers=3,
    sliding_window=64,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
)


@pytest.mark.parametrize(
    ("cache", "new_tokens"),
    [("dynamic", 2), ("dynamic", 3), ("dynamic", 9), ("static", 1), ("static", 3), ("static", 30)],
)
def test_a_token_more_adds_nothing_to_windows_that_are_full(cache, new_tokens):
    found = serve(WINDOWS, cache=cache, prompt_tokens=200, new_tokens=new_tokens)
    per_token = 2 * 64 * 2  # keys and values of the one layer without a window, in 16 bits
    assert found.cache_bytes_per_token == per_token
    # A window keeps 64 tokens; what its layer holds of the cache may be one token less, or a block.
    tokens = 200 + new_tokens - (cache == "dynamic")
    windows_bytes = found.cache_bytes - 3 * tokens * per_token
    assert 2 * 3 * 63 * per_token <= windows_bytes <= 2 * 3 * 65 * per_token


def test_padding_takes_a_mask_and_the_kernels_without_one():
    plain, padded = serve(prompt_tokens=1000), serve(prompt_tokens=1000, padded=True)
    mask_bytes = 3 * 1000 * 1000 * (1 + 2)  # of booleans, and as it is added to the scores
    more_bytes = padded.peak_allocated_bytes - plain.peak_allocated_bytes
    assert mask_bytes <= more_bytes + plain.parts["activations"]
    assert more_bytes > mask_bytes // 2
    few = LlamaConfig(**TINY.to_dict() | {"num_hidden_layers": 1, "max_position_embeddings": 150})
    assert "see --padded" in str(serve(few))
    assert "see --padded" not in str(serve(few, padded=True))
    assert "see --padded" not in str(serve(few, users=1))


def test_more_positions_than_the_model_was_made_for_are_named():
    few = LlamaConfig(**TINY.to_dict() | {"max_position_embeddings": 100})
    assert "The model was made for 100 positions, and 90 + 24 tokens are more." in str(
        serve(few, prompt_tokens=90, users=1)
    )
    assert "was made for" not in str(serve(few, prompt_tokens=77, users=1))
    with pytest.raises(InputError, match="knows 100 positions, and 101 are asked for"):
        serve(few, prompt_tokens=77, cache="paged")
    assert serve(few, prompt_tokens=70, cache="paged").longest_prompt_tokens() == 100 - 24


@pytest.mark.parametrize("pad", [None, 0, 3, 15])
def test_no_prompt_has_the_token_that_pads(pad):
    """With it, `generate` makes a mask, and a run takes more than its estimate."""
    asked = []
    model = SimpleNamespace(
        config=LlamaConfig(vocab_size=16),
        generation_config=SimpleNamespace(pad_token_id=pad),
        get_input_embeddings=lambda: torch.nn.Embedding(16, 1),
        generate=lambda ids, **_: asked.append(ids),
    )
    serving = gpumem.Serving(users=8, prompt_tokens=100, new_tokens=2)
    generation.Conversation("tiny", model, serving)()
    tokens = set(asked[0].flatten().tolist())
    assert pad not in tokens
    assert len(tokens) >= 8


def test_no_prompt_is_shorter_than_its_image():
    found = serve(catalogue.config("LLaVA-1.5-7B", layers=1), gpu="2GiB:8.0", prompt_tokens=700)
    assert not found.fits
    assert found.longest_prompt_tokens() == 0


# --- how many fit ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["dynamic", pytest.param("static", marks=pytest.mark.nightly)])
def test_so_many_users_fit_and_one_more_does_not(cache):
    gpu = gpu_named("1GiB:8.0")
    found = serve(gpu=gpu, cache=cache, prompt_tokens=4000, new_tokens=20)
    most = found.most_users()
    assert most > 3
    assert serve(gpu=gpu, cache=cache, prompt_tokens=4000, new_tokens=20, users=most).fits
    more = serve(gpu=gpu, cache=cache, prompt_tokens=4000, new_tokens=20, users=most + 1)
    assert not more.fits


@pytest.mark.nightly
def test_so_long_a_prompt_fits_and_no_longer_one():
    gpu = gpu_named("1GiB:8.0")
    found = serve(gpu=gpu, users=64, new_tokens=8)
    longest = found.longest_prompt_tokens()
    assert 120 < longest < TINY.max_position_embeddings - 8
    assert serve(gpu=gpu, users=64, new_tokens=8, prompt_tokens=longest).fits
    assert not serve(gpu=gpu, users=64, new_tokens=8, prompt_tokens=longest + 1).fits


def test_more_than_the_model_knows_positions_is_never_offered():
    assert serve(new_tokens=8, users=1).longest_prompt_tokens() == TINY.max_position_embeddings - 7


def test_a_request_that_fails_names_its_pass():
    serving = gpumem.Serving(users=512, prompt_tokens=4, new_tokens=64)
    decoding = decoding_of("tiny", TINY, serving, gpu_named("a100-80gb"))
    free = _play(decoding, 80 * GIB)
    grown = next(n for n, nbytes in enumerate(free.reserved, 1) if nbytes > free.reserved[0])
    short = _play(decoding, free.reserved[grown - 1] - 1)
    assert short.failed_in is None or short.failed_in >= grown
    assert short.peak_bytes == free.peak_bytes
    assert _play(decoding, free.reserved[0] - 1).failed_in in (0, 1)


# --- vLLM's ---------------------------------------------------------------------------------------


def test_paged_is_vllms_arithmetic():
    gpu = gpu_named("a100-80gb")
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 16}
    config = LlamaConfig(
        vocab_size=1000, num_hidden_layers=12, max_position_embeddings=4096, **sizes
    )
    kind = {"gpu": gpu, "cache": "paged", "prompt_tokens": 1000, "new_tokens": 25}
    found = serve(config, **kind)
    assert paged.batch_of(gpu) == (2048, 256)
    assert paged.batch_of(gpu_named("h100")) == (8192, 1024)
    others = found.weights_bytes + found.activations_bytes + gpu.context_bytes
    block_bytes = 16 * found.cache_bytes_per_token
    assert found.blocks == (int(0.9 * gpu.usable_bytes) - others) // block_bytes
    assert found.cache_bytes == found.blocks * block_bytes <= found.taken_bytes - others
    assert paged.blocks_of(1024) == 64
    assert found.most_users() == min((found.blocks - 1) // 64, 256) == 256
    assert serve(config, **kind | {"kv_dtype": "fp8"}).cache_bytes_per_token * 2 == (
        found.cache_bytes_per_token
    )
    small = gpu_named("2GiB:8.0")
    few = serve(config, **kind | {"gpu": small, "users": 8})
    most = few.most_users()
    assert 0 < most < 256
    assert serve(config, **kind | {"gpu": small, "users": most}).fits
    assert not serve(config, **kind | {"gpu": small, "users": most + 1}).fits
    longest = few.longest_prompt_tokens()
    assert longest < 4072
    kind |= {"gpu": small, "users": 8}
    assert serve(config, **kind | {"prompt_tokens": longest}).fits
    assert not serve(config, **kind | {"prompt_tokens": longest + 16}).fits
    assert "blocks of 16 tokens" in str(few)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"users": 0}, "users must be from 1"),
        ({"cache": "pagd"}, "Did you mean 'paged'"),
        ({"kv_dtype": "int4"}, "unknown kv_dtype"),
        ({"kv_dtype": "fp8", "cache": "static"}, "no static cache in fp8"),
        ({"precision": "amp-fp16"}, "unknown precision"),
        ({"user": 3}, "field of serving"),
        ({"gpu": "t4"}, "precision 'fp16' instead"),
        ({"users": 60_000, "prompt_tokens": 60_000}, "in one batch"),
        ({"padded": 1}, "padded must be true or false"),
        ({"padded": True, "cache": "paged"}, "vLLM pads no prompt"),
        ({"padded": True, "cache": "static"}, "with cache 'dynamic' only"),
        ({"quantize": "int8", "cache": "paged"}, "int8 only what is stored so"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(changes, reason):
    with pytest.raises(InputError, match=reason):
        serve(**changes)


def test_an_encoder_writes_no_answer():
    for answers in (gpumem.serve, gpumem.generation, partial(gpumem.advise_serving, gpu="l4")):
        with pytest.raises(InputError, match="fills in masked tokens and writes no answer"):
            answers(BertConfig())
    found = gpumem.serve(
        BertConfig(is_decoder=True, num_hidden_layers=2), gpu="l4", prompt_tokens=8, new_tokens=2
    )
    assert found.fits


def test_windows_have_no_paged_cache_here():
    with pytest.raises(InputError, match="attends to a window"):
        gpumem.serve("Gemma-3-1B", gpu="l4", cache="paged")
    with pytest.raises(InputError, match="nothing here runs it"):
        gpumem.generation(TINY, cache="paged")


def test_a_simulated_experiment_may_answer():
    def experiment(device):
        model = lab.model(TINY, device=device, dtype=torch.bfloat16).eval()
        for length in (5, 9):
            ids = torch.randint(100, (2, 7), device=device)
            assert model.generate(ids, max_new_tokens=length, use_cache=True).shape == (
                2,
                7 + length,
            )
            yield 0.0

    assert lab.simulate(experiment, gpu="a100-80gb", steps=2).peak_bytes
