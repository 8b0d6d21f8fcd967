"""Models, tokenizers and data sets that are not on this machine, in scripts that name them."""

import os
import subprocess
import sys
import textwrap

import pytest

from phantom_gpu.run_script import run_program

SAVE = """
import sys, torch
from transformers import (
    BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, LlamaConfig,
    LlamaForCausalLM,
)
sizes = dict(hidden_size=512, num_hidden_layers=3, num_attention_heads=8, intermediate_size=1376)
models = {
    "llama": LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=4000)),
    "tied": LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=4000, tie_word_embeddings=True)),
    "gpt2": GPT2LMHeadModel(GPT2Config(n_embd=512, n_layer=3, n_head=8, vocab_size=4000)),
    "bert": BertForSequenceClassification(BertConfig(**sizes)),
}
for name, model in models.items():
    model.save_pretrained(f"converted/{name}")
    model.to(torch.bfloat16).save_pretrained(f"mapped/{name}")
    model.config.save_pretrained(f"none/{name}")
"""
LOAD = """
import gc, sys, torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers import BitsAndBytesConfig

four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
ways = [
    {"device_map": "cuda"}, {}, {"device_map": "cuda", "quantization_config": four},
    {"device_map": "cuda", "quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
]
for name in ("llama", "tied", "gpt2", "bert"):
    kind = AutoModelForSequenceClassification if name == "bert" else AutoModelForCausalLM
    for way in ways:
        model = kind.from_pretrained(f"{sys.argv[1]}/{name}", dtype=torch.bfloat16, **way)
        model = model if way else model.cuda()
        held, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        print(name, list(way), held, most, torch.cuda.memory_reserved(), model.dtype)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
"""


@pytest.fixture
def run(tmp_path, capfd, monkeypatch):
    """Run a script's text; return the verdict, what it printed, and what was said beside it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))

    def run(text, *arguments):
        (tmp_path / "train.py").write_text(textwrap.dedent(text))
        command = [sys.executable, "train.py", *arguments]
        verdict = run_program(command, gpu="a100-80gb", cwd=tmp_path)
        printed = capfd.readouterr()
        said = [line for line in printed.err.splitlines() if line.startswith("labkit: ")]
        return verdict, printed.out, said or printed.err.splitlines()[-1:]

    return run


def test_zeros_ask_the_allocator_for_what_the_files_do(run, on_phantom, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_phantom("a100-80gb", "-c", SAVE)
    (tmp_path / "load.py").write_text(LOAD)
    unchanged = on_phantom("a100-80gb", "load.py", "mapped")
    assert len(unchanged.splitlines()) == 16
    for folder, why in (("none", "not on this machine"), ("converted", "not read")):
        verdict, printed, said = run(LOAD, folder)
        assert printed == unchanged
        names = [f"{folder}/{name}" for name in ("llama", "tied", "gpt2", "bert")]
        assert verdict.answers[0].weights_not_read == names
        assert said == [f"labkit: the weights of {n} are {why}: they are zeros" for n in names]


HUB = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config

name = "meta-llama/Llama-3.2-1B-Instruct"
model = AutoModelForCausalLM.from_pretrained(name, device_map="cuda")
assert model.config.architectures == ["LlamaForCausalLM"]  # TRL asks for it
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
rows = tokenizer(["A long line of text.", "Short."], padding=True, return_tensors="pt").to("cuda")
print(len(tokenizer), tokenizer.eos_token_id, tokenizer.decode(rows["input_ids"][0]))
print(rows["attention_mask"].sum(1).tolist(), rows["input_ids"][1, 0].item())
print(model.generate(**rows, max_new_tokens=3).shape[1] - rows["input_ids"].shape[1])

T5Config(vocab_size=32128).save_pretrained("t5")  # has no token for the beginning
print(len(AutoTokenizer.from_pretrained("t5")), "of T5")
"""


def test_a_hubs_name_is_enough(run):
    verdict, printed, said = run(HUB)
    assert verdict.fits
    assert verdict.answers[0].gpus[0].made_of["weights"] == 2 * 1_235_814_400
    assert len(said) == 3
    assert "its architecture is that of labkit's table, its weights are zeros" in said[0]
    assert "the tokenizer of meta-llama/Llama-3.2-1B-Instruct is not on this machine" in said[1]
    lines = printed.splitlines()
    assert lines[0] == "128256 128001 A long line of text."
    assert lines[-2:] == ["3", "32128 of T5"]
    text = str(verdict)
    assert "of meta-llama/Llama-3.2-1B-Instruct were not read: they are zeros" in text
    assert "not of meta-llama/Llama-3.2-1B-Instruct, t5's own tokenizer" in text


GGUF = """
from transformers import AutoTokenizer
from gpumem.models.pretrained import _gguf_file

file = _gguf_file()
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
print(len(tokenizer), tokenizer.tokenize("Hello world"))
"""


def test_a_tokenizer_inside_of_a_gguf_file_is_read(run):
    _, printed, said = run(GGUF)
    assert printed == "49152 ['Hello', 'Ġworld']\n"
    assert not [line for line in said if "tokenizer" in line]


FOLDER = """
import os, torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128)
LlamaConfig(**sizes, vocab_size=1000).save_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("./model")
print(os.listdir("model"), get_last_checkpoint("model"))
row = dict.fromkeys(("input_ids", "labels"), torch.zeros(16, dtype=torch.int64))
options = TrainingArguments("model", max_steps=2, save_steps=1, report_to=[])
Trainer(model=model, args=options, train_dataset=[row] * 32).train()
Trainer(model=model, args=options, train_dataset=[row] * 32).train("model/checkpoint-1")
print(get_last_checkpoint("model"))
"""


def test_a_folder_with_a_config_gets_no_file_but_what_the_script_saves(run, tmp_path):
    verdict, printed, said = run(FOLDER)
    lines = printed.splitlines()
    assert (lines[0], lines[-1]) == ("['config.json'] None", "model/checkpoint-2")
    assert said == ["labkit: the weights of ./model are not on this machine: they are zeros"]
    assert (verdict.fits, verdict.answers[0].steps) == (True, 3)
    saved = [str(tmp_path / "model" / f"checkpoint-{step}") for step in (1, 2)]
    assert verdict.answers[0].saved_in == saved
    assert "Saved      zeros, in model/checkpoint-1 and 1 more: no run must go on" in str(verdict)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "import transformers; transformers.AutoModel.from_pretrained('some/model')",
            "some/model is not on this machine, and labkit's table has no such model: name",
        ),
        (
            "import datasets; datasets.load_dataset('some/rows')",
            "the data set some/rows is not on this machine and the hub cannot be reached: load",
        ),
    ],
)
def test_what_cannot_be_had_ends_in_a_sentence(run, text, sentence):
    verdict, _, said = run(text)
    assert verdict.fits is None
    assert sentence in said[0]


def test_scripts_without_these_libraries_do_not_import_them(run):
    _, printed, _ = run("import sys, torch; print({'transformers', 'datasets'} & {*sys.modules})")
    assert printed == "set()\n"


def test_a_program_that_nobody_watches_gets_them_too(tmp_path):
    load = (
        "import torch; from transformers import AutoModelForCausalLM as Model, AutoTokenizer; "
        "name = 'HuggingFaceTB/SmolLM2-135M'; "
        "model = Model.from_pretrained(name, dtype=torch.bfloat16, device_map='cuda'); "
        "print(len(AutoTokenizer.from_pretrained(name)), torch.cuda.memory_allocated())"
    )
    own = {"LD_PRELOAD", "LABKIT_PHANTOM"}  # of the phantom that runs this test
    clean = {name: value for name, value in os.environ.items() if name not in own}
    clean |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "LABKIT_CACHE": str(tmp_path / "c")}
    command = [sys.executable, "-m", "phantom_gpu", "t4", "-c", load]
    done = subprocess.run(command, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    vocabulary, held_bytes = map(int, done.stdout.split())
    assert vocabulary == 49_152
    assert held_bytes >= 2 * 134_515_008
    assert held_bytes < 2 * 134_515_008 + 1_000_000  # rounding, and buffers
    assert "its weights are zeros" in done.stderr
