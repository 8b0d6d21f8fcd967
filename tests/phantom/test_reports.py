"""The report of ``labkit phantom`` names what people know: one small script for each thing."""

from collections import Counter

import pytest

from gpumem.allocator.workspaces import DEFAULT_BYTES
from gpumem.units import KIB, MIB, format_bytes

LAUNCH = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", "logs")
#: A copy of a model, a part that never runs, statistics, a batch, and states of one's own.
NAMES = """
import copy, torch

class Coder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)

torch.nn.Identity()(torch.ones(1))  # on the CPU, before anything is moved
net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512)).cuda()
averaged = copy.deepcopy(net).requires_grad_(False)
coder = Coder().cuda()
momenta = [torch.zeros_like(parameter) for parameter in net.parameters()]
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(3):
    batch = torch.ones(256, 512).cuda()
    net(coder.encoder(batch).detach()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OWN_UPDATE = """
import torch
net = torch.nn.Linear(1024, 1024).cuda()
for _ in range(2000):
    net(torch.ones(8, 1024, device="cuda")).sum().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= parameter.grad
            parameter.grad = None
"""
BUCKETS = """
import os, torch
import torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(4)]).cuda()
net = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters())
for _ in range(3):
    net(torch.ones(1, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
EVALUATIONS = """
import torch
net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(2)]).cuda()
optimizer = torch.optim.SGD(net.parameters())
kept = []
for _ in range(5):
    net(torch.ones(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.inference_mode():
        for _ in range(3):
            kept.append(net(torch.ones(1024, 1024, device="cuda")))
"""
GRAPHS = """
import torch
net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(2)]).cuda()
optimizer = torch.optim.SGD(net.parameters())
net(torch.ones(8, 1024, device="cuda")).sum().backward()
optimizer.step()
losses = [net(torch.ones(1024, 1024, device="cuda")).mean() for _ in range(5)]
"""
#: What asks for too much is a library's code, below a checkpoint.
IN_LIBRARY = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(
    hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
    vocab_size=8000,
)
model = LlamaForCausalLM(config).cuda().train()
model.gradient_checkpointing_enable()
ids = torch.ones(1024, 4096, dtype=torch.int64, device="cuda")
model(input_ids=ids, labels=ids)
"""
IN_BACKWARD = """
import torch
x = torch.ones(5 << 28, device="cuda", requires_grad=True)
loss = x.exp().sum()
loss.backward()
"""
REPLICAS = """
import torch
net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(2)]).cuda()
net = torch.nn.DataParallel(net)
optimizer = torch.optim.SGD(net.parameters())
for _ in range(2):
    net(torch.ones(4096, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
#: transformers holds a layer's experts as two tensors, which bitsandbytes leaves in 16 bits.
EXPERTS = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MixtralConfig
MixtralConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, num_local_experts=8,
    architectures=["MixtralForCausalLM"],
).save_pretrained("mixtral")
model = AutoModelForCausalLM.from_pretrained(
    "mixtral", dtype=torch.bfloat16, device_map={"": 0},
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16
    ),
)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj"]))
optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
ids = torch.ones(8, 1024, dtype=torch.int64, device="cuda")
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
"""
#: Trainer joins what the batches of an evaluation gave.
PREDICTIONS = """
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config
from transformers import T5ForConditionalGeneration
config = T5Config(
    vocab_size=8000, d_model=64, d_kv=16, num_heads=4, d_ff=256, num_layers=2,
    decoder_start_token_id=0,
)
ones = torch.ones(32, dtype=torch.int64)
arguments = Seq2SeqTrainingArguments(
    "out", per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=2,
    eval_strategy="steps", eval_steps=1, save_strategy="no", report_to="none",
    eval_accumulation_steps=None,
)
Seq2SeqTrainer(
    T5ForConditionalGeneration(config), arguments,
    train_dataset=[{"input_ids": ones, "labels": ones}] * 8,
    eval_dataset=[{"input_ids": ones, "labels": ones}] * 64,
    compute_metrics=lambda found: {"rows": len(found.label_ids)},
    preprocess_logits_for_metrics=lambda logits, labels: logits,
).train()
"""
PREDICTED_BYTES = 64 * 32 * 8000 * 4


@pytest.fixture
def report(run):
    """Run a script's text on phantom T4s; return the report, and the GPU that it is about."""

    def report(text, gpu="t4", **options):
        found, _ = run(text, gpu=gpu, **options)
        assert not found.answers[0].faults
        return found, found.worst()[1]

    return report


def test_everything_has_its_name(report):
    found, gpu = report(NAMES)
    linear, norm = 4 * (512 + 1) * 512, 4 * 2 * 512
    exact = {
        "weights": 2 * (linear + norm) + 2 * linear,
        "buffers": 2 * (4 * 2 * 512 + 8),
        "optimizer": 2 * (linear + norm),
        "inputs": 512 * KIB,
        "workspaces": 2 * DEFAULT_BYTES,
        "script's tensors": linear + norm,
    }
    assert {name: gpu.made_of.get(name) for name in exact} == exact
    assert "unattributed" not in gpu.made_of
    [inputs] = [holder for holder in gpu.holders if holder.category == "inputs"]
    assert (inputs.dtype, found.line(inputs.users_line)) == ("float32", "train.py:16")
    names = {offer.name for offer in found.answers[0].remedies}
    assert not names & {"lora", "qlora", "half-rows"}


def test_without_an_optimizer_steps_are_backward_passes(report):
    found, gpu = report(OWN_UPDATE, steps=3)
    assert (found.answers[0].ended, found.answers[0].steps) == ("stopped", 3)
    assert gpu.made_of["gradients"] >= 4 * MIB
    assert "3 backward passes, as there is no optimizer of torch.optim" in str(found)
    assert "FLOP" not in str(found)  # next to none


@pytest.mark.parametrize("passes", [1, 2])
def test_a_few_backward_passes_have_their_answer(report, passes):
    found, _ = report(OWN_UPDATE.replace("2000", str(passes)))
    assert (found.answers[0].ended, found.answers[0].steps) == ("finished", passes)


def test_the_buckets_of_ddp_are_gradients_with_a_name(report):
    found, gpu = report(BUCKETS, launch=LAUNCH, gpus=2)
    assert gpu.made_of["gradients"] == 2 * gpu.made_of["weights"]
    assert [h.nbytes for h in gpu.holders if h.module == "DDP's buckets"] == [64 * MIB]
    [offer] = [o for o in found.answers[0].remedies if o.name == "bucket-views"]
    assert [edit.code for edit in offer.edits] == ["gradient_as_bucket_view=True"]


def test_evaluations_are_told_from_training_and_what_each_leaves_behind(report):
    found, gpu = report(EVALUATIONS)
    assert (gpu.allocated_at.phase, gpu.allocated_at.step) == ("evaluation", 5)
    assert "evaluation after step 5" in str(found)
    assert (gpu.growth_bytes, gpu.grows_in) == (12 * MIB, "evaluation")
    assert "After the first, each evaluation leaves 12.0 MiB behind" in str(found)
    assert "recompute" not in str(found)


def test_graphs_that_no_backward_pass_frees_are_counted(report):
    found, gpu = report(GRAPHS)
    [alive] = gpu.passes_alive
    assert (alive.model, alive.phase, alive.passes) == ("Sequential", "forward", 5)
    assert "5 forward passes' graphs are alive (Sequential)" in str(found)


def test_a_failed_request_names_the_librarys_line_and_the_scripts(report):
    found, gpu = report(IN_LIBRARY)
    assert found.fits is False
    first, *others = [found.line(line) for line in gpu.failed.stack]
    assert first.startswith("transformers/…/")
    assert others == ["train.py:11"]
    assert "packages" not in str(found)
    assert "checkpointing" not in {offer.name for offer in found.answers[0].remedies}


def test_a_failed_request_of_a_backward_pass_names_its_line(report):
    found, gpu = report(IN_BACKWARD)
    assert gpu.failed.when.phase == "backward"
    assert [found.line(line) for line in gpu.failed.stack] == ["train.py:5"]


def test_replicas_of_a_model_have_their_modules_paths(report):
    _, gpu = report(REPLICAS, gpus=2)
    assert ("activations", "*") in {(holder.category, holder.module) for holder in gpu.holders}


def test_weights_that_quantization_leaves_out_are_named_with_their_type(report):
    _, gpu = report(EXPERTS)
    held = Counter()
    for holder in gpu.holders:
        held[holder.category, holder.module.rpartition(".")[2], holder.dtype] += holder.nbytes
    routers, experts = 4 * 8 * 256, 4 * 8 * 3 * 256 * 1024
    assert held["weights", "mlp", "bfloat16"] == 2 * (routers + experts)
    assert held["weights", "self_attn", "uint8"] == 4 * 4 * 256 * 256 // 2


def test_weights_that_a_library_cannot_load_are_no_mistake_of_the_scripts(report):
    large = EXPERTS.replace("256, intermediate_size=1024", "2048, intermediate_size=4096")
    found, gpu = report(large, gpu="2GiB:8.9")
    assert found.fits is False
    assert gpu.failed.when.phase == "setup"
    assert found.line(gpu.failed.stack[-1]) == "train.py:10"
    assert found.mistakes() == []


def test_a_step_that_the_script_repeats_after_an_error_is_a_mistake(report):
    step = "model(input_ids=ids, labels=ids)"
    again = f"for _ in 1, 2:\n  try: {step}\n  except torch.OutOfMemoryError: pass"
    found, _ = report(IN_LIBRARY.replace(step, again))
    assert [mistake.kind for mistake in found.mistakes()] == ["repeated-error"]


def test_predictions_that_trainer_joins_are_counted_and_named(report):
    found, gpu = report(PREDICTIONS)
    [mistake] = found.mistakes()
    assert (mistake.kind, found.line(mistake.place)) == ("collected", "train.py:21")
    assert f"joins its batches' results to {format_bytes(PREDICTED_BYTES)}" in mistake.says
    assert gpu.allocated_at.phase == "evaluation"
    assert gpu.peak_allocated_bytes > 2 * PREDICTED_BYTES  # the last time, beside all before


@pytest.mark.parametrize(
    ("before", "after", "joined_bytes"),
    [
        pytest.param(*("steps=None", "steps=4", PREDICTED_BYTES // 4), marks=pytest.mark.nightly),
        ("labels: logits", "labels: logits[0].argmax(-1)", 0),
    ],
)
def test_predictions_that_are_moved_or_made_small_take_no_more(report, before, after, joined_bytes):
    assert before in PREDICTIONS
    found, gpu = report(PREDICTIONS.replace(before, after))
    kinds = [mistake.kind for mistake in found.mistakes()]
    assert kinds == ["collected"] * bool(joined_bytes)
    assert gpu.peak_allocated_bytes < PREDICTED_BYTES
