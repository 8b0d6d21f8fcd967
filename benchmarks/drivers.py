"""Give other people's benchmarks small data and arguments, for `benchmarks.silicon`.

    python -m phantom_gpu h100 benchmarks/drivers.py nanovlm CHECKOUT < CASES

Each function runs the code of a checkout as it is. What it sets up decides no size on the GPU:
data of the published shape with other content, weights that are not read, fewer repetitions of the
same step. CASES are rows of JSON; each one's bytes go to standard output as they come, as ``[number
among the cases, bytes or why there are none]``.
"""

import contextlib
import dataclasses
import gc
import importlib.machinery
import importlib.util
import json
import math
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

#: Tokens of Alpaca's longest row, which litgpt's training takes first: its resource table.
LONGEST_ROW = {"phi-1_5": 1044, "stablelm-base-alpha-3b": 1034}
LONGEST_ROW_OF_LLAMA, OTHER_ROWS = 1304, 300
ROWS = 10_000  # so that the longest is not drawn again beside what its first step left
#: What is the same for both sizes of Qwen3.5; these add up to the parameters that FakeGPU counted.
QWEN35 = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "dtype": "bfloat16",
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
#: https://huggingface.co/meta-llama/Llama-2-7b-hf, as transformers of 2023 reads it.
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float16",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
SIZES = {
    "Qwen3.5-0.8B": {"hidden_size": 1024, "intermediate_size": 3584},
    "Qwen3.5-2B": {"hidden_size": 2048, "intermediate_size": 6144},
}


def answer(answers: TextIO, number: int, measure: Callable[[], int]) -> None:
    """Print what a case takes, or why it has no figure; the others go on."""
    try:
        found = measure()
    except torch.OutOfMemoryError:
        found = "OOM"
    except Exception as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    print(json.dumps([number, found]), file=answers, flush=True)


def nanovlm(checkout: Path, cases: list[dict[str, Any]], answers: TextIO) -> None:
    """Run ``measure_vram.py`` with all batch sizes; it prints its figures itself.

    Pictures are grey; the model is built without the weights of its two halves.
    """
    import PIL.Image
    from models import config

    row = {"images": [PIL.Image.new("RGB", (64, 64))], "texts": [{"user": "?", "assistant": "!"}]}

    class Rows(list):
        def select(self, chosen: range) -> list:
            return self

    rows = Rows([row] * 2 * max(case["batch_size"] for case in cases))
    spec = importlib.machinery.ModuleSpec("datasets", None)
    datasets = importlib.util.module_from_spec(spec)  # the real one needs a newer hub client
    datasets.load_dataset = lambda *named, split=None: rows if split else {"train": rows}
    sys.modules["datasets"] = datasets
    config.VLMConfig = dataclasses.make_dataclass(
        "VLMConfig", [("vlm_load_backbone_weights", bool, False)], bases=(config.VLMConfig,)
    )
    sizes = " ".join(str(case["batch_size"]) for case in cases)
    sys.argv = ["measure_vram.py", "--batch_sizes", sizes]
    runpy.run_path(str(checkout / "measure_vram.py"), run_name="__main__")


def litgpt(checkout: Path, cases: list[dict[str, Any]], answers: TextIO) -> None:
    """Fine-tune with one of litgpt's scripts; each case starts with a GPU that is empty again.

    The longest row comes first, so a few steps have the peak of a thousand.
    """
    import tokenizers

    def measure(case: dict[str, Any]) -> int:
        script = importlib.import_module(f"finetune.{case['script']}")
        script.micro_batch_size = case["micro_batch_size"]
        script.gradient_accumulation_iters = script.batch_size // script.micro_batch_size
        script.max_iters, script.eval_iters, script.eval_max_new_tokens = 3, 2, 2
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / case["model"]
            folder.mkdir()
            vocabulary = tokenizers.models.WordLevel({"<s>": 0}, unk_token="<s>")
            tokenizers.Tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
            for file in ("tokenizer_config.json", "lit_config.json"):
                (folder / file).write_text("{}")
            torch.save({}, folder / "lit_model.pth")  # weights are not read
            longest = LONGEST_ROW.get(case["model"], LONGEST_ROW_OF_LLAMA)
            row, first = torch.zeros(OTHER_ROWS).long(), torch.zeros(longest).long()
            others = [{"input_ids": row, "labels": row}] * ROWS
            torch.save([{"input_ids": first, "labels": first}, *others], folder / "train.pt")
            torch.save(others, folder / "test.pt")
            quantize = {"quantize": case["quantize"]} if case["quantize"] else {}
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            script.setup(folder, folder, folder / "out", precision="bf16-true", **quantize)
        return torch.cuda.max_memory_allocated()

    torch.set_float32_matmul_precision("high")
    for number, case in enumerate(cases):
        answer(answers, number, lambda case=case: measure(case))


def fakegpu(checkout: Path, cases: list[dict[str, Any]], answers: TextIO) -> None:
    """Run a worker of FakeGPU's on a real GPU; it prints its figures itself.

    The checkpoint has the shapes of the model named and no content: a sparse file.
    """
    import transformers

    from gpumem.models.catalogue import hub_config

    (case,) = cases
    name = case["model"]
    config = QWEN35 | SIZES[name] if name in SIZES else hub_config(f"Qwen/{name}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        settings = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(settings)
        sparse_checkpoint(model, Path(folder) / "model.safetensors")
        sys.argv = [case["script"], "--mode", "real", "--model-dir", folder]
        sys.argv += ["--output", "/dev/null", *case["words"]]
        runpy.run_path(str(checkout / "verification" / case["script"]), run_name="__main__")


def optimum(checkout: Path, cases: list[dict[str, Any]], answers: TextIO) -> None:
    """Load a model, run it and let it generate, as optimum-benchmark does at that commit.

    Its steps (backends/pytorch/backend.py, benchmarks/inference/benchmark.py): the model is loaded
    on the GPU; prompts are read in ten runs and as many as take ten seconds, which are two here,
    since all are equal, and once more; then three times answers are generated. The most of the last
    run of each kind is the figure. The checkpoint is of sparse files with its two shards' tensors.
    """
    import transformers

    case = cases[0]
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_2_7B))
        settings = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(settings)
        shards = sparse_shards(model, Path(folder), 10_000_000_000)
        index = {"metadata": {}, "weight_map": shards}
        (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
        with torch.device("cuda"):
            loaded = transformers.AutoModelForCausalLM.from_pretrained
            model = loaded(folder, torch_dtype=torch.float16).eval()
    tokens = torch.ones(case["users"], case["prompt_tokens"], dtype=torch.int64, device="cuda")
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    new_tokens = dict.fromkeys(("max_new_tokens", "min_new_tokens"), case["new_tokens"])
    kept = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "num_beams": 1}
    ways = {
        "forward": lambda: model(**inputs),
        "generate": lambda: model.generate(**inputs, **new_tokens, **kept),
    }
    asked = {case["way"] for case in cases}
    for way, run in ways.items():
        if way == "generate" and way not in asked:  # the last, and the long one
            break
        for _ in range(2):
            held = run()
        torch.cuda.reset_peak_memory_stats()
        held = run()  # as there, what the run before has returned lives until this one returns
        counted = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }
        del held
        for number, case in enumerate(cases):
            if case["way"] == way:
                print(json.dumps([number, counted[case["kind"]]]), file=answers, flush=True)


def sparse_shards(model: torch.nn.Module, folder: Path, most_bytes: int) -> dict[str, str]:
    """Write a model's shapes in FP16 in shards of at most so many bytes, as transformers splits it;
    return each tensor's file."""
    shards, full_bytes = [{}], 0
    for name, tensor in model.state_dict().items():
        nbytes = 2 * tensor.numel()
        if full_bytes + nbytes > most_bytes:
            shards.append({})
            full_bytes = 0
        shards[-1][name] = tensor
        full_bytes += nbytes
    files = {}
    for number, shard in enumerate(shards):
        sparse_file(shard, "F16", folder / f"{number}.safetensors")
        files |= dict.fromkeys(shard, f"{number}.safetensors")
    return files


def sparse_checkpoint(model: torch.nn.Module, file: Path) -> None:
    """Write a model's shapes as a safetensors file in BF16 whose tensors take no space."""
    tied = getattr(model, "_tied_weights_keys", None) or {}
    left_out = tied if model.config.tie_word_embeddings else {}
    tensors = {name: each for name, each in model.state_dict().items() if name not in left_out}
    sparse_file(tensors, "BF16", file)


def sparse_file(tensors: dict[str, torch.Tensor], dtype: str, file: Path) -> None:
    """Write tensors' shapes as a safetensors file of a type of two bytes, without their content."""
    header, end_bytes = {}, 0
    for name, tensor in tensors.items():
        start_bytes, end_bytes = end_bytes, end_bytes + 2 * math.prod(tensor.shape)
        offsets = [start_bytes, end_bytes]
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": offsets}
    header["__metadata__"] = {"format": "pt"}
    head = json.dumps(header).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head)
    with file.open("r+b") as opened:
        opened.truncate(8 + len(head) + end_bytes)


if __name__ == "__main__":
    _, source, folder = sys.argv
    answers, sys.stdout = sys.stdout, sys.stderr  # the scripts print, too
    sys.path[0] = folder  # in place of this one, where other modules have the names of theirs
    with contextlib.chdir(folder):
        globals()[source](Path(folder), json.load(sys.stdin), answers)
