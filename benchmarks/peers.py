"""Other tools that say what training takes, asked about jobs that real GPUs ran.

    .venv/bin/python -m pip install --no-deps --target build/peers fitcheck-llm torch-kitsune
    PYTHONPATH=build/peers .venv/bin/python benchmarks/peers.py [--update]

The jobs are the 60 recipes that an H200 ran (results/h200/accuracy.json), where our own estimates
stand beside what was measured. The truth is what the GPU showed as used: reserved by PyTorch's
allocator, and the CUDA context. Each tool is asked by its own function, with the arguments that it
has, and only about jobs that these can express. A false "fits" is an answer no larger than a GPU of
the catalogue that the job does not fit: the largest of those. Answers are kept in
``benchmarks/peers.json``, so that a run that was ended goes on where it was. ``--update`` writes
the table into docs/ACCURACY.md.

Limits: some tools leave out on purpose what others count: accelerate and DeepSpeed count weights,
gradients and optimizer states, MemTracker what tensors hold. The table says so. MemTracker takes a
minute a job.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "site"))  # the table of fits
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM

from benchmarks.pages import write_between
from benchmarks.setups import GPU_RECIPES
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.training import training
from gpumem.fake_cuda.fake_tensors import GPU_DEVICE, fake_tensors
from gpumem.files import write_atomic
from gpumem.hardware import catalogue
from gpumem.models.catalogue import hub_config
from gpumem.models.config import find_config
from gpumem.units import MIB

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "peers.json"
PAGE = ROOT / "docs" / "ACCURACY.md"
PLAIN, H200 = Recipe(), catalogue.gpu("h200")


class Job(NamedTuple):
    """A job that the H200 ran: what it showed as used, and what was simulated, context included."""

    name: str
    model: str
    recipe: Recipe
    used_bytes: int
    ours_bytes: int


def jobs() -> list[Job]:
    """Return the recipes that the H200 ran."""
    record = json.loads((ROOT / "results" / "h200" / "accuracy.json").read_text())
    context_bytes = H200.context_bytes
    return [
        Job(
            name := row["setup"],
            *GPU_RECIPES[name],
            row["reserved_bytes"] + context_bytes,
            row["simulated_reserved_bytes"] + context_bytes,
        )
        for row in record["rows"]
    ]


# --- the tools ------------------------------------------------------------------------------------


def differs(recipe: Recipe, *allowed: str) -> bool:
    """Return whether a recipe uses more than plain training, ``allowed`` fields aside."""
    free = {"batch_size", "seq_len", "lora_targets", *allowed}
    fields, plain = recipe.to_dict(), PLAIN.to_dict()
    return any(fields[name] != plain[name] for name in fields.keys() - free)


def empty_model(name: str) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(find_config(name)[1])


def accelerate(job: Job) -> int | None:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    dtype = {"fp32": "float32", "amp-fp16": "float16", "amp-bf16": "bfloat16"}
    more = "precision", "attention", "checkpointing", "accumulate", "chunked_loss"
    if differs(job.recipe, *more) or job.recipe.precision not in dtype:
        return None
    total_bytes, _ = calculate_maximum_sizes(empty_model(job.model))
    return max(estimate_training_usage(total_bytes, dtype[job.recipe.precision]).values())


def deepspeed(job: Job) -> int | None:
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    more = "precision", "attention", "checkpointing", "accumulate", "chunked_loss"
    if differs(job.recipe, *more) or not job.recipe.precision.startswith("amp"):
        return None
    parameters = empty_model(job.model).num_parameters()
    return estimate_zero2_model_states_mem_needs(parameters, cpu_offload=False)[1]


def kitsune(job: Job) -> int | None:
    from kitsune import predict_memory

    if differs(job.recipe, "precision", "optimizer", "attention"):
        return None
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(job.recipe.precision)
    if dtype is None or job.recipe.optimizer not in ("adamw", "sgd"):
        return None
    return predict_memory(
        empty_model(job.model).to(dtype),
        (job.recipe.seq_len,),
        batch_size=job.recipe.batch_size,
        dtype=dtype,
        optimizer=job.recipe.optimizer,
        training=True,
    ).total_bytes


def memtracker(job: Job) -> int | None:
    from torch.distributed._tools.mem_tracker import MemTracker

    more = "precision", "optimizer", "attention", "checkpointing", "chunked_loss"
    if differs(job.recipe, *more) or "8bit" in job.recipe.optimizer:
        return None
    tracker = MemTracker()
    with fake_tensors(H200), tracker:
        steps = training(job.model, job.recipe)(GPU_DEVICE)
        next(steps)
        tracker.reset_mod_stats()
        next(steps)
    return sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())


def fitcheck(job: Job) -> int | None:
    from fitcheck import GPU_DB, ModelConfig, TrainingConfig, UnsupportedModelError
    from fitcheck import estimate as answer
    from fitcheck.config_parser import _count_params, _parse_fields

    recipe = job.recipe
    optimizers = {"adamw": "adamw", "fused-adamw": "adamw", "adamw8bit": "adam8bit", "sgd": "sgd"}
    more = "precision", "optimizer", "attention", "checkpointing", "accumulate", "lora", "quantize"
    if differs(recipe, *more) or recipe.optimizer not in optimizers:
        return None
    if recipe.precision not in ("fp32", "bf16"):
        return None
    try:
        fields = _parse_fields(hub_config(job.model) or find_config(job.model)[1].to_dict())
    except (ValueError, UnsupportedModelError):  # no gated MLP, for one
        return None
    quantized = {"nf4": "nf4", "nf4-double": "nf4", "int8": "int8"}
    asked = TrainingConfig(
        precision=recipe.precision,
        quantization=quantized.get(recipe.quantize, "none"),
        double_quant=recipe.quantize == "nf4-double",
        optimizer=optimizers[recipe.optimizer],
        batch_size=recipe.batch_size,
        seq_len=recipe.seq_len,
        lora_rank=recipe.lora,
        grad_checkpoint=recipe.checkpointing,
        flash_attn=recipe.attention != "eager",
    )
    model = ModelConfig(name=job.model, num_params=_count_params(fields), **vars(fields))
    gpu = next(spec for name, spec in GPU_DB.items() if "h200" in name.lower())
    return int(answer(model, asked, gpu).total_mib * MIB)


OURS = "labkit estimate"
TOOLS: dict[str, tuple[Callable[[Job], int | None], str]] = {
    OURS: (lambda job: job.ours_bytes, "what is reserved, and the context"),
    "fitcheck-llm": (fitcheck, "all that is used"),
    "torch-kitsune": (kitsune, "weights, gradients, states, activations"),
    "PyTorch's MemTracker": (memtracker, "what tensors hold"),
    "accelerate estimate-memory": (accelerate, "weights, gradients, states"),
    "DeepSpeed's ZeRO estimator": (deepspeed, "weights, gradients, states"),
}


# --- the table ------------------------------------------------------------------------------------


def smaller_gpu_bytes(used_bytes: int) -> int:
    """Return the memory of the largest GPU of the catalogue that has less than ``used_bytes``."""
    return max(
        (g.usable_bytes for g in catalogue.GPUS.values() if g.usable_bytes < used_bytes), default=0
    )


def table(answers: dict[str, dict[str, int | None]]) -> str:
    """Return the table: a row for each tool, errors in per cent of what was used."""
    lines = [
        "| tool | what it counts | jobs | median error | 95th percentile | worst | false “fits” |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for tool, (_, counts) in TOOLS.items():
        found = answers.get(tool, {})
        pairs = [(found.get(job.name), job.used_bytes) for job in jobs()]
        pairs = [(nbytes, used) for nbytes, used in pairs if nbytes is not None]
        if not pairs:
            continue
        errors = sorted((100 * (nbytes / used - 1) for nbytes, used in pairs), key=abs)
        middle = statistics.median(map(abs, errors))
        high = abs(errors[math.ceil(0.95 * len(errors)) - 1])
        false_fits = sum(nbytes <= smaller_gpu_bytes(used) for nbytes, used in pairs)
        cells = (tool, counts, len(pairs), *(f"{size:.1f} %" for size in (middle, high)))
        lines.append(f"| {' | '.join(map(str, cells))} | {errors[-1]:+.1f} % | {false_fits} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--update", action="store_true", help="write docs/ACCURACY.md")
    options = parser.parse_args()
    answers = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for tool in options.tools:
        kept = answers.setdefault(tool, {})
        for job in jobs():
            if job.name not in kept or tool == OURS:
                kept[job.name] = TOOLS[tool][0](job)
                write_atomic(RECORD, json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
    print(table(answers))
    if options.update:
        write_between(PAGE, "peers", table(answers))


if __name__ == "__main__":
    main()
