"""What a published guide measured on a real V100, beside a phantom V100.

    .venv-phantom/bin/python -m phantom_gpu v100 benchmarks/published.py

Source: "Efficient Training on a Single GPU" of transformers' documentation, version 4.21
(https://huggingface.co/docs/transformers/v4.21.0/perf_train_gpu_one): bert-large-uncased, rows of
512 tokens, PyTorch and transformers of January 2022, what NVML says is occupied after training. All
of its runs with the Trainer are here. It says, too, what is occupied before a model is there, 1,343
MB: CUDA's context and the kernels. That is taken off, and what is left is held to what PyTorch's
allocator reserves.

What was the default then is asked for: eager attention, optimizers that take one tensor at a time,
gradients that are set to zero and stay, checkpointing that is reentrant.

Limits: torch, transformers and bitsandbytes are those of today; cuBLAS's and cuDNN's own memory is
in the published figures and not on the phantom.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpumem.hardware import cuda, this_machine
from gpumem.units import MIB

BEFORE_MIB = 1343
ROWS, TOKENS, STEPS = 4, 512, 3


class Case(NamedTuple):
    """One run of the guide: MiB that were occupied, and how it trained."""

    name: str
    occupied_mib: int
    accumulate: bool = False
    checkpointing: bool = False
    fp16: bool = False
    optimizer: str = "adamw"


ALL = {"accumulate": True, "checkpointing": True, "fp16": True}
CASES = (
    Case("batch 4", 14949),
    Case("batch 1, 4 accumulated", 8681, accumulate=True),
    Case("accumulated, checkpointing", 6775, accumulate=True, checkpointing=True),
    Case("batch 4, FP16", 13939, fp16=True),
    Case("accumulated, checkpointing, FP16", 7275, **ALL),
    Case("batch 4, Adafactor", 12295, optimizer="adafactor"),
    Case("all of it, Adafactor", 4847, **ALL, optimizer="adafactor"),
    Case("batch 4, 8-bit Adam", 13085, optimizer="adam8bit"),
    Case("all of it, 8-bit Adam", 5363, **ALL, optimizer="adam8bit"),
)
LOADED_MIB = 2631  # the model alone


def bert() -> torch.nn.Module:
    """Return bert-large-uncased for classification, with random weights, on the GPU."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    config._attn_implementation = "eager"
    return BertForSequenceClassification(config).to("cuda").train()


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer as transformers' Trainer made it then."""
    parameters = model.parameters()
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(parameters, lr=1e-5, scale_parameter=False, relative_step=False)
    if name == "adam8bit":
        import bitsandbytes

        return bitsandbytes.optim.Adam8bit(parameters, lr=1e-5)
    return torch.optim.AdamW(parameters, lr=1e-5, foreach=False)


def train(case: Case) -> None:
    """Train for a few steps."""
    model = bert()
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    optimizer = optimizer_of(case.optimizer, model)
    scaler = torch.amp.GradScaler("cuda", enabled=case.fp16)
    rows = 1 if case.accumulate else ROWS
    for _ in range(STEPS):
        for _ in range(ROWS // rows):
            ids = torch.randint(100, 30000, (rows, TOKENS), device="cuda")
            labels = torch.zeros(rows, dtype=torch.int64, device="cuda")
            with torch.autocast("cuda", torch.float16, enabled=case.fp16):
                loss = model(input_ids=ids, labels=labels).loss
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad(set_to_none=False)


def reserved_mib(run: Callable[[], Any]) -> float:
    """Return what is reserved after ``run``, and free it."""
    kept = run()
    reserved_bytes = torch.cuda.memory_reserved()
    del kept
    cuda.free_memory()
    return reserved_bytes / MIB


def rows() -> Iterator[tuple[str, int, float]]:
    """Yield the name of a run, what was published without the context, and what is reserved."""
    yield "the model alone", LOADED_MIB - BEFORE_MIB, reserved_mib(bert)
    for case in CASES:
        found = reserved_mib(functools.partial(train, case))
        yield case.name, case.occupied_mib - BEFORE_MIB, found


def main() -> int:
    here = this_machine.machine()
    if not here.can_measure:
        print(f"this needs a CUDA GPU, or a phantom. {here.note}", file=sys.stderr)
        return 2
    print(f"| run | published, minus {BEFORE_MIB:,} MB in use before | {here.label} | difference |")
    print("| --- | ---: | ---: | ---: |")
    for name, published, found in rows():
        print(f"| {name} | {published:,} MB | {found:,.0f} MB | {found / published - 1:+.1%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
