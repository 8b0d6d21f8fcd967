"""labkit estimate and labkit advise: exit codes, sentences, text and JSON that agree."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import labkit as lab
from labkit import candidates, cli, models, recipe_search
from labkit.memory import GIB, MIB, Mark, Trace
from labkit.recipes import Recipe

OWN = """
import torch
print("noise from the user's file")

def works(device, width=64, kind="plain"):
    print("noise from the step")
    layer = torch.nn.Linear(width, width, device=device)
    while True:
        loss = layer(torch.ones(4, width, device=device)).sum()
        loss.backward()
        yield loss

def raises(device):
    raise KeyError("no\\nsuch key")
    yield

def leaves(device):
    raise SystemExit(3)
    yield

def plain(device):
    return 1

number = 3
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a tiny model, a user's file, and files that are none of it."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "tiny").mkdir()
    config = models.config("SmolLM2-135M", hidden_size=64, intermediate_size=96, vocab_size=512,
                           num_attention_heads=4, num_key_value_heads=2, layers=2)  # fmt: skip
    (folder / "tiny" / "config.json").write_text(config.to_json_string())
    (folder / "own.py").write_text(OWN)
    (folder / "broken.py").write_text("import no_such_module_anywhere")
    (folder / "leaves.py").write_text("import sys; sys.exit('bye')")
    (folder / "syntax.py").write_text("def f(:")
    (folder / "recipe.json").write_text(json.dumps(Recipe(batch_size=2, seq_len=64).to_dict()))
    (folder / "list.json").write_text("[1]")
    (folder / "broken.json").write_text('{"batch_size": ')
    (folder / "deep.json").write_text("[" * 50_000)
    (folder / "digits.json").write_text('{"batch_size": ' + "9" * 5000 + "}")
    (folder / "field.json").write_text('{"batch_sise": 4}')
    (folder / "binary.json").write_bytes(b"\xff\xfe\x00")
    (folder / "large.json").write_text(" " * (1 << 17))
    return folder


def call(capsys, files, *arguments):
    code = cli.main([argument.replace("FILES", str(files)) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["estimate"], "MODEL"),
        (["estimate", "Lama-3.1-8B"], "Did you mean 'Llama-3.1-8B'"),
        (["estimate", "GPT-2", "--gpu", "t5"], "Did you mean 't4'"),
        (["estimate", "GPT-2", "--batch-size", "two"], "a whole number of at least 1, not 'two'"),
        (["estimate", "GPT-2", "--batch-size", "9" * 5000], "--batch-size"),
        (["estimate", "GPT-2", "--batch-size", "0"], "batch_size must be from 1"),
        (["estimate", "GPT-2", "--precision", "fp16"], "fp16 weights cannot be trained"),
        (["estimate", "GPT-2", "--precision", "bf17"], "Did you mean 'bf16'"),
        (["estimate", "GPT-2", "--precision", "bf16"], "no bfloat16 in hardware"),  # a T4
        (["estimate", "GPT-2", "--quantize", "nf4"], "give them LoRA adapters"),
        (["estimate", "GPT-2", "--lora-targets", "c_attn"], "say the adapters' rank"),
        (["estimate", "GPT-2", "--lora", "8", "--lora-targets", ","], "must hold names"),
        (["estimate", "GPT-2", "--ofload", "none"], "--ofload"),
        (["estimate", "GPT-2", "-p", "width", "8"], "parameters are for an experiment"),
        (["estimate", "FILES"], "config.json"),
        (["estimate", ""], "say which model"),
        (["estimate", "GPT-2", "--recipe", "FILES/none.json"], "there is no file"),
        (["estimate", "GPT-2", "--recipe", "FILES/list.json"], "must be an object"),
        (["estimate", "GPT-2", "--recipe", "FILES/broken.json"], "is not valid JSON"),
        (["estimate", "GPT-2", "--recipe", "FILES/deep.json"], "is not valid JSON"),
        (["estimate", "GPT-2", "--recipe", "FILES/digits.json"], "is not valid JSON"),
        (["estimate", "GPT-2", "--recipe", "FILES/binary.json"], "is not valid JSON"),
        (["estimate", "GPT-2", "--recipe", "FILES/large.json"], "that is no recipe"),
        (["estimate", "GPT-2", "--recipe", "FILES/field.json"], "has no field 'batch_sise'"),
        (["estimate", "FILES/own.py"], "own.py:NAME"),
        (["estimate", "FILES/own.py:nothing"], "has no function 'nothing'"),
        (["estimate", "FILES/own.py:number"], "has no function 'number'"),
        (["estimate", "FILES/own.py:plain"], "a generator function"),
        (["estimate", "FILES/own.py:raises"], "cannot be simulated: KeyError"),
        (["estimate", "FILES/own.py:leaves"], "cannot be simulated: SystemExit: 3"),
        (["estimate", "FILES/own.py:works", "-p", "wdith", "8"], "Did you mean 'width'"),
        (["estimate", "FILES/own.py:works", "-p", "width", "wide"], "cannot be simulated"),
        (["estimate", "FILES/own.py:works", "--lora", "8"], "-p NAME VALUE"),
        (["estimate", "FILES/own.py:works", "--recipe", "FILES/recipe.json"], "-p NAME VALUE"),
        (["estimate", "FILES/none.py:works"], "there is no file"),
        (["estimate", "FILES/broken.py:f"], "no_such_module_anywhere"),
        (["estimate", "FILES/leaves.py:f"], "SystemExit: bye"),
        (["estimate", "FILES/syntax.py:f"], "SyntaxError"),
        (["advise", "GPT-2"], "--gpu"),
        (["advise", "GPT-2", "--gpu", "t5"], "Did you mean 't4'"),
        (["advise", "GPT-2", "--gpu", "t4", "--gpus", "0"], "gpus must be from 1"),
        (["advise", "GPT-2", "--gpu", "t4", "--gpus", "many"], "a whole number of at least 1"),
        (["advise", "GPT-2", "--gpu", "t4", "--seq-len", "99999"], "at most 1024"),
        (["advise", "GPT-2", "--gpu", "t4", "--full", "--lora"], "not allowed with"),
        (["advise", "FILES/own.py:works", "--gpu", "t4"], "own.py:works"),
        (["advise", "GPT-2", "--gpu", "t4", "--write", "FILES/own.py"], "own.py exists"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, files, arguments, words):
    code, out, err = call(capsys, files, *arguments)
    last = err.rstrip("\n").splitlines()[-1]
    assert code == 2
    assert out == ""
    assert last.startswith("labkit: ")
    assert words in last
    assert "Traceback" not in err
    assert set(err.splitlines()) - {last} <= {
        "noise from the user's file", "noise from the step"
    }  # fmt: skip


def test_an_estimate_in_text_and_as_json(capsys, files):
    arguments = ["estimate", "FILES/tiny", "--gpu", "rtx-4090", "--seq-len", "64",
                 "--precision", "bf16", "--lora", "4", "--lora-targets", "q_proj,v_proj",
                 "--checkpointing"]  # fmt: skip
    code, out, err = call(capsys, files, *arguments, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    recipe = Recipe.from_dict(found["recipe"])
    assert recipe == Recipe(seq_len=64, precision="bf16", lora=4, checkpointing=True,
                            lora_targets=("q_proj", "v_proj"))  # fmt: skip
    again = lab.estimate(files / "tiny", gpu="rtx-4090", recipe=recipe)
    assert found["peak_reserved_bytes"] == again.peak_reserved_bytes
    code, out, _ = call(capsys, files, *arguments)
    assert code == 0
    lines = out.splitlines()
    spare = lab.format_bytes(again.capacity_bytes - again.peak_reserved_bytes)
    assert lines[0] == f"tiny on NVIDIA GeForce RTX 4090: fits, with {spare} to spare"
    assert lines[1].strip() == str(recipe)
    for nbytes in (again.peak_reserved_bytes, again.floor_bytes, again.context_bytes):
        assert any(lab.format_bytes(nbytes) in line for line in lines)
    assert sum("█" in line for line in lines) >= 2
    assert max(map(len, lines)) <= 100


def test_what_does_not_fit_exits_1_and_names_the_request(capsys, files):
    arguments = ["estimate", "FILES/tiny", "--batch-size", "4096", "--seq-len", "512", "--exact"]
    code, out, _ = call(capsys, files, *arguments)
    assert code == 1
    assert "does not fit" in out.splitlines()[0]
    assert "out of memory: asked for" in out
    assert "every layer was traced" in out


def test_a_recipe_from_a_file_and_a_flag_on_top(capsys, files):
    code, out, _ = call(capsys, files, "estimate", "FILES/tiny", "--recipe", "FILES/recipe.json",
                        "--batch-size", "3", "--json")  # fmt: skip
    assert code == 0
    assert json.loads(out)["recipe"] == Recipe(batch_size=3, seq_len=64).to_dict()


def test_an_experiment_of_the_users_own(capsys, files):
    code, out, err = call(capsys, files, "estimate", "FILES/own.py:works", "-p", "width", "256",
                          "-p", "kind", "8 bits", "--json")  # fmt: skip
    found = json.loads(out)  # nothing else was printed there
    assert code == 0
    assert "noise from the user's file" in err
    assert found["recipe"] is None
    assert found["parameters"] == {"width": 256, "kind": "8 bits"}
    assert found["by_category"]["weights"] == 4 * (256 * 256 + 256)


@pytest.mark.parametrize("command", ["estimate", "advise"])
def test_help_says_the_exit_codes(capsys, command):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert "0 if it fits, 1 if it does not, 2 for bad input" in capsys.readouterr().out


# --- advise: the search is tested in test_advice --------------------------------------------------


@pytest.fixture
def guessed(monkeypatch):
    """Estimates by a formula instead of simulations."""

    def estimate(config, *, gpu, recipe):
        least = candidates.least_bytes(recipe, candidates.sizes_of(config))
        needed = least + 100 * MIB * recipe.batch_size
        run = SimpleNamespace(trace=Trace("cpu:0", (), (), (Mark(0, "step 1"),)))
        return SimpleNamespace(
            peak_reserved_bytes=needed, host_bytes=GIB, flops=10**12 * recipe.tokens,
            moved_bytes=10**9, sent_bytes=0, fits=needed <= gpu.budget_bytes, run=run,
        )  # fmt: skip

    monkeypatch.setattr(recipe_search, "estimate", estimate)


def test_advice_in_text_and_as_json(capsys, files, guessed):
    code, out, err = call(capsys, files, "advise", "Llama-3.2-1B", "--gpu", "rtx-4090", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    best = found["options"][found["best"]["same"]]
    code, out, _ = call(capsys, files, "advise", "Llama-3.2-1B", "--gpu", "rtx-4090")
    assert code == 0
    assert f"The same training: {Recipe.from_dict(best['recipe'])}" in out
    assert all(sentence in out for sentence in best["costs"])
    assert f"{len(found['options'])} recipes simulated, {found['ruled_out']} ruled out" in out
    changed = found["options"][found["best"]["changed"]]
    assert all(sentence in out for sentence in changed["changes"])
    for number in found["frontier"]:
        assert str(Recipe.from_dict(found["options"][number]["recipe"])) in out


def test_nothing_fits_exits_1_and_writes_nothing(capsys, files, guessed, tmp_path):
    script = tmp_path / "train.py"
    code, out, _ = call(capsys, files, "advise", "Llama-3.1-8B", "--gpu", "t4", "--full",
                        "--write", str(script))  # fmt: skip
    assert code == 1
    assert "Nothing fits. The smallest takes" in out
    assert "--gpus N tries that, too" in out
    assert not script.exists()


def test_the_script_is_that_of_the_best_recipe(capsys, files, guessed, tmp_path):
    script = tmp_path / "train.py"
    code, out, err = call(capsys, files, "advise", "Llama-3.2-1B", "--gpu", "rtx-4090", "--lora",
                          "--json", "--write", str(script))  # fmt: skip
    assert code == 0
    assert err == f"Script: {script}\n"
    best = json.loads(out)["options"][0]["recipe"]
    assert f"BATCH_SIZE, SEQ_LEN = {best['batch_size']}, {best['seq_len']}" in script.read_text()
    assert 'default="meta-llama/Llama-3.2-1B"' in script.read_text()


def test_several_cards(capsys, files, guessed, tmp_path):
    code, out, _ = call(capsys, files, "advise", "Llama-3.2-1B", "--gpu", "t4", "--gpus", "2")
    assert code == 0
    assert out.startswith("Llama-3.2-1B on 2 × NVIDIA T4")
    assert "in backward" not in out
    code, _, err = call(capsys, files, "advise", "Llama-3.2-1B", "--gpu", "t4", "--gpus", "2",
                        "--write", str(tmp_path / "t.py"))  # fmt: skip
    assert code == 0
    assert "Script:" in err
    assert "torchrun --nproc-per-node 2" in (tmp_path / "t.py").read_text(encoding="utf-8")


def test_text_of_a_recipe_holds_no_path(files):
    """What is shown is the model's name: a folder's, without its parents."""
    assert Path(files).name not in str(lab.estimate(files / "tiny", seq_len=8).model)
