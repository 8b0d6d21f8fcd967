"""Sixty estimates that hold a change to the engine: run it before and after, and compare.

    python benchmarks/sixty_estimates.py            # which differ from results/estimates.json
    python benchmarks/sixty_estimates.py --write    # store what is computed now

Twenty models, from 0.1B to 70B, with experts and with images; each with three of twenty recipes,
which use every technique; six GPUs. Takes five minutes of one core.

Limits: other versions of PyTorch or transformers allocate otherwise; the file says which it is of.
"""

import argparse
import json
import sys
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpumem.estimation.estimate import estimate
from gpumem.estimation.recipe import Recipe
from gpumem.inputs import InputError

FILE = Path(__file__).resolve().parent.parent / "results" / "estimates.json"
KEPT = ("peak_allocated_bytes", "peak_reserved_bytes", "floor_bytes", "by_category", "fits")
GPUS = ("t4", "l4", "rtx-4090", "a100-80gb", "h100", "h200")
SMALL = (
    "SmolLM2-135M GPT-2 Qwen2.5-0.5B Qwen3-0.6B TinyLlama-1.1B Llama-3.2-1B GPT-2-XL SmolLM2-1.7B "
    "SmolLM3-3B Llama-3.2-3B"
)
LARGE = (
    "Llama-2-7B Mistral-7B OLMo-2-7B Llama-3.1-8B Qwen3-8B Gemma-7B Mistral-Nemo-12B Llama-2-70B "
    "LLaVA-1.5-7B OLMoE-1B-7B"
)
_BF16, _LONG = {"precision": "bf16"}, {"seq_len": 2048, "checkpointing": True}
FOR_SMALL = (
    {},
    {"precision": "amp-bf16", "batch_size": 4},
    {**_BF16, **_LONG, "batch_size": 2},
    {"precision": "amp-fp16", "optimizer": "sgd"},
    {**_BF16, "optimizer": "adamw8bit", "chunked_loss": True},
    {"precision": "amp-bf16", "lora": 16},
    {**_BF16, "lora": 8, "quantize": "nf4", "checkpointing": True},
    {**_BF16, "optimizer": "adafactor", "optimizer_in_backward": True},
    {"attention": "eager", "batch_size": 2},
    {"precision": "amp-bf16", "offload": "activations"},
)
FOR_LARGE = (
    {**_BF16, "optimizer": "fused-adamw", "checkpointing": True},
    {**_BF16, **_LONG, "lora": 16, "quantize": "nf4-double"},
    {**_BF16, "accumulate": 2, "checkpointing": True},
    {**_BF16, "offload": "weights", "checkpointing": True},
    {**_BF16, "offload": "optimizer"},
    {"precision": "amp-fp16", "lora": 16, "quantize": "int8"},
    {"precision": "amp-bf16", "ranks": 8, "checkpointing": True, "seq_len": 4096},
    {**_BF16, "ranks": 4},
    {**_BF16, "optimizer": "paged-adamw8bit", "checkpointing": True, "chunked_loss": True},
    {**_BF16, "attention": "flash", "lora": 8},
)


def jobs() -> dict[str, tuple[str, str, Recipe]]:
    """Return model, GPU and recipe of each estimate, by its name."""
    found = {}
    for models, recipes, gpus in ((SMALL, FOR_SMALL, GPUS), (LARGE, FOR_LARGE, GPUS[3:])):
        for row, model in enumerate(models.split()):
            for column in range(3):
                gpu = gpus[(row + column) % len(gpus)]
                recipe = Recipe(**recipes[(3 * row + column) % len(recipes)])
                found[f"{model} on {gpu}: {recipe}"] = (model, gpu, recipe)
    return found


def computed(every: int = 1) -> dict[str, dict]:
    """Return what is kept of each estimate, or of one in ``every``, by its name."""
    found = {}
    for name, (model, gpu, recipe) in tqdm(islice(jobs().items(), 0, None, every)):
        try:
            record = estimate(model, gpu=gpu, recipe=recipe, loops=False).to_dict()
        except InputError as error:  # a T4 has no bfloat16
            found[name] = {"refused": str(error)}
        else:
            found[name] = {key: record[key] for key in KEPT}
    return found


def main() -> int:
    """Compare, or write; return 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"store them in {FILE.name}")
    made = {name: version(name) for name in ("torch", "transformers")}
    if parser.parse_args().write:
        content = {"versions": made, "estimates": computed()}
        FILE.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return 0
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    if stored["versions"] != made:
        print(f"{FILE.name} is of {stored['versions']}, this is {made}")
    differ = 0
    for name, record in computed().items():
        for key, value in record.items():
            before = stored["estimates"][name].get(key)
            if value != before:
                differ += 1
                print(f"{name}: {key} was {before}, is {value}")
    print(f"{differ} figures differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
