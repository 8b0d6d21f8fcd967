"""Remedies are tried on the script itself, and a script with their lines takes what was said."""

import functools
import json
import sys
import textwrap

import pytest

from benchmarks import fit
from gpumem.inputs import InputError
from gpumem.units import MIB
from phantom_gpu.fix import fix, orders
from phantom_gpu.largest import largest
from phantom_gpu.report_records import BACKWARD, PASS, Effect
from phantom_gpu.run_script import run_program
from phantom_gpu.write_edits import written

LOOP = """
for batch in DataLoader(torch.rand(64, 1024), batch_size=16):
    net(batch.cuda()).square().mean().backward()
    opt.step()
    opt.zero_grad()
"""
BLOCKS = """
import torch
from torch.utils.data import DataLoader

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)
        )

    def forward(self, x):
        return x + self.layers(x)

net = torch.nn.Sequential(*[Block() for _ in range(4)]).cuda()
opt = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95), lr=1e-4)
""" + LOOP.replace("16", "2048").replace("64", "8192")
GPT2 = """
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(n_layer=4, n_embd=256, n_head=4, attn_implementation="eager")
model = GPT2LMHeadModel(config)
model.to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model.train()
for batch in DataLoader(torch.randint(0, 50000, (64, 512)), batch_size=8):
    batch = batch.cuda()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TUTORIAL = """
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config()).to("cuda", torch.bfloat16)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for batch in DataLoader(torch.randint(0, 50000, (12, 1024)), batch_size=4):
    batch = batch.cuda()
    outputs = model(input_ids=batch, labels=batch)
    loss = outputs.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
IN_A_FUNCTION = (
    TUTORIAL.replace("for batch", "def epoch():\n  for batch").replace("\n    ", "\n      ")
    + "epoch()\n"
)
LLAMA = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

shape = {"num_attention_heads": 4, "vocab_size": 8000, "num_hidden_layers": 4}
config = LlamaConfig(hidden_size=512, intermediate_size=1376, **shape)
config.architectures = ["LlamaForCausalLM"]
config.save_pretrained("tiny")
model = AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.float32)
"""
TRAINER = (
    LLAMA
    + """
from datasets import Dataset
from transformers import Trainer, TrainingArguments

rows = Dataset.from_dict({"input_ids": [[1] * 512] * 64, "labels": [[1] * 512] * 64})
settings = {"max_steps": 4, "report_to": "none", "save_strategy": "no"}
arguments = TrainingArguments("out", per_device_train_batch_size=8, **settings)
Trainer(model, arguments, train_dataset=rows).train()
"""
)
ACCELERATE = (
    LLAMA
    + """
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
rows = DataLoader(torch.randint(0, 8000, (64, 512)), batch_size=8)
model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
model.train()
for batch in rows:
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
    optimizer.step()
    optimizer.zero_grad()
"""
)
LIGHTNING = (
    LLAMA
    + """
import pytorch_lightning
from torch.utils.data import DataLoader

class Module(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

rows = DataLoader(torch.randint(0, 8000, (64, 512)), batch_size=8)
settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = pytorch_lightning.Trainer(max_steps=6, **settings)
trainer.fit(Module(), rows)
"""
)
SFT = """
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

texts = Dataset.from_dict({"text": ["a story of some length " * 100] * 64})
settings = {"max_steps": 4, "report_to": "none", "save_strategy": "no"}
arguments = SFTConfig("out", per_device_train_batch_size=4, max_length=256, **settings)
SFTTrainer("HuggingFaceTB/SmolLM2-135M", arguments, train_dataset=texts).train()
"""
PICTURES = """
import torch
from torch.utils.data import DataLoader
from transformers import {config}, {model}

model = {model}({config}({shape})).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
labels = torch.zeros(8, dtype=torch.int64, device="cuda")
for pictures in DataLoader(torch.rand(64, 3, 224, 224), batch_size=8):
    model(pictures.cuda()).logits.logsumexp(1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RESNET = PICTURES.format(
    config="ResNetConfig",
    model="ResNetForImageClassification",
    shape="depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type='basic'",
)
VIT = PICTURES.format(
    config="ViTConfig",
    model="ViTForImageClassification",
    shape="num_hidden_layers=4, hidden_size=256, num_attention_heads=4, intermediate_size=1024",
)
TWO_GPUS = (
    """
import os, torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

torch.distributed.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
net.to("cuda")
opt = torch.optim.SGD(net.parameters(), lr=0.1)
net = DistributedDataParallel(net)
"""
    + LOOP
    + """
torch.distributed.destroy_process_group()
"""
)
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def fixed_in(folder, text, gpu="rtx-4090", launch=(), **options):
    """Find what makes a script's text fit; return what was found, and a function that runs the
    script with the lines that were named."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(text))
    quiet = {"stdout": sys.stderr, "cwd": folder}
    command = [sys.executable, *launch, str(script)]
    found = fix(command, gpu=gpu, **options, **quiet)

    def rerun(trial, steps=0):
        mended = folder / "mended.py"
        mended.write_text(written(script.read_text(), trial.remedies))
        grow = any(offer.name == "expandable-segments" for offer in trial.remedies)
        return run_program(
            [sys.executable, *launch, str(mended)],
            gpu=gpu,
            gpus=options.get("gpus", 1),
            steps=steps,
            expandable_segments=grow,
            **quiet,
        )

    return found, rerun


@pytest.fixture
def fixed(tmp_path):
    return functools.partial(fixed_in, tmp_path)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """What makes the blocks fit 850 MiB."""
    return fixed_in(tmp_path_factory.mktemp("blocks"), BLOCKS, budget_bytes=850 * MIB)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        pytest.param(ACCELERATE, {"accelerator", "loader"}, id="accelerate"),
        pytest.param(
            *(LIGHTNING, {"lightning", "loader"}), id="lightning", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_librarys_own_arguments_are_changed(run, text, kinds):
    """All other remedies of these libraries are tried at night."""
    plain, _ = run(text)
    assert plain.fits, str(plain)
    [answer] = plain.answers
    offers = [offer for offer in answer.remedies if offer.name in ("autocast", "half-rows")]
    assert kinds <= {edit.place.kind for offer in offers for edit in offer.edits}
    tried, _ = run(text, trials=orders(offers))
    mended, _ = run(written(text, offers))
    assert tried.peak_reserved_bytes == mended.peak_reserved_bytes
    assert tried.peak_reserved_bytes < 0.96 * plain.peak_reserved_bytes  # two times a fiftieth


def check_each(found, rerun):
    assert [(trial.names, trial.failure) for trial in found.alone if trial.failure] == []
    for trial in found.alone:
        assert rerun(trial).peak_reserved_bytes == trial.reserved_bytes, trial.names
    return {trial.remedies[0].name for trial in found.alone}


def test_each_remedy_takes_what_the_script_with_its_lines_takes(blocks):
    assert check_each(*blocks) == {
        "expandable-segments", "fused-optimizer", "checkpointing", "half-rows",
        "offload-activations", "step-in-backward", "autocast", "8bit-adam", "adafactor",
    }  # fmt: skip


STEPS = """
import torch
from torch.utils.data import DataLoader

def loader(rows):
    return DataLoader(torch.rand(64, 64), batch_size=rows)

def adam(net):
    return torch.optim.AdamW(net.parameters())

net, other = torch.nn.Linear(64, 64).cuda(), torch.nn.Linear(64, 64).cuda()
opt = adam(net)
{}
for batch in loader(16):
    (net(batch.cuda()) + other(batch.cuda())).mean().backward()
    {}
    opt.zero_grad()
"""


def test_what_would_train_otherwise_than_it_says_is_not_offered(run):
    def offered(before="", step="opt.step()"):
        verdict, _ = run(STEPS.format(before, step))
        return {each.name for each in verdict.answers[0].remedies}

    plain = offered()
    clipped = "torch.nn.utils.clip_grad_norm_(net.parameters(), 1); opt.step()"
    assert plain - offered(step=clipped) == {"half-rows"}
    assert plain - offered("torch.optim.lr_scheduler.StepLR(opt, 2)") == {"half-rows"}
    scaled = plain - offered(step="torch.amp.GradScaler(enabled=False).step(opt)")
    assert scaled == {"half-rows", "step-in-backward"}
    assert plain - offered("loader(8)") == {"half-rows"}  # what to write there would be both's
    two = plain - offered("second = adam(other)", "opt.step(); second.step()")
    assert two > {"half-rows", "step-in-backward", "8bit-adam"}


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # some thirty programs each
@pytest.mark.parametrize(
    ("text", "offered", "options"),
    [
        (GPT2, {"fused-attention", "chunked-loss", "checkpointing", "bf16"}, {}),
        (TRAINER, {"chunked-loss", "checkpointing", "half-rows", "autocast", "lora", "qlora"}, {}),
        (SFT, {"lora", "half-rows"}, {}),
        (RESNET, {"half-rows", "autocast", "fused-optimizer"}, {}),
        (VIT, {"checkpointing", "half-rows", "autocast"}, {}),
        (ACCELERATE, {"autocast", "half-rows", "checkpointing", "8bit-adam", "lora"}, {}),
        (LIGHTNING, {"autocast", "half-rows", "checkpointing", "8bit-adam", "lora"}, {}),
        (TWO_GPUS, {"bucket-views"}, {"launch": LAUNCH, "gpus": 2}),
    ],
    ids=["gpt2", "trainer", "sft", "resnet", "vit", "accelerate", "lightning", "ddp"],
)
def test_each_remedy_of_a_library_takes_what_the_script_with_its_lines_takes(
    fixed, text, offered, options
):
    found, rerun = fixed(text, **options)
    assert found.first.fits
    assert found.chosen is None
    assert offered <= check_each(found, rerun)


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        (TUTORIAL, BACKWARD, "outputs = None"),
        (IN_A_FUNCTION, BACKWARD, "outputs = None"),
        # What is read after backward can only be freed before the next forward pass.
        (TUTORIAL + "    print(outputs.loss)\n", PASS, "outputs = loss = None"),
    ],
    ids=["script", "function", "printed"],
)
def test_what_a_loop_keeps_of_a_pass_is_freed(run, text, kind, line):
    plain, _ = run(text)
    [offer] = [each for each in plain.answers[0].remedies if each.name == "freed-outputs"]
    assert [(e.place.kind, e.how, e.code) for e in offer.edits] == [(kind, "before", line)]
    tried, _ = run(text, trials=orders([offer]))
    mended, _ = run(written(text, [offer]))
    assert tried.peak_reserved_bytes == mended.peak_reserved_bytes
    assert tried.peak_reserved_bytes < 0.9 * plain.peak_reserved_bytes
    allocated, before = (each.answers[0].gpus[0].peak_allocated_bytes for each in (tried, plain))
    logits_bytes = 4 * 1024 * 50257 * 2
    assert (before - allocated > 0.99 * logits_bytes) == (kind == BACKWARD)
    assert "freed-outputs" not in [each.name for each in mended.answers[0].remedies]


def test_one_update_after_the_other_makes_no_temporaries_of_all_weights(run):
    text = (
        BLOCKS.replace("AdamW", "RMSprop")
        .replace("betas=(0.9, 0.95), ", "")
        .replace("2048", "64")
        .replace("8192", "256")
    )
    plain, _ = run(text)
    [offer] = [each for each in plain.answers[0].remedies if each.name == "one-by-one"]
    tried, _ = run(text, trials=orders([offer]))
    mended, _ = run(written(text, [offer]))
    assert tried.peak_reserved_bytes == mended.peak_reserved_bytes
    weights_bytes = 4 * (2 * 1024 * 4096 + 4096 + 1024) * 4
    saved_bytes = plain.answers[0].gpus[0].peak_allocated_bytes
    saved_bytes -= tried.answers[0].gpus[0].peak_allocated_bytes
    assert saved_bytes == pytest.approx(weights_bytes, rel=0.2)  # but the one that it works on
    assert tried.peak_reserved_bytes < 0.98 * plain.peak_reserved_bytes


@pytest.mark.parametrize("move", ['to("cuda")', pytest.param("cuda()", marks=pytest.mark.nightly)])
def test_weights_are_bf16_from_where_they_are_moved(run, move):
    text = GPT2.replace('to("cuda")', move)
    plain, _ = run(text, steps=3)
    [offer] = [each for each in plain.answers[0].remedies if each.name == "bf16"]
    tried, _ = run(text, trials=orders([offer]), steps=3)
    mended, _ = run(written(text, [offer]), steps=3)
    assert tried.peak_reserved_bytes == mended.peak_reserved_bytes
    assert tried.peak_reserved_bytes < 0.98 * plain.peak_reserved_bytes


def test_bf16_weights_are_not_offered_where_inputs_are_fp32(run):
    plain, _ = run(VIT, steps=3)
    names = {offer.name for offer in plain.answers[0].remedies}
    assert "checkpointing" in names
    assert "bf16" not in names


def test_what_is_chosen_is_the_mildest_that_fits_and_is_tried_on_the_gpu_itself(blocks):
    found, _ = blocks
    assert found.first.fits is False
    assert found.fits
    assert found.chosen.effect is Effect.NOTHING
    assert found.chosen.reserved_bytes == found.last.peak_reserved_bytes <= found.room_bytes
    assert "It does not fit" in str(found)
    assert "What to write" in str(found)
    saved = [1 - trial.reserved_bytes / found.plain.reserved_bytes for trial in found.helpful]
    assert min(saved) >= 0.02


@pytest.mark.nightly
def test_where_nothing_is_enough_the_smallest_is_named(fixed):
    found, _ = fixed(BLOCKS.replace("range(4)", "range(2)"), budget_bytes=40 * MIB)
    assert found.fits is False
    assert found.chosen is None
    assert "No remedy makes it fit. The smallest reserves" in found.headline()


@pytest.mark.parametrize(
    ("ends", "fits", "says"),
    [("raise ValueError('no')", None, "ValueError: no"), ("", True, "Nothing needs to be changed")],
)
def test_a_script_that_fails_or_fits_has_nothing_to_mend(fixed, ends, fits, says):
    found, _ = fixed(f"import torch\ntorch.zeros(1).cuda()\n{ends}")
    assert found.fits is fits
    assert found.chosen is None
    assert (found.plain is None) == (fits is None)
    assert says in str(found)


BLOCKS_OF_24_MIB = """
import sys, torch
blocks = int(sys.argv[sys.argv.index("--blocks") + 1])
torch.ones(blocks, 24 << 20, dtype=torch.uint8, device="cuda")
"""


def test_the_largest_value_of_an_argument_is_found(tmp_path):
    """Among large ones, and where the script fails: tests/unit/test_phantom_command.py."""
    script = tmp_path / "blocks.py"
    script.write_text(BLOCKS_OF_24_MIB)
    command = [sys.executable, str(script), "--blocks", "1"]
    quiet = {"gpu": "t4", "budget_bytes": 64 * MIB, "stdout": sys.stderr}
    [curve] = largest(command, ["blocks"], **quiet).curves
    assert {each.value: each.fits for each in curve.tried} == {1: True, 2: True, 3: False, 4: False}
    assert curve.largest == 2
    assert all(each.reserved_bytes == each.value * 24 * MIB for each in curve.tried if each.fits)


@pytest.mark.parametrize(
    ("words", "argument", "says"),
    [
        (["train.py", "--rows", "8"], "width", "no --width"),
        (["train.py", "--rows", "all"], "rows", "whole number above 0"),
        (["train.py", "--rows=0"], "rows", "whole number above 0"),
        (["train.py", "--rows"], "rows", "whole number above 0"),
    ],
)
def test_an_argument_that_cannot_be_varied_is_refused(words, argument, says):
    with pytest.raises(InputError, match=says):
        largest(words, [argument], gpu="t4")


@pytest.mark.nightly
def test_scripts_that_were_made_to_fit_take_what_their_page_says(run):
    record = json.loads(fit.RECORD.read_text(encoding="utf-8"))
    for example in fit.shown(record):
        found = record[example.file]
        before, _ = run(fit.source(example), gpu=example.gpu)
        assert before.fits is False
        after, _ = run(found["written"], gpu=example.gpu, steps=3)
        assert after.fits
        assert after.peak_reserved_bytes == found["reserved_bytes"]
