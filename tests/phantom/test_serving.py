"""What answering is estimated to take is what PyTorch's own allocator gives ``generate``."""

import pytest
import torch
from bitsandbytes import functional
from conftest import left

import labkit as lab
from gpumem.hardware import cuda, this_machine
from gpumem.models.catalogue import config

#: Short prompts and long answers, whose peak is in decoding; long prompts, whose peak is not.
LONG_ANSWER, LONG_PROMPT = (
    {"prompt_tokens": 16, "new_tokens": 150},
    {"prompt_tokens": 300, "new_tokens": 24},
)
EIGHT = (
    *("Llama-3.1-8B", "Qwen3-8B", "Qwen2.5-7B", "Mistral-7B", "SmolLM2-135M", "GPT-2"),
    *("Gemma-3-1B", "OLMoE-1B-7B"),
)
BY_DAY = [
    # The next segment is taken by as little as one block of 512 bytes that is freed too late.
    ("Qwen2.5-7B", 3, LONG_ANSWER | {"users": 8}),
    ("Llama-3.1-8B", 2, LONG_PROMPT | {"users": 1, "cache": "static"}),
    # Weights so large that their scales take blocks of the same pool.
    ("Llama-3.1-70B", 8, LONG_ANSWER | {"users": 1, "quantize": "nf4"}),
    ("Llama-3.1-8B", 2, LONG_PROMPT | {"users": 8, "cache": "static", "quantize": "nf4"}),
    ("SmolLM2-135M", 4, LONG_ANSWER | {"users": 1}),
    ("OLMoE-1B-7B", 2, LONG_ANSWER | {"users": 4}),
    ("Llama-3.1-8B", 2, LONG_PROMPT | {"users": 8, "padded": True}),
    ("Gemma-3-1B", 6, {"users": 2, "prompt_tokens": 1500, "new_tokens": 6, "padded": True}),
]
AT_NIGHT = [
    (model, 8 if model == "Gemma-3-1B" else 3, lengths | {"users": users, "cache": cache} | kind)
    for model in EIGHT
    for cache in ("dynamic", "static")
    for users in (1, 8)
    for lengths in (LONG_ANSWER, LONG_PROMPT)
    for kind in ({}, {"quantize": "nf4"})
    if not (kind and model == "OLMoE-1B-7B")
]
AT_NIGHT += [
    ("Llama-3.1-8B", 2, LONG_ANSWER | {"users": 4, "kv_dtype": "fp8"}),
    ("Llama-2-7B", 2, LONG_PROMPT | {"users": 4, "precision": "fp32"}),
    ("LLaVA-1.5-7B", 2, {"users": 2, "prompt_tokens": 700, "new_tokens": 24}),
    ("Qwen2.5-7B", 2, LONG_ANSWER | {"users": 8, "padded": True}),
    ("Gemma-3-1B", 8, LONG_PROMPT | {"users": 8, "padded": True, "attention": "eager"}),
]


@pytest.fixture(autouse=True)
def without_a_table_of_bitsandbytes():
    """Free what other tests' optimizers have left on the GPU: it changes what a run reserves."""
    functional.name2qmap.clear()
    cuda.free_memory()


def checked(model, layers, changes):
    """Compare an estimate with what the allocator of this process gives."""
    shallow = config(model, layers=layers)
    run = lab.measure(lab.generation(shallow, **changes), steps=1, track=False)
    found = lab.serve(shallow, gpu=this_machine.this_gpu(), **changes)
    assert run.mode == "phantom"
    said = (found.peak_allocated_bytes, found.peak_reserved_bytes)
    assert said == (run.peak_bytes, run.reserved_bytes), (model, layers, changes)
    assert left() == 0


def test_estimates_are_what_generate_takes():
    for case in BY_DAY:
        checked(*case)


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "layers", "changes"), AT_NIGHT)
def test_estimates_are_what_generate_takes_of_every_kind(model, layers, changes):
    checked(model, layers, changes)


def test_so_many_users_fit_and_one_more_runs_out_of_memory(on_phantom, tmp_path):
    found = lab.serve(
        config("SmolLM2-135M", layers=4),
        gpu="t4",
        precision="fp16",
        prompt_tokens=4000,
        new_tokens=8,
    )
    script = tmp_path / "answer.py"
    script.write_text(
        "import sys, labkit as lab\n"
        "from gpumem.models.catalogue import config\n"
        "kind = dict(precision='fp16', prompt_tokens=4000, new_tokens=8)\n"
        "for users in map(int, sys.argv[1:]):\n"
        "    job = lab.generation(config('SmolLM2-135M', layers=4), users=users, **kind)\n"
        "    print(lab.measure(job, steps=1, track=False).oom is None)\n"
    )
    most = found.most_users()
    said = on_phantom("t4", script, most, most + 1)
    assert said.split()[-2:] == ["True", "False"], most


@pytest.mark.nightly
def test_a_70b_in_four_bits_on_48_gb(on_phantom, tmp_path):
    kind = {"users": 1, "prompt_tokens": 300, "new_tokens": 24, "quantize": "nf4"}
    script = tmp_path / "answer.py"
    script.write_text(
        "import labkit as lab\n"
        f"job = lab.generation('Llama-3.1-70B', **{kind})\n"
        "run = lab.measure(job, steps=1, track=False)\n"
        "print(run.peak_bytes, run.reserved_bytes)\n"
    )
    allocated, reserved = map(int, on_phantom("l40s", script).split()[-2:])
    found = lab.serve("Llama-3.1-70B", gpu="l40s", **kind)
    assert found.fits
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (allocated, reserved)


def test_a_plain_call_takes_the_same():
    torch.cuda.reset_peak_memory_stats()
    model = lab.model("Llama-3.1-8B", device="cuda", dtype=torch.bfloat16, layers=2).eval()
    ids = torch.randint(1000, (2, 40), device="cuda")
    model.generate(ids, max_new_tokens=30, use_cache=True)
    peak_bytes, reserved_bytes = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    del model, ids
    found = lab.serve(
        config("Llama-3.1-8B", layers=2),
        gpu=this_machine.this_gpu(),
        users=2,
        prompt_tokens=40,
        new_tokens=30,
    )
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (peak_bytes, reserved_bytes)


def test_the_report_names_prefill_decode_and_the_cache(run):
    verdict, _ = run(
        """
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = dict(hidden_size=512, intermediate_size=512, num_attention_heads=8)
        config = LlamaConfig(vocab_size=1000, num_hidden_layers=2, **sizes)
        model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
        ids = torch.randint(1000, (64, 8)).to("cuda")
        model.generate(ids, max_new_tokens=40, use_cache=True)
        """
    )
    [(answer, gpu)] = verdict.by_gpu()
    token_bytes = 2 * 2 * 512 * 2  # layers, keys and values, bfloat16
    assert answer.cache == (64 * 47 * token_bytes, 64, 47, token_bytes)
    assert gpu.allocated_at.phase == "decode"
    assert "half-rows" not in {offer.name for offer in answer.remedies}  # of which steps?
    # One of a layer's tensors is there twice while it is made longer.
    held = answer.cache.nbytes
    assert held <= gpu.made_of["KV cache"] <= held + held // 4
    assert "4.00 KiB a token and user: 1,000 tokens more take 250 MiB" in str(verdict)


def test_a_cache_with_windows_grows_by_its_other_layers_alone(run):
    verdict, _ = run(
        """
        import torch
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        sizes = dict(hidden_size=128, intermediate_size=128, num_attention_heads=2, head_dim=64)
        kinds = ["full_attention", "sliding_attention", "sliding_attention"]
        config = Gemma3TextConfig(
            vocab_size=512, num_hidden_layers=3, num_key_value_heads=1, sliding_window=16,
            layer_types=kinds, **sizes,
        )
        model = Gemma3ForCausalLM(config).to("cuda", torch.bfloat16).eval()
        ids = torch.randint(2, 512, (4, 8)).to("cuda")
        model.generate(ids, max_new_tokens=120, use_cache=True)
        """
    )
    [answer] = verdict.answers
    assert answer.cache.tokens == 127
    assert answer.cache.token_bytes == 2 * 64 * 2  # keys and values of one layer, bfloat16
    assert "1,000 tokens more take 1000 KiB" in str(verdict)


def test_an_encoder_decoder_has_two_caches(run):
    verdict, _ = run(
        """
        import torch
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = dict(d_model=64, d_kv=16, num_heads=4, d_ff=256, num_layers=2)
        config = T5Config(vocab_size=1000, decoder_start_token_id=0, **sizes)
        model = T5ForConditionalGeneration(config).cuda()
        ids = torch.ones(4, 64, dtype=torch.int64, device="cuda")
        model(input_ids=ids, labels=ids[:, :32])
        model.eval().generate(ids[:2], max_new_tokens=20)
        """
    )
    [answer] = verdict.answers
    token_bytes = 2 * 2 * 64 * 4  # layers, keys and values, float32
    assert answer.cache == (4 * (64 + 32) * token_bytes, 4, 64 + 32, token_bytes)
