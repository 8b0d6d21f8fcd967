"""A technique takes the same by a recipe's field and by a remedy that is tried on its script."""

import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

import labkit as lab
from gpumem.estimation.known_techniques import KNOWN
from gpumem.estimation.script import script
from gpumem.hardware import catalogue
from phantom_gpu.fix import orders
from phantom_gpu.run_script import run_program

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]  # fifteen programs
GPU = "a100-80gb"
OWN_BATCHES = """\
for step in range(1, args.steps + 1):
    ids = rows[torch.randint(len(rows), (BATCH_SIZE,))].to(device)
"""
LOADED_BATCHES = """\
for step, ids in enumerate(torch.utils.data.DataLoader(rows, BATCH_SIZE)):
    ids = ids.to(device)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Llama's folder, with a tokenizer and no weights."""
    folder = tmp_path_factory.mktemp("model")
    shape = {"num_attention_heads": 8, "vocab_size": 16384, "num_hidden_layers": 4}
    config = LlamaConfig(hidden_size=512, intermediate_size=1376, **shape)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"[unk]": 0, "word": 1}, unk_token="[unk]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[unk]").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tried(model, tmp_path_factory):
    """Run the script of a recipe with a remedy; return what it reserves, and the remedies."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "my.txt").write_text("word " * 20_000)

    def tried(recipe, *offers):
        text = script(recipe, model=model)
        assert OWN_BATCHES in text
        (folder / "train.py").write_text(text.replace(OWN_BATCHES, LOADED_BATCHES))
        command = [sys.executable, "train.py", "my.txt"]
        report = run_program(
            command, gpu=GPU, steps=3, trials=orders(offers), cwd=folder, stdout=sys.stderr
        )
        assert report.fits, str(report)
        return report.peak_reserved_bytes, report.answers[0].remedies

    return tried


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        (
            {"attention": "eager"},
            {
                *("fused-attention", "checkpointing", "half-rows", "chunked-loss", "autocast"),
                *("step-in-backward", "offload-activations", "bf16", "8bit-adam", "adafactor"),
            },
        ),
        ({"precision": "bf16", "checkpointing": True}, {"lora", "qlora"}),
    ],
    ids=["fp32", "bf16"],
)
def test_a_technique_takes_the_same_by_recipe_and_by_remedy(model, tried, fields, known):
    recipe, gpu = lab.Recipe(batch_size=4, seq_len=512, **fields), catalogue.gpu(GPU)
    plain_bytes, offers = tried(recipe)
    assert plain_bytes == lab.estimate(model, gpu=gpu, recipe=recipe).run.reserved_bytes
    compared, wrong = set(), []
    for offer in offers:
        if offer.name not in known:
            continue
        compared.add(offer.name)
        changed = KNOWN[offer.name].added(recipe, gpu)
        expected_bytes = lab.estimate(model, gpu=gpu, recipe=changed).run.reserved_bytes
        tried_bytes, _ = tried(recipe, offer)
        if tried_bytes != expected_bytes:
            wrong.append(f"{offer.name}: {tried_bytes / expected_bytes - 1:+.2%}")
    assert compared == known
    assert wrong == []
