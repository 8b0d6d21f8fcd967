"""What watching costs: tracking a real step on the CPU, tracing and estimating large models.

    python benchmarks/speed.py [--skip-memtracker]
    python -m phantom_gpu a100-80gb benchmarks/speed.py    # steps on a phantom, watched or not

Prints tables; nothing here is a test. The 8B step (bf16, 1 × 4096 tokens, AdamW) runs on fake
tensors three times: untracked, under our tracker, and under PyTorch's MemTracker. Estimates and
advice are timed in this process, which has imported most libraries by then. On a phantom the script
that is watched by ``labkit phantom`` runs as it is, too, and both say what a step takes.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.distributed._tools.mem_tracker import MemTracker

import labkit as lab
from gpumem.fake_cuda.fake_tensors import GPU_DEVICE, fake_tensors
from gpumem.hardware import this_machine
from gpumem.hardware.catalogue import gpu
from gpumem.tracker import track
from gpumem.units import format_bytes
from phantom_gpu.run_script import run_program


def real_step_overhead(rounds: int = 7) -> float:
    """Median of tracked over untracked seconds, step by step in turn."""
    model = lab.model("SmolLM2-135M", layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    [tokens] = lab.batches(device="cpu", batch_size=4, seq_len=128, steps=1)

    def step() -> float:
        started = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    step()
    ratios = []
    for _ in range(rounds):
        plain = step()
        with track():
            watched = step()
        ratios.append(watched / plain)
    return statistics.median(ratios)


def big_step(memtracker: MemTracker | None = None) -> None:
    model = lab.model("Llama-3.1-8B", device=GPU_DEVICE, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if memtracker is not None:
        memtracker.track_external(model, optimizer)
    with memtracker or contextlib.nullcontext():
        tokens = torch.zeros(1, 4096, dtype=torch.long, device=GPU_DEVICE)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


QLORA = {
    "precision": "bf16",
    "lora": 16,
    "quantize": "nf4-double",
    "checkpointing": True,
    "optimizer": "paged-adamw8bit",
    "seq_len": 2048,
}
ESTIMATES = {
    "Llama-3.1-8B, bf16, 1 × 4096": ("Llama-3.1-8B", {"precision": "bf16", "seq_len": 4096}),
    "the same, every layer traced": (
        "Llama-3.1-8B",
        {"precision": "bf16", "seq_len": 4096, "exact": True},
    ),
    "Llama-2-70B, QLoRA, 1 × 2048": ("Llama-2-70B", QLORA),
}


PHANTOM_STEPS = {
    "Llama-3.1-8B, bf16, SGD, 1 × 1024": (
        "Llama-3.1-8B",
        {"precision": "bf16", "optimizer": "sgd", "checkpointing": True},
    ),
    "Llama-2-70B, QLoRA, 4 × 2048": ("Llama-2-70B", QLORA | {"batch_size": 4}),
}
SCRIPT = """
import statistics, time
import torch, labkit as lab
recipe = lab.Recipe(precision="bf16", lora=16, checkpointing=True, batch_size=2)
experiment = lab.training("Llama-3.1-8B", recipe)(torch.device("cuda"))
seconds = []
for _ in range(10):
    started = time.perf_counter()
    next(experiment)
    seconds.append(time.perf_counter() - started)
print(statistics.median(seconds))
"""


def phantom_steps() -> None:
    """Print what a step takes on the phantom GPU, and what watching it costs."""
    for name, (model, settings) in PHANTOM_STEPS.items():
        experiment = lab.training(model, lab.Recipe(**settings))(torch.device("cuda"))
        next(experiment)
        seconds = statistics.median(timed(next, experiment) for _ in range(3))
        print(f"  {name:34} {seconds:6.2f} s")
        experiment.close()
        lab.free_memory()
    with tempfile.TemporaryDirectory() as folder:
        script, watched = Path(folder, "train.py"), Path(folder, "watched")
        script.write_text(SCRIPT)
        bare = float(subprocess.check_output([sys.executable, script]))
        with watched.open("w") as said:
            run_program([sys.executable, str(script)], gpu="a100-80gb", stdout=said)
        ratio = float(watched.read_text()) / bare
    print(f"  Llama-3.1-8B, LoRA 16, 2 × 1024    {bare:6.2f} s, watched {ratio:.2f} × that")


def timed(function, *args) -> float:
    started = time.perf_counter()
    function(*args)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skip-memtracker", action="store_true", help="it takes a minute or more")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    if this_machine.machine().phantom:
        print(f"\none training step {this_machine.machine().label}")
        return phantom_steps()
    print(f"tracking a real CPU step: {real_step_overhead():.2f} × the untracked step")

    print("\none training step of Llama-3.1-8B, bf16, 1 × 4096 tokens, AdamW, fake tensors")
    with fake_tensors(gpu("a100-80gb")):
        print(f"  untracked        {timed(big_step):6.1f} s")
    with fake_tensors(gpu("a100-80gb")), track(device=str(GPU_DEVICE), work=True) as tracker:
        seconds = timed(big_step)
    trace = tracker.trace()
    print(
        f"  labkit's tracker {seconds:6.1f} s   peak {format_bytes(trace.peak_bytes)}, "
        f"{len(trace.events)} events, {trace.flops:.3e} FLOPs"
    )
    if not options.skip_memtracker:
        memtracker = MemTracker()
        with fake_tensors(gpu("a100-80gb")):
            seconds = timed(big_step, memtracker)
        peak = sum(
            snapshot["Total"] for snapshot in memtracker.get_tracker_snapshot("peak").values()
        )
        print(f"  MemTracker       {seconds:6.1f} s   peak {format_bytes(peak)}")

    print("\nestimates for an A100 of 80 GB")
    for name, (model, settings) in ESTIMATES.items():
        found = lab.estimate(model, gpu="a100-80gb", **settings)
        print(
            f"  {name:30} {found.seconds_to_estimate:6.1f} s   "
            f"reserved {format_bytes(found.peak_reserved_bytes)}"
        )
    advice = lab.advise("Llama-3.1-8B", gpu="a100-80gb")
    print(
        f"  advice for Llama-3.1-8B        {advice.seconds:6.1f} s   "
        f"{len(advice.options)} recipes simulated"
    )


if __name__ == "__main__":
    main()
