"""Training scripts: those generated run as they stand, train, save, and take what they promise."""

import ast
import contextlib
import gc
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import labkit as lab
from labkit import models, script_parts, train_script
from labkit.memory import InputError
from labkit.ranks import rank_environment
from labkit.recipes import Recipe

SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
SHAPE = {"batch_size": 2, "seq_len": 32}
RECIPES = {
    "plain": Recipe(**SHAPE),
    "bf16, checkpointing, 8-bit": Recipe(
        precision="bf16", checkpointing=True, optimizer="adamw8bit", **SHAPE
    ),
    "paged": Recipe(optimizer="paged-adamw8bit", **SHAPE),
    "lora": Recipe(lora=4, **SHAPE),
    "lora on two layers": Recipe(lora=4, lora_targets=("q_proj", "v_proj"), **SHAPE),
    "qlora": Recipe(lora=4, quantize="nf4-double", checkpointing=True, chunked_loss=True, **SHAPE),
    "int8 lora": Recipe(lora=4, quantize="int8", **SHAPE),
    "in backward": Recipe(optimizer_in_backward=True, optimizer="adafactor", **SHAPE),
    "chunked loss": Recipe(chunked_loss=True, optimizer="sgd", **SHAPE),
    "activations on the host": Recipe(offload="activations", accumulate=2, **SHAPE),
    "optimizer on the host": Recipe(offload="optimizer", precision="amp-fp16", **SHAPE),
    "weights on the host": Recipe(
        offload="weights", checkpointing=True, precision="amp-bf16", **SHAPE
    ),
    "amp-fp16": Recipe(precision="amp-fp16", accumulate=2, **SHAPE),
    "eager": Recipe(attention="eager", **SHAPE),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny Llama and a byte-level tokenizer, and a text."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    models.model("SmolLM2-135M", **SIZE).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    text = folder.parent / "my.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    return folder


def run_script(path, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
    return runpy.run_path(str(path), run_name="__main__")


def losses(printed):
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    return [float(line.rpartition(" ")[2]) for line in lines]


@pytest.mark.parametrize("name", RECIPES)
def test_a_script_trains_and_saves(name, tiny, tmp_path, monkeypatch, capsys):
    recipe = RECIPES[name]
    path = train_script.write_script(tmp_path / "train.py", recipe, model=tiny)
    text = path.read_text(encoding="utf-8")
    assert "labkit" not in {
        alias.name.partition(".")[0]
        for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }  # fmt: skip
    rate = 0.05 if recipe.optimizer == "sgd" else 0.01
    out = tmp_path / "out"
    run_script(path, monkeypatch, tiny.parent / "my.txt", "--steps", 4, "--lr", rate, "--out", out)
    found = losses(capsys.readouterr().out)
    assert len(found) == 4
    assert found[-1] < found[0]
    assert_loadable(out, recipe, tiny)


def assert_loadable(out, recipe, tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert len(AutoTokenizer.from_pretrained(out)) == 256
    base = AutoModelForCausalLM.from_pretrained(tiny)
    if recipe.lora:
        from peft import PeftModel

        trained = PeftModel.from_pretrained(base, out)
        adapters = {n: p for n, p in trained.named_parameters() if "lora_B" in n}
        assert adapters
        assert all(p.abs().max() > 0 for p in adapters.values())  # PEFT starts them at zero
    else:
        trained = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        before = dict(base.named_parameters())
        changed = [n for n, p in trained.named_parameters() if not torch.equal(p, before[n])]
        assert len(changed) == len(before)


@pytest.mark.parametrize(
    "name", ["plain", "lora", "in backward", "chunked loss", "bf16, checkpointing, 8-bit"]
)
def test_a_script_takes_what_its_recipe_does(name, tiny, tmp_path, monkeypatch):
    recipe = RECIPES[name].but(batch_size=4, seq_len=64)
    path = train_script.write_script(tmp_path / "train.py", recipe, model=tiny)
    gc.collect()
    with contextlib.redirect_stdout(None), lab.track(device="cpu") as tracker:
        run_script(path, monkeypatch, tiny.parent / "my.txt", "--steps", 2, "--out", tmp_path / "o")
        script_bytes = tracker.trace().peak_bytes
    run = lab.simulate(recipe.experiment(tiny))
    assert script_bytes == pytest.approx(run.peak_bytes, rel=0.02)


@pytest.mark.parametrize("name", RECIPES)
def test_a_script_is_short(name):
    lines = train_script.script(RECIPES[name], model="SmolLM2-135M").splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 120


def test_a_folder_of_any_name_is_the_model(tmp_path):
    folder = tmp_path / 'мой "Modell" \U0001f600'
    folder.mkdir()
    (folder / "config.json").write_text(models.config("SmolLM2-tiny").to_json_string())
    tree = ast.parse(train_script.script(Recipe(), model=str(folder)))
    assert str(folder) in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoints_run_attention_again_under_its_kernel(ranks):
    """Backward is inside the block that names the kernel, or it would take another there."""
    recipe = Recipe(attention="flash", precision="amp-bf16", checkpointing=True, ranks=ranks)
    tree = ast.parse(train_script.script(recipe, model="GPT-2"))
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.With)
              and "FLASH_ATTENTION" in ast.unparse(node.items[0])]  # fmt: skip
    assert len(blocks) == 1
    assert "backward()" in ast.unparse(blocks[0])


def test_the_chunked_loss_of_a_model_with_a_soft_cap(tiny, tmp_path, monkeypatch, capsys):
    from transformers import AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(**SIZE, head_dim=16, final_logit_softcapping=0.5)
    folder = tmp_path / "gemma"
    model = Gemma2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= 40  # far beyond the cap
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    for name, chunked in (("whole", False), ("chunked", True)):
        path = tmp_path / f"{name}.py"
        train_script.write_script(
            path, Recipe(chunked_loss=chunked, attention="eager", **SHAPE), model=folder
        )
        out = tmp_path / name
        run_script(path, monkeypatch, tiny.parent / "my.txt", "--steps", 2, "--out", out)
    found = losses(capsys.readouterr().out)
    assert found[:2] == pytest.approx(found[2:], abs=2e-4)


def test_a_model_whose_logits_the_chunked_loss_does_not_know(tiny, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    config = models.config("SmolLM2-135M", **SIZE)
    config.logit_scale = 0.5
    folder = tmp_path / "scaled"
    models.model("SmolLM2-135M", **SIZE).save_pretrained(folder)
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    path = train_script.write_script(tmp_path / "t.py", RECIPES["chunked loss"], model=tiny)
    with pytest.raises(SystemExit, match="the chunked loss does not know"):
        run_script(path, monkeypatch, tiny.parent / "my.txt", "--model", folder)


def test_a_script_holds_only_what_its_recipe_needs():
    plain = train_script.script(RECIPES["plain"], model="GPT-2")
    for word in ("peft", "bitsandbytes", "checkpoint", "scaler", "autocast", "host", "ACCUMULATE"):
        assert word not in plain
    assert "BATCH_SIZE, SEQ_LEN = 2, 32" in plain
    assert "bitsandbytes" in train_script.script(RECIPES["paged"], model="GPT-2")


@pytest.mark.parametrize(
    ("model", "default"),
    [
        ("gpt-2", '"--model", default="openai-community/gpt2"'),
        ("SmolLM2-tiny", '"--model", required=True'),  # nobody has published its weights
    ],
)
def test_where_the_weights_come_from(model, default):
    assert default in train_script.script(Recipe(), model=model)


def test_a_folder_is_its_own_weights(tiny):
    assert script_parts.weights_of(tiny) == str(tiny)
    assert script_parts.weights_of(tiny / "config.json") == str(tiny)
    assert script_parts.weights_of(models.config("GPT-2")) is None


def test_a_folder_with_a_strange_name(tiny, tmp_path):
    """A name is text in the script, never code."""
    odd = tmp_path / 'a"""b\\ \'); import os #'
    odd.mkdir()
    (odd / "config.json").write_text((tiny / "config.json").read_text())
    tree = ast.parse(train_script.script(Recipe(), model=odd))
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert str(odd) in constants
    assert not any(isinstance(n, ast.Import) and n.names[0].name == "os" for n in ast.walk(tree))


def test_a_file_that_exists_is_left_alone(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("mine")
    with pytest.raises(InputError, match=r"train\.py exists"):
        train_script.write_script(path, Recipe(), model="GPT-2")
    assert path.read_text() == "mine"
    with pytest.raises(InputError, match="cannot be written"):
        train_script.write_script(tmp_path / "no" / "x.py", Recipe(), model="GPT-2")


def test_a_text_that_is_too_short(tiny, tmp_path, monkeypatch):
    path = train_script.write_script(tmp_path / "train.py", RECIPES["plain"], model=tiny)
    Path(tmp_path / "short.txt").write_text("abc")
    with pytest.raises(SystemExit, match="has 3 tokens, and one row needs 32"):
        run_script(path, monkeypatch, tmp_path / "short.txt")


def test_names_of_layers_stay_names(tiny, tmp_path):
    """A recipe may come from anybody's JSON: a target that holds quotes is a text, not code."""
    target = "q'], task_type=print('no'))#\\"
    recipe = Recipe.from_dict({"lora": 8, "lora_targets": [target], **SHAPE})
    tree = ast.parse(train_script.script(recipe, model=tiny))
    assert target in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


# --- GPUs that share the model -------------------------------------------------------------------

SHARED = {
    "plain": Recipe(ranks=2, **SHAPE),
    "all savers": Recipe(
        ranks=2, precision="amp-bf16", checkpointing=True, chunked_loss=True, offload="weights",
        **SHAPE,
    ),
    "lora": Recipe(ranks=2, lora=4, accumulate=2, checkpointing=True, **SHAPE),
    "sgd": Recipe(ranks=2, optimizer="sgd", attention="eager", **SHAPE),
}  # fmt: skip


def start(path, folder, *arguments, nodes=1, port=0):
    """Two ranks, on one "machine" or on as many, which then meet at a port of this one."""
    where = f"127.0.0.1:{port}" if port else str(folder / "rendezvous")
    store = [] if port else ["--rdzv-conf=store_type=file"]
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}",
        f"--nproc-per-node={2 // nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={where}", *store,
        "--rdzv-id=test", f"--log-dir={folder / 'logs'}", "--local-addr=127.0.0.1", str(path),
    ]  # fmt: skip
    environment = rank_environment(2, "gloo")
    del environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]  # these ranks meet as torchrun has them
    return [
        subprocess.Popen([*command, *map(str, arguments)], env=environment, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(nodes)
    ]  # fmt: skip


def torchrun(path, folder, *arguments, **where):
    """What two ranks printed until their end."""
    started = start(path, folder, *arguments, **where)
    printed = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(printed)
    return "".join(printed)


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_script_trains_saves_and_goes_on(name, tiny, tmp_path):
    recipe = SHARED[name]
    path = train_script.write_script(tmp_path / "train.py", recipe, model=tiny)
    assert "labkit" not in path.read_text(encoding="utf-8").replace("Memory Lab's labkit", "")
    rate = 0.05 if recipe.optimizer == "sgd" else 0.01
    out = tmp_path / "out"
    usual = [tiny.parent / "my.txt", "--lr", rate, "--save-every", 2]
    whole = losses(torchrun(path, tmp_path, *usual, "--steps", 4, "--out", tmp_path / "whole"))
    assert len(whole) == 4
    assert whole[-1] < whole[0]
    torchrun(path, tmp_path / "first", *usual, "--steps", 2, "--out", out)
    again = losses(torchrun(path, tmp_path / "second", *usual, "--steps", 4, "--out", out))
    assert again == whole[2:]
    assert_loadable(out, recipe, tiny)


def test_a_killed_run_goes_on(tiny, tmp_path):
    path = train_script.write_script(tmp_path / "train.py", SHARED["plain"], model=tiny)
    out = tmp_path / "out"
    usual = [tiny.parent / "my.txt", "--save-every", 2, "--out", out]
    (process,) = start(path, tmp_path / "first", *usual, "--steps", 10_000)
    while not (out / "step-4" / ".metadata").exists():
        assert process.poll() is None
        time.sleep(0.05)
    psutil.Process(process.pid).children()[0].kill()
    printed, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "exitcode  : -9" in printed
    done = max(int(p.parent.name[5:]) for p in out.glob("step-*/.metadata"))
    again = torchrun(path, tmp_path / "second", *usual, "--steps", done + 2)
    steps = [line.partition(":")[0] for line in again.splitlines() if line.startswith("step ")]
    assert steps == [f"step {done + 1}", f"step {done + 2}"]


def test_two_machines(tiny, tmp_path):
    """Two of torchrun's agents, which find each other by address, as on a cluster."""
    path = train_script.write_script(tmp_path / "train.py", SHARED["plain"], model=tiny)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    usual = [tiny.parent / "my.txt", "--lr", 0.01, "--steps", 4, "--save-every", 0]
    one = losses(torchrun(path, tmp_path, *usual, "--out", tmp_path / "one"))
    two = losses(torchrun(path, tmp_path, *usual, "--out", tmp_path / "two", nodes=2, port=port))
    assert two == one


def test_a_shared_script_says_how_it_is_started(tiny, tmp_path):
    path = train_script.write_script(tmp_path / "train.py", SHARED["plain"], model=tiny)
    done = subprocess.run(
        [sys.executable, str(path), str(tiny.parent / "my.txt")], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "start it with torchrun" in done.stderr
    assert "torchrun --nproc-per-node 2" in path.read_text(encoding="utf-8")
