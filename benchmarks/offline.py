"""What public training scripts fetch, made in a folder under the names that they ask for.

    .venv-scripts/bin/python -m phantom_gpu t4 benchmarks/offline.py FOLDER

Models have the size of the real ones, and weights that are zeros and take no room on the disk. Data
sets have the columns of the real ones, and rows of varied length; `small_data` makes the others.

Limits: texts are one word, over and over. Tokenizers are SmolLM2's, which has fewer tokens than the
models, for BERT one of a few words, and for Whisper the phantom's own.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import small_data
import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from litgpt import GPT, Config
from litgpt.utils import save_config
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSpeechSeq2Seq,
    BertConfig,
    BertTokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    WhisperConfig,
    WhisperFeatureExtractor,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpumem.models.config import find_config
from gpumem.models.pretrained import model_folder
from phantom_gpu.tokenizer_stand_in import stand_in

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
    "gpt2": ("GPT-2", {}),
    "Qwen/Qwen2-0.5B-Instruct": ("Qwen2.5-0.5B", {}),
    "Qwen/Qwen2.5-0.5B-Instruct": ("Qwen2.5-0.5B", {}),
    "Qwen/Qwen2.5-1.5B-Instruct": ("Qwen2.5-0.5B", QWEN_15),
    "trl-lib/qwen1.5-1.8b-sft": ("Qwen2.5-0.5B", QWEN_18),
    "meta-llama/Llama-3.1-8B": ("Llama-3.1-8B", {}),
}
WHISPER_SMALL = {  # https://huggingface.co/openai/whisper-small
    "d_model": 768,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
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


#: https://huggingface.co/stable-diffusion-v1-5/stable-diffusion-v1-5, by part.
AUTOENCODER = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 512,
}
#: Rows that a script selects of its data set.
NLI_ROWS = {"train": 10_000, "dev": 1_000}
STSB = ("train", "validation", "test")
TEXT_ENCODER = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def prepare(folder: Path) -> None:
    """Write every model and data set into ``folder``."""
    small_data.write(folder)
    _stable_diffusion(folder / "stable-diffusion-v1-5", folder / "stabilityai/sd-vae-ft-ema")
    _pythia(folder / "pythia-160m")
    for name, (like, different) in DECODERS.items():
        _, config = find_config(like)
        config.update(different)
        _write_model(folder / name, AutoModelForCausalLM, config, torch.bfloat16)
        for file in model_folder().glob("*"):
            if "token" in file.name or file.suffix == ".jinja":
                shutil.copy(file, folder / name)
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word")
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    for name, ids in {"bert-base-cased": 28996, "bert-base-uncased": 30522}.items():
        _write_model(folder / name, AutoModel, BertConfig(vocab_size=ids), torch.float32)
        tokenizer.save_pretrained(folder / name)
    # A script takes a folder of its name for a checkpoint, so it lies in the hub's cache.
    cached = folder / "hub/models--facebook--wav2vec2-base"
    speech = cached / "snapshots/0"
    _write_model(speech, AutoModel, Wav2Vec2Config(), torch.float32)
    Wav2Vec2FeatureExtractor().save_pretrained(speech)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0")
    whisper, config = folder / "openai/whisper-small", WhisperConfig(**WHISPER_SMALL)
    _write_model(whisper, AutoModelForSpeechSeq2Seq, config, torch.float32)
    WhisperFeatureExtractor().save_pretrained(whisper)
    stand_in(str(whisper)).save_pretrained(whisper)
    for name, row in ROW_OF.items():
        small_data.rows(folder / name / "train.jsonl", map(row, range(ROWS)))
        small_data.rows(folder / name / "test.jsonl", map(row, range(ROWS // 8)))
    _data_set(folder / "nyu-mll/glue", "mrpc", {"train": 512, "validation": 256}, _pair)
    _data_set(folder / "sentence-transformers/all-nli", "triplet", NLI_ROWS, _triplet)
    _data_set(folder / "sentence-transformers/stsb", "default", dict.fromkeys(STSB, 64), _scored)
    (folder / "instructions.json").write_text(json.dumps([_instruction(n) for n in range(ROWS)]))
    (folder / "zero3.json").write_text(json.dumps(ZERO3))
    # As many different words as WikiText-2 has.
    (folder / "data/wikitext-2.txt").write_text(" ".join(map(str, range(33_277))) + "\n")


def _write_model(folder: Path, kind: Any, config: Any, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = kind.from_config(config)
    config.update({"architectures": [type(model).__name__], "dtype": dtype})
    config.save_pretrained(folder)
    _write_zeros(folder / "model.safetensors", model, dtype)


def _stable_diffusion(folder: Path, autoencoder_alone: Path) -> None:
    """Write Stable Diffusion 1.5 as diffusers has it, with a tokenizer of letters."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
        autoencoder = AutoencoderKL(**AUTOENCODER)
        text_encoder = CLIPTextModel(CLIPTextConfig(**TEXT_ENCODER))
    parts = {folder / "unet": unet, folder / "vae": autoencoder, autoencoder_alone: autoencoder}
    for place, part in parts.items():
        part.save_config(place)
        name = "diffusion_pytorch_model.safetensors"
        _write_zeros(place / name, part, torch.float32)
    text_encoder.config.save_pretrained(folder / "text_encoder")
    _write_zeros(folder / "text_encoder/model.safetensors", text_encoder, torch.float32)
    DDPMScheduler(**SCHEDULE).save_pretrained(folder / "scheduler")
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (tokenizer / "vocab.json").write_text(json.dumps({w: n for n, w in enumerate(words)}))
    (tokenizer / "merges.txt").write_text("#version: 0.2\n")
    names = {"pad_token": words[-1], "tokenizer_class": "CLIPTokenizer", "model_max_length": 77}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(names))


def _pythia(folder: Path) -> None:
    """Write a checkpoint of litgpt's: one zero for each tensor, in its shape."""
    config = Config.from_name(folder.name)
    with torch.device("meta"):
        model = GPT(config)
    folder.mkdir()
    state = {n: torch.zeros(1).expand(each.shape) for n, each in model.state_dict().items()}
    torch.save(state, folder / "lit_model.pth")
    save_config(config, folder)
    for file in model_folder().glob("token*"):
        shutil.copy(file, folder)


def _write_zeros(path: Path, model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Write a model's weights as a file that holds nothing but its header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, parameter in model.named_parameters():  # each once, if it is tied to another
        start, end = end, end + parameter.numel() * dtype.itemsize
        offsets = [start, end]
        shape = list(parameter.shape)
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _data_set(
    folder: Path, name: str, counts: dict[str, int], row: Callable[[int], dict[str, Any]]
) -> None:
    """Write a data set of the hub with one configuration, ``counts`` rows of each part."""
    for split, count in counts.items():
        small_data.rows(folder / f"{split}.jsonl", map(row, range(count)))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in counts)
    config = f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(config)


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


def _triplet(number: int) -> dict[str, str]:
    return {name: f"{name} {number}" for name in ("anchor", "positive", "negative")}


def _scored(number: int) -> dict[str, Any]:
    return {"sentence1": f"one {number}", "sentence2": f"two {number}", "score": number % 10 / 10}


def _instruction(number: int) -> dict[str, str]:
    return {"instruction": _text(number), "input": "", "output": _text(number + 1)}


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
