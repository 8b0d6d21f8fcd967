"""What others measured of ``generate`` on real GPUs, beside `gpumem.serve` and other tools.

    .venv/bin/python -m pip install --no-deps --target build/peers fitcheck-llm torch-kitsune hf-mem
    PYTHONPATH=build/peers .venv/bin/python benchmarks/answering.py [--update]

The rule of choice: a published run of transformers' ``generate`` with GPU, model, users, tokens and
precision, and what PyTorch's allocator counted; weights in 16 bits or of bitsandbytes, and no
``torch.compile``. All that were found are here. Each tool is asked by its own
function. The truth is what PyTorch reserved at most during ``generate``, since that must fit; where
only allocated memory was published, it is that.

``--update`` writes the answers into ``benchmarks/answering.json`` and the table into
docs/ACCURACY.md.

Limits: `gpumem.serve` follows the transformers that is installed, with the allocator's rules of
PyTorch 2.10 for older releases. transformers of 2023 held the caches of two passes at once; its
rows are marked. `benchmarks.silicon` runs that release on a phantom. OctoCoder's prompt has some 24
tokens; ten more or less move its rows by less than 0.01 %.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, GPTBigCodeConfig, PreTrainedConfig

import gpumem
from benchmarks.pages import write_between
from gpumem.files import write_atomic
from gpumem.hardware import catalogue
from gpumem.models.catalogue import hub_config
from gpumem.models.config import find_config
from gpumem.units import GIB, MIB

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "benchmarks" / "answering.json"
PAGE = ROOT / "docs" / "ACCURACY.md"
MB = 10**6
OPTIMUM = "[optimum-benchmark](https://github.com/huggingface/optimum-benchmark/tree/6a25a6db)"
LIU = (
    "[DerekLiu35](https://github.com/DerekLiu35/huggingface-quantization-benchmarking-code"
    "/tree/7adbd49)"
)
FAKEGPU = "[FakeGPU](https://github.com/FanBB2333/FakeGPU/tree/7d5cf83)"
GUIDE = "[transformers' guide](https://huggingface.co/docs/transformers/llm_tutorial_optimization)"
#: https://huggingface.co/bigcode/octocoder
OCTOCODER = {
    "vocab_size": 49152,
    "n_positions": 8192,
    "n_embd": 6144,
    "n_layer": 40,
    "n_head": 48,
    "n_inner": 24576,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class Run(NamedTuple):
    """A published run: what ``generate`` took on a real GPU.

    Attributes:
        source: who published it, as a link.
        versions: of PyTorch and transformers.
        gpu: of the catalogue.
        old_cache: whether transformers held two passes' caches at once.
        allocated_bytes, reserved_bytes: the most during ``generate``; None where not published.
    """

    source: str
    versions: str
    gpu: str
    model: str
    precision: str
    users: int
    prompt_tokens: int
    new_tokens: int
    allocated_bytes: int
    reserved_bytes: int | None
    old_cache: bool = False
    quantize: str | None = None

    @property
    def name(self) -> str:
        tokens = f"{self.users} × {self.prompt_tokens} + {self.new_tokens}"
        stored = self.quantize or self.precision
        return f"{self.model}, {stored}, {tokens}, {catalogue.gpu(self.gpu).name}"

    @property
    def config(self) -> PreTrainedConfig:
        if self.model == "OctoCoder":
            return GPTBigCodeConfig(**OCTOCODER)
        return find_config(self.model)[1]

    @property
    def truth_bytes(self) -> int:
        return self.reserved_bytes or self.allocated_bytes


_OLD = (OPTIMUM, "2.1.0, 4.34.1", "a100-80gb", "Llama-2-7B", "fp16")
_GUIDE = (GUIDE, "of 2023", "a100-80gb", "OctoCoder")
RUNS = (
    Run(*_OLD, 1, 256, 512, 14_356 * MB, 23_542 * MB, True),
    Run(*_OLD, 2, 256, 512, 15_160 * MB, 23_542 * MB, True),
    Run(*_OLD, 4, 256, 512, 16_768 * MB, 23_544 * MB, True),
    Run(*_OLD, 8, 256, 512, 19_990 * MB, 30_003 * MB, True),
    Run(*_OLD, 16, 256, 512, 26_441 * MB, 76_996 * MB, True),
    Run(
        *(LIU, "2.4.0, 4.49.0", "a100-80gb", "Llama-3.1-8B", "bf16"),
        *(1, 64, 64, 16_089_670_000, 16_240_350_000),
    ),
    Run(
        *(FAKEGPU, "2.8, 5.12", "rtx-pro-5000", "Qwen3-8B", "bf16"),
        *(1, 9, 2, 16_396_630_528, None),
    ),
    Run(*_GUIDE, "bf16", 1, 24, 60, round(29.0260648727417 * GIB), None),
    Run(*_GUIDE, "fp16", 1, 24, 60, round(15.219234466552734 * GIB), None, quantize="int8"),
    Run(*_GUIDE, "fp16", 1, 24, 60, round(9.543574333190918 * GIB), None, quantize="nf4"),
)


class Answer(NamedTuple):
    """What a tool says: bytes reserved, and allocated where it tells the two apart."""

    reserved_bytes: int
    allocated_bytes: int | None = None


def ours(run: Run) -> Answer:
    sizes = {"users": run.users, "prompt_tokens": run.prompt_tokens, "new_tokens": run.new_tokens}
    found = gpumem.serve(
        run.config,
        gpu=run.gpu,
        precision=run.precision,
        quantize=run.quantize,
        torch="2.10",
        **sizes,
    )
    return Answer(found.peak_reserved_bytes, found.peak_allocated_bytes)


def fitcheck(run: Run) -> Answer | None:
    from fitcheck import GPU_DB, ModelConfig
    from fitcheck.config_parser import _count_params, _parse_fields
    from fitcheck.estimator import ServingConfig, estimate_inference

    if run.model == "OctoCoder":  # it knows models with a gated MLP
        return None
    fields = _parse_fields(hub_config(run.model) or run.config.to_dict())
    model = ModelConfig(name=run.model, num_params=_count_params(fields), **vars(fields))
    tokens = run.prompt_tokens + run.new_tokens
    asked = ServingConfig(run.precision, seq_len=tokens, num_concurrent=run.users)
    gpu = next(spec for name, spec in GPU_DB.items() if "a100" in name.lower() and "80" in name)
    return Answer(round(estimate_inference(model, asked, gpu).total_mib * MIB))


def kitsune(run: Run) -> Answer | None:
    from kitsune.predict.kv_cache_estimator import estimate_kv_cache

    if run.quantize:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(run.config)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[run.precision]
    tokens = run.prompt_tokens + run.new_tokens
    return Answer(estimate_kv_cache(model, tokens, run.users, dtype).total_bytes)


def hf_mem(run: Run) -> Answer | None:
    from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size

    if run.quantize or run.model == "OctoCoder":  # it reads files, and configurations' newer names
        return None
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(run.config).num_parameters() * 2
    dtype = {"fp16": "F16", "bf16": "BF16"}[run.precision]
    tokens = run.prompt_tokens + run.new_tokens
    cache = compute_safetensors_kv_cache_size(run.config.to_dict(), dtype, tokens, run.users)
    return Answer(weights + cache)


OURS = "labkit estimate --serve"
TOOLS: dict[str, Callable[[Run], Answer | None]] = {
    OURS: ours,
    "fitcheck infer": fitcheck,
    "kitsune kv-cache": kitsune,
    "hf-mem": hf_mem,
}


def table(answers: dict[str, dict[str, list]]) -> str:
    """Return the table: a row for each run, with each tool's error in per cent."""
    lines = [
        f"| run | PyTorch, transformers | allocated | ours | reserved | {' | '.join(TOOLS)} |",
        f"| --- | --- | ---: | ---: | ---: |{' ---: |' * len(TOOLS)}",
    ]
    for run in RUNS:
        reserved = "–" if run.reserved_bytes is None else f"{run.reserved_bytes / MB:,.0f} MB"
        allocated_bytes = answers[OURS][run.name][1]
        cells = [
            f"{run.name} ({run.source})",
            run.versions + (" (two caches)" if run.old_cache else ""),
            f"{run.allocated_bytes / MB:,.0f} MB",
            f"{100 * (allocated_bytes / run.allocated_bytes - 1):+.2f} %",
            reserved,
        ]
        for tool in TOOLS:
            if answers[tool][run.name] is None:
                cells.append("–")
                continue
            answer = Answer(*answers[tool][run.name])
            said = answer.reserved_bytes
            if run.reserved_bytes is None and answer.allocated_bytes is not None:
                said = answer.allocated_bytes
            cells.append(f"{100 * (said / run.truth_bytes - 1):+.2f} %")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the answers and the table")
    options = parser.parse_args()
    answers = {tool: {run.name: ask(run) for run in RUNS} for tool, ask in TOOLS.items()}
    print(table(answers))
    if options.update:
        write_atomic(RECORD, json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
        write_between(PAGE, "answering", table(answers))


if __name__ == "__main__":
    main()
