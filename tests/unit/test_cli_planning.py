"""labkit estimate, advise, models and gpus: exit codes, sentences, text and JSON that agree."""

import json

import pytest
from transformers import BertConfig, T5Config

import labkit as lab
from gpumem import cli
from gpumem.estimation.recipe import Recipe
from gpumem.hardware.catalogue import GPUS
from gpumem.models import catalogue
from gpumem.units import GIB, MIB
from labkit.cli import main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a tiny model, a recipe, and unusable files."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("tiny", "t5", "classifier"):
        (folder / name).mkdir()
    size = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = catalogue.config("SmolLM2-135M", **size, **heads)
    texts = {
        "tiny/config.json": config.to_json_string(),
        "t5/config.json": T5Config(num_layers=2).to_json_string(),
        "classifier/config.json": BertConfig(
            architectures=["BertForSequenceClassification"]
        ).to_json_string(),
        "recipe.json": json.dumps(Recipe(batch_size=2, seq_len=64).to_dict()),
        "field.json": '{"batch_sise": 4}',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def call(capsys, files, *arguments):
    code = main.main([argument.replace("FILES", str(files)) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("estimate", "MODEL"),
        ("estimate Lama-3.1-8B", "Did you mean 'Llama-3.1-8B'"),
        ("estimate GPT-2 --gpu t5", "Did you mean 't4'"),
        ("estimate GPT-2 --gpu 0GiB:8.9", "from 1.00 GiB to 1.00 TiB"),
        ("estimate GPT-2 --gpu 24GiB:3.5", "unknown compute capability '3.5'"),
        ("estimate GPT-2 --batch-size two", "--batch-size: invalid int value: 'two'"),
        ("estimate GPT-2 --batch-size 0", "batch_size must be from 1"),
        ("estimate GPT-2 --precision bf17", "Did you mean 'bf16'"),
        ("estimate GPT-2 --gpu t4 --precision bf16", "no bfloat16 in hardware"),
        ("estimate GPT-2 --quantize nf4", "give them LoRA adapters"),
        ("estimate GPT-2 --ofload none", "--ofload"),
        ("estimate GPT-2 --host-memory plenty", "a size such as 64GiB, not 'plenty'"),
        ("estimate FILES", "config.json"),
        ("estimate GPT-2 --recipe FILES/none.json", "No such file"),
        ("estimate GPT-2 --recipe FILES/field.json", "has no field 'batch_sise'"),
        ("estimate FILES/train.py", "`labkit phantom` runs your script"),
        ("estimate GPT-2 --users 4", "--users belongs to answering: say --serve too"),
        ("estimate GPT-2 --serve --lora 16", "--lora is for training: leave out --serve"),
        ("estimate GPT-2 --serve --exact", "--exact is for training: leave out --serve"),
        ("estimate GPT-2 --serve --gpu t4", "precision 'fp16' instead"),
        ("estimate GPT-2 --serve --gpu l4 --cache pages", "Did you mean 'paged'"),
        ("estimate GPT-2 --serve --gpu l4", "knows 1024 positions"),
        ("advise GPT-2", "--gpu"),
        ("advise GPT-2 --gpu l4 --users 4", "--users belongs to answering: say --serve too"),
        ("advise GPT-2 --gpu l4 --quantize nf4", "--quantize belongs to answering"),
        ("advise GPT-2 --gpu l4 --serve --lora", "--lora is for training: leave out --serve"),
        ("advise GPT-2 --gpu l4 --serve --write a.py", "--write is for training"),
        ("advise GPT-2 --gpu l4 --serve --users 0", "users must be from 1"),
        ("advise GPT-2 --gpu l4 --serve", "knows 1024 positions"),
        ("advise FILES/t5 --gpu l4 --serve", "no causal language model"),
        ("estimate FILES/classifier --seq-len 8", "is a 'BertForSequenceClassification'"),
        (
            "estimate FILES/tiny --gpu t4 --lora 4 --lora-targets q_proj,v_porj",
            "unknown layer in lora_targets 'v_porj'. Did you mean 'v_proj'?",
        ),
        ("advise GPT-2 --gpu t4 --gpus 0", "gpus must be from 1"),
        ("advise GPT-2 --gpu t4 --seq-len 99999", "at most 1024"),
        ("advise GPT-2 --gpu t4 --full --lora", "not allowed with"),
        ("advise GPT-2 --gpu t4 --write FILES/recipe.json", "recipe.json exists"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, files, arguments, words):
    code, out, err = call(capsys, files, *arguments.split(" "))
    [sentence] = err.splitlines()
    assert code == 2
    assert out == ""
    assert sentence.startswith("labkit: ")
    assert words in sentence


def test_answering_as_text_and_as_json(capsys, files):
    options = ["--serve", "--gpu", "1GiB:8.0", "--prompt", "500", "--new", "2", "--users", "2"]
    for cache in ("dynamic", "paged"):
        arguments = ("estimate", "FILES/tiny", *options, "--cache", cache)
        code, text, _ = call(capsys, files, *arguments)
        assert code == 0
        code, printed, _ = call(capsys, files, *arguments, "--json")
        record = json.loads(printed)
        assert code == 0
        assert record["serving"]["users"] == 2
        assert record["cache_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
        assert f"fit with 500 + 2 tokens each: {record['most_users']:,}" in text
        assert f"for 2 users: {record['longest_prompt_tokens']:,} tokens." in text
        assert "tokens a second" not in text  # nothing is known of its bandwidth
        assert record["bound_tokens_per_second"] is None


def test_advice_on_answering_as_text_and_as_json(capsys, files):
    options = ["--gpu", "1GiB:8.0", "--prompt", "500", "--new", "2", "--cache", "paged"]
    arguments = ("advise", "FILES/tiny", "--serve", *options)
    code, text, _ = call(capsys, files, *arguments, "--users", "2")
    assert code == 0
    assert "tiny on NVIDIA GPU with 1.00 GiB and compute capability 8.0: fits" in text
    code, printed, _ = call(capsys, files, *arguments, "--users", "2", "--json")
    record = json.loads(printed)
    assert code == 0
    assert record["fits"] is True
    assert record["options"] == []
    assert f"conversations of this length: {record['most_users']:,}." in text
    code, text, _ = call(capsys, files, *arguments, "--users", "300")
    assert code == 0
    assert "256 of the users at a time" in text  # vLLM takes no more in one batch
    assert "--max-num-seqs 256" in text


def test_an_estimate_as_text_and_as_json(capsys, files):
    adapted = ["--precision", "bf16", "--lora", "4", "--lora-targets", "q_proj,v_proj"]
    arguments = ["estimate", "FILES/tiny", "--gpu", "rtx-4090", "--seq-len", "64", *adapted]
    arguments += ["--checkpointing", "--host-memory", "64GiB"]
    code, out, err = call(capsys, files, *arguments, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    recipe = Recipe.from_dict(found["recipe"])
    targets = ("q_proj", "v_proj")
    assert recipe == Recipe(
        seq_len=64, precision="bf16", lora=4, checkpointing=True, lora_targets=targets
    )
    again = lab.estimate(files / "tiny", gpu="rtx-4090", recipe=recipe)
    assert found["peak_reserved_bytes"] == again.peak_reserved_bytes
    assert found["host_limit_bytes"] == 64 * GIB
    code, out, _ = call(capsys, files, *arguments)
    assert code == 0
    lines = out.splitlines()
    spare = lab.format_bytes(again.capacity_bytes - again.peak_reserved_bytes)
    assert lines[0] == f"tiny on NVIDIA GeForce RTX 4090: fits, with {spare} to spare"
    assert lines[1].strip() == str(recipe)
    for nbytes in (again.peak_reserved_bytes, again.floor_bytes, again.run.host_bytes, 64 * GIB):
        assert any(lab.format_bytes(nbytes) in line for line in lines)
    assert sum("█" in line for line in lines) >= 2
    assert max(map(len, lines)) <= 100


def test_a_gpu_that_is_not_listed(capsys, files):
    arguments = ["estimate", "GPT-2", "--seq-len", "64", "--gpu", "24GiB:8.9"]
    code, out, _ = call(capsys, files, *arguments)
    assert code == 0
    assert "GPT-2 on NVIDIA GPU with 24.0 GiB and compute capability 8.9: " in out
    assert "for CUDA itself (assumed)" in out
    code, out, _ = call(capsys, files, *arguments, "--json")
    found = json.loads(out)
    assert (found["gpu"], found["fits"]) == ("24gib:8.9", True)
    _, out, _ = call(capsys, files, *arguments[:-1], "rtx-4090", "--json")
    assert found["peak_reserved_bytes"] == json.loads(out)["peak_reserved_bytes"]


def test_what_does_not_fit_exits_1_and_names_the_request(capsys, files):
    arguments = "estimate FILES/tiny --gpu t4 --batch-size 4096 --seq-len 512 --exact"
    code, out, _ = call(capsys, files, *arguments.split())
    assert code == 1
    assert "does not fit" in out.splitlines()[0]
    assert "out of memory: asked for" in out
    assert "every layer was traced" in out


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64GiB", 64 * GIB), ("1.5 tb", 1500 * 10**9), ("512", 512), ("2Mi", 2 * MIB)],
)
def test_sizes(text, nbytes):
    assert cli.size(text) == nbytes


def test_a_recipe_from_a_file_and_a_flag_on_top(capsys, files):
    arguments = "estimate FILES/tiny --recipe FILES/recipe.json --batch-size 3 --json"
    code, out, _ = call(capsys, files, *arguments.split())
    assert code == 0
    assert json.loads(out)["recipe"] == Recipe(batch_size=3, seq_len=64).to_dict()


def test_models_and_gpus_are_listed(capsys, files):
    code, out, _ = call(capsys, files, "models")
    assert code == 0
    row = next(line for line in out.splitlines() if "Llama-3.1-8B" in line)
    assert row.split()[1:3] == ["8.03", "32"]
    assert all(name in out for name in catalogue.MODELS)
    code, out, _ = call(capsys, files, "gpus")
    assert code == 0
    row = next(line for line in out.splitlines() if line.strip().startswith("t4"))
    assert "14.6 GiB" in row
    assert "141 MiB, measured" in row
    assert row.split()[-2:] == ["7.5", "no"]
    assert all(key in out for key in GPUS)


# --- advise: the search is tested in test_advice --------------------------------------------------


def test_advice_in_text_and_as_json(capsys, files, guessed):
    code, out, err = call(capsys, files, "advise", "Llama-3.2-1B", "--gpu", "rtx-4090", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    best = found["options"][found["best"]["same"]]
    code, out, _ = call(capsys, files, "advise", "Llama-3.2-1B", "--gpu", "rtx-4090")
    assert code == 0
    assert f"The same training: {Recipe.from_dict(best['recipe'])}" in out
    assert "and 0 B of host memory, bound" in out
    assert all(sentence in out for sentence in best["costs"])
    assert f"{len(found['options'])} recipes simulated, {found['ruled_out']} ruled out" in out
    changed = found["options"][found["best"]["changed"]]
    assert all(sentence in out for sentence in changed["changes"])
    for number in found["frontier"]:
        assert str(Recipe.from_dict(found["options"][number]["recipe"])) in out


def test_nothing_fits_exits_1_and_writes_nothing(capsys, files, guessed, tmp_path):
    script = tmp_path / "train.py"
    arguments = ["advise", "Llama-3.1-8B", "--gpu", "t4", "--full", "--write", str(script)]
    code, out, err = call(capsys, files, *arguments)
    assert code == 1, err
    assert "Nothing fits. The smallest takes" in out
    assert "--gpus N tries that" in out
    assert not script.exists()


def test_the_script_is_that_of_the_best_recipe(capsys, files, guessed, tmp_path):
    script = tmp_path / "train.py"
    arguments = ["advise", "Llama-3.2-1B", "--gpu", "rtx-4090", "--lora", "--json"]
    code, out, err = call(capsys, files, *arguments, "--write", str(script))
    assert code == 0
    assert err == f"Script: {script}\n"
    best = json.loads(out)["options"][0]["recipe"]
    assert f"BATCH_SIZE, SEQ_LEN = {best['batch_size']}, {best['seq_len']}" in script.read_text()
    assert 'default="meta-llama/Llama-3.2-1B"' in script.read_text()


def test_several_gpus(capsys, files, guessed, tmp_path):
    script = tmp_path / "t.py"
    arguments = ["advise", "Llama-3.2-1B", "--gpu", "t4", "--gpus", "2", "--write", str(script)]
    code, out, err = call(capsys, files, *arguments)
    assert code == 0
    assert out.startswith("Llama-3.2-1B on 2 × NVIDIA T4")
    assert "in backward" not in out
    assert "Script:" in err
    assert "torchrun --nproc-per-node 2" in script.read_text(encoding="utf-8")
