"""Training scripts run as they are written, train, save, and take what their recipe takes."""

import ast
import contextlib
import gc
import json
import runpy
import shutil
import subprocess
import sys

import pytest
import torch

import labkit as lab
from gpumem.estimation import script
from gpumem.estimation.recipe import Recipe
from gpumem.inputs import InputError
from gpumem.models import catalogue
from gpumem.ranks.launch import rank_environment

SIZE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
SHAPE = {"batch_size": 2, "seq_len": 32}
RECIPES = {
    "plain": Recipe(**SHAPE),
    "fused": Recipe(optimizer="fused-adamw", precision="amp-fp16", **SHAPE),
    "bf16, checkpointing, 8-bit": Recipe(
        precision="bf16", checkpointing=True, optimizer="adamw8bit", **SHAPE
    ),
    "lora on two layers": Recipe(
        lora=4,
        lora_targets=("q_proj", "v_proj"),
        attention="eager",
        precision="amp-fp16",  # frozen weights in 16 bits, adapters in 32
        **SHAPE,
    ),
    "qlora": Recipe(lora=4, quantize="nf4-double", checkpointing=True, chunked_loss=True, **SHAPE),
    "int8 lora": Recipe(lora=4, quantize="int8", **SHAPE),
    "in backward": Recipe(optimizer_in_backward=True, optimizer="adafactor", **SHAPE),
    "chunked loss": Recipe(chunked_loss=True, optimizer="sgd", **SHAPE),
    "activations on the host": Recipe(offload="activations", accumulate=2, **SHAPE),
    "optimizer on the host": Recipe(offload="optimizer", precision="amp-fp16", **SHAPE),
    "weights on the host": Recipe(
        offload="weights", checkpointing=True, precision="amp-bf16", **SHAPE
    ),
    "amp-fp16, paged": Recipe(
        precision="amp-fp16", accumulate=2, optimizer="paged-adamw8bit", **SHAPE
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny Llama and a byte-level tokenizer, and a text."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    catalogue.model("SmolLM2-135M", **SIZE).save_pretrained(folder)
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
    path = script.write_script(tmp_path / "train.py", recipe, model="SmolLM2-135M")
    text = path.read_text(encoding="utf-8")
    assert "import labkit" not in text
    assert "from labkit" not in text
    assert max(map(len, text.splitlines())) <= 100
    functions = [node for node in ast.parse(text).body if hasattr(node, "decorator_list")]
    own = sum(node.end_lineno - node.lineno + 1 for node in functions)
    assert len(text.splitlines()) - own <= 100  # the other lines are the techniques' source
    rate = 0.05 if recipe.optimizer == "sgd" else 0.01
    out = tmp_path / "out"
    usual = [tiny.parent / "my.txt", "--model", tiny, "--steps", 4, "--lr", rate, "--out", out]
    run_script(path, monkeypatch, *usual)
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


@pytest.mark.parametrize("name", ["in backward", "lora on two layers"])
def test_a_script_takes_what_its_recipe_takes(name, tiny, tmp_path, monkeypatch):
    recipe = RECIPES[name].but(batch_size=4, seq_len=64)
    path = script.write_script(tmp_path / "train.py", recipe, model=tiny)
    gc.collect()
    with contextlib.redirect_stdout(None), lab.track(device="cpu") as tracker:
        run_script(path, monkeypatch, tiny.parent / "my.txt", "--steps", 2, "--out", tmp_path / "o")
        script_bytes = tracker.trace().peak_bytes
    run = lab.simulate(lab.training(tiny, recipe))
    assert script_bytes == pytest.approx(run.peak_bytes, rel=0.02)


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoints_run_attention_again_under_its_kernel(ranks):
    """Backward is inside the block that names the kernel, or it would take another there."""
    recipe = Recipe(attention="flash", precision="amp-bf16", checkpointing=True, ranks=ranks)
    tree = ast.parse(script.script(recipe, model="GPT-2"))
    blocks = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.With)]
    (flash,) = [block for block in blocks if "FLASH_ATTENTION" in block]
    assert "backward()" in flash


def test_a_script_says_why_it_stops(tiny, tmp_path, monkeypatch):
    """The chunked loss itself, which is labkit's own, is tested in test_training."""
    folder = shutil.copytree(tiny, tmp_path / "scaled")
    config = json.loads((folder / "config.json").read_text())
    config["logit_scale"] = 0.5  # what the chunked loss does not know
    (folder / "config.json").write_text(json.dumps(config))
    path = script.write_script(tmp_path / "train.py", RECIPES["chunked loss"], model=folder)
    with pytest.raises(SystemExit, match="cannot be computed in chunks"):
        run_script(path, monkeypatch, tiny.parent / "my.txt")
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(SystemExit, match="has 3 tokens, and one row needs 32"):
        run_script(path, monkeypatch, tmp_path / "short.txt")
    shared = script.write_script(tmp_path / "shared.py", SHARED["plain"], model=tiny)
    with pytest.raises(SystemExit, match="start it with torchrun"):
        run_script(shared, monkeypatch, tiny.parent / "my.txt")
    assert "torchrun --nproc-per-node 2" in shared.read_text(encoding="utf-8")


def test_a_script_has_only_what_its_recipe_needs():
    plain = script.script(RECIPES["plain"], model="GPT-2")
    for word in ("peft", "bitsandbytes", "checkpoint", "scaler", "autocast", "host", "ACCUMULATE"):
        assert word not in plain
    assert "BATCH_SIZE, SEQ_LEN = 2, 32" in plain


def test_an_8_bit_loop_lets_go_of_its_graph():
    """`MatMul8bitLt` keeps its input until the loss goes, which is after the next forward."""
    eight, four = (
        script.script(Recipe(lora=4, precision="bf16", quantize=kind), model="SmolLM2-135M")
        for kind in ("int8", "nf4")
    )
    _, after = eight.split(".backward()\n")
    assert after.lstrip().startswith("loss = loss.detach()")
    assert "loss.detach()" not in four


def test_where_the_weights_come_from(tiny):
    published = script.script(Recipe(), model="gpt-2")
    assert '"--model", default="openai-community/gpt2"' in published
    unpublished = script.script(Recipe(), model="SmolLM2-tiny")
    assert '"--model", required=True' in unpublished
    assert script.weights_of(tiny, "tiny") == str(tiny)
    assert script.weights_of(tiny / "config.json", "tiny") == str(tiny)
    assert script.weights_of(catalogue.config("GPT-2"), "GPT2") is None


def test_experts_are_not_adapted_and_images_have_no_script():
    text = script.script(Recipe(lora=8), model="OLMoE-1B-7B")
    assert 'target_modules=["k_proj", "o_proj", "q_proj", "v_proj"]' in text
    with pytest.raises(InputError, match="trained on images too"):
        script.script(Recipe(lora=8), model="LLaVA-1.5-7B")


def test_a_layers_name_is_text_in_the_script_never_code():
    """Folders of any name: test_hostile."""
    target = "q'], task_type=print('no'))#\\"
    tree = ast.parse(script.script(Recipe(lora=8, lora_targets=[target]), model="GPT-2"))
    assert target in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_a_file_that_exists_is_left_alone(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        script.write_script(path, Recipe(), model="GPT-2")
    assert path.read_text() == "mine"


# --- GPUs that share the model -------------------------------------------------------------------

SHARED = {
    "plain": Recipe(ranks=2, optimizer="fused-adamw", **SHAPE),
    "everything": Recipe(
        ranks=2,
        precision="amp-bf16",
        checkpointing=True,
        chunked_loss=True,
        offload="weights",
        **SHAPE,
    ),
    "lora": Recipe(ranks=2, lora=4, accumulate=2, checkpointing=True, **SHAPE),
    "sgd": Recipe(ranks=2, optimizer="sgd", attention="eager", **SHAPE),
}


def torchrun(path, folder, *arguments):
    """Return what two ranks print."""
    options = [
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={folder / 'rendezvous'}",
        "--rdzv-conf=store_type=file",
        "--rdzv-id=test",
        f"--log-dir={folder / 'logs'}",
        "--local-addr=127.0.0.1",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(path)]
    command += map(str, arguments)
    environment = rank_environment(2, "gloo")
    del environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]  # these ranks meet as torchrun has them
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_shared_script_trains_and_saves(tiny, tmp_path):
    recipe = SHARED["everything"]
    path = script.write_script(tmp_path / "train.py", recipe, model=tiny)
    assert "import labkit" not in path.read_text(encoding="utf-8")
    out = tmp_path / "out"
    usual = [tiny.parent / "my.txt", "--lr", 0.01, "--save-every", 0, "--steps", 4, "--out", out]
    found = losses(torchrun(path, tmp_path, *usual))
    assert len(found) == 4
    assert found[-1] < found[0]
    assert_loadable(out, recipe, tiny)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHARED)
def test_a_shared_script_goes_on_after_its_checkpoint(name, tiny, tmp_path):
    recipe = SHARED[name]
    path = script.write_script(tmp_path / "train.py", recipe, model=tiny)
    out = tmp_path / "out"
    usual = [tiny.parent / "my.txt", "--save-every", 2]
    whole = losses(torchrun(path, tmp_path, *usual, "--steps", 4, "--out", tmp_path / "whole"))
    assert len(whole) == 4
    torchrun(path, tmp_path / "first", *usual, "--steps", 2, "--out", out)
    again = losses(torchrun(path, tmp_path / "second", *usual, "--steps", 4, "--out", out))
    assert again == whole[2:]
