"""What public training scripts fetch from a hub, made in a folder under the names they ask for.

    .venv-phantom/bin/python -m phantom_gpu t4 benchmarks/offline.py FOLDER

Models have the size of the real ones, and weights that are zeros and take no room on the disk. Data
sets have the columns of the real ones, and rows of varied length.

Limits: texts are one word, over and over. Tokenizers are SmolLM2's, which has fewer tokens than the
models, and for BERT one of a few words.
"""

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpumem.models.config import find_config
from gpumem.models.pretrained import model_folder

ROWS = 256
QWEN_15 = {  # https://huggingface.co/Qwen/Qwen2.5-1.5B
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "layer_types": ["full_attention"] * 28,
}
QWEN_18 = {  # https://huggingface.co/Qwen/Qwen1.5-1.8B
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "tie_word_embeddings": False,
}
#: Name on the hub -> model of labkit's table, and what is different.
DECODERS = {
    "Qwen/Qwen2-0.5B-Instruct": ("Qwen2.5-0.5B", {}),
    "Qwen/Qwen2.5-0.5B-Instruct": ("Qwen2.5-0.5B", {}),
    "Qwen/Qwen2.5-1.5B-Instruct": ("Qwen2.5-0.5B", QWEN_15),
    "trl-lib/qwen1.5-1.8b-sft": ("Qwen2.5-0.5B", QWEN_18),
    "meta-llama/Llama-3.1-8B": ("Llama-3.1-8B", {}),
}
HOST = {"device": "cpu", "pin_memory": True}
ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
    "zero_force_ds_cpu_optimizer": False,  # with torch_adam: nothing is compiled
}
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def prepare(folder: Path) -> None:
    """Write every model and data set into ``folder``."""
    for name, (like, different) in DECODERS.items():
        _, config = find_config(like)
        config.update(different)
        _write_model(folder / name, AutoModelForCausalLM, config, torch.bfloat16)
        for file in model_folder().glob("*"):
            if "token" in file.name or file.suffix == ".jinja":
                shutil.copy(file, folder / name)
    _write_model(folder / "bert-base-cased", AutoModel, BertConfig(vocab_size=28996), torch.float32)
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word")
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    tokenizer.save_pretrained(folder / "bert-base-cased")
    for name, row in ROW_OF.items():
        _write_rows(folder / name / "train.jsonl", map(row, range(ROWS)))
        _write_rows(folder / name / "test.jsonl", map(row, range(ROWS // 8)))
    glue = folder / "nyu-mll/glue"
    _write_rows(glue / "train.jsonl", map(_pair, range(2 * ROWS)))
    _write_rows(glue / "validation.jsonl", map(_pair, range(ROWS)))
    files = "".join(f"  - split: {s}\n    path: {s}.jsonl\n" for s in ("train", "validation"))
    (glue / "README.md").write_text(
        f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n"
    )
    (folder / "zero3.json").write_text(json.dumps(ZERO3))
    (folder / "data").mkdir()
    # As many different words as WikiText-2 has.
    (folder / "data/wikitext-2.txt").write_text(" ".join(map(str, range(33_277))) + "\n")


def _write_model(folder: Path, kind: Any, config: Any, dtype: torch.dtype) -> None:
    """Write a model's config, and its weights as a file that holds nothing but its header."""
    with torch.device("meta"):
        model = kind.from_config(config)
    config.update({"architectures": [type(model).__name__], "dtype": dtype})
    config.save_pretrained(folder)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, parameter in model.named_parameters():  # each once, if it is tied to another
        start, end = end, end + parameter.numel() * dtype.itemsize
        offsets = [start, end]
        shape = list(parameter.shape)
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _text(number: int) -> str:
    """Return 16 to 600 words, as many as the row's number says."""
    return "word " * (16 + number * 97 % 585)


def _talk(*numbers: int) -> list[dict[str, str]]:
    """Return messages of a user and an assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": _text(number)} for n, number in enumerate(numbers)]


def _pair(number: int) -> dict[str, Any]:
    words = "word " * (16 + number % 25)
    return {"sentence1": words, "sentence2": words, "label": number % 2, "idx": number}


#: Name on the hub -> what makes a row of it.
ROW_OF = {
    "trl-lib/Capybara": lambda n: {"messages": _talk(n, n + 1, n + 2, n + 3)},
    "trl-lib/ultrafeedback_binarized": lambda n: {
        "chosen": _talk(n, n + 1),
        "rejected": _talk(n, n + 2),
    },
    "trl-lib/kto-mix-14k": lambda n: {
        "prompt": _talk(n),
        "completion": _talk(0, n + 1)[1:],
        "label": n % 2 == 0,
    },
    "trl-lib/ultrafeedback-prompt": lambda n: {"prompt": _talk(n)},
}


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
