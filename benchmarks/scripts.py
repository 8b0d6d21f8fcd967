"""Ten public training scripts, unmodified, judged on GPUs that are not there.

    .venv-phantom/bin/python benchmarks/scripts.py              # all, into docs/PHANTOM.md
    .venv-phantom/bin/python benchmarks/scripts.py --only dpo   # what has the text in its name

Seven lie in installed packages and run from there, with the arguments that their own documentation
gives, if it gives any; the 8B is loaded in 4 bits, and generated texts end after 64 tokens.
Three, in ``benchmarks/examples``, are written here after a library's documentation, which
has its code on pages only. Each ends after three optimizer steps. `benchmarks.offline` makes what
they would fetch: models at their real size, and data.

Limits: seconds are those of this machine, with the time that imports and processes take to start.
"""

import argparse
import importlib.metadata
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import phantom_gpu
from gpumem.files import TemporaryFolder
from gpumem.hardware import catalogue
from gpumem.units import format_bytes
from phantom_gpu.report import FitReport
from phantom_gpu.run_script import run_program

STEPS = 3
BESIDE = ("torch", "transformers", "peft", "bitsandbytes")
OFFLINE = Path(__file__).resolve().parent / "offline.py"
EXAMPLES = OFFLINE.parent / "examples"
PAGE = EXAMPLES.parents[1] / "docs" / "PHANTOM.md"
MARKERS = ("<!-- scripts: begin -->", "<!-- scripts: end -->")


class Script(NamedTuple):
    """A script: where it is from, how it is started, and on which GPUs.

    ``start`` and ``arguments`` are words around the script, ``name`` its module, or its file among
    the examples.
    """

    name: str
    package: str
    gpu: str
    arguments: str = ""
    gpus: int = 1
    start: str = ""

    def command(self) -> list[str]:
        """Return how it is started by this Python."""
        script = str(EXAMPLES / self.name) if self.name.endswith(".py") else f"-m {self.name}"
        return [sys.executable, *f"{self.start} {script} {self.arguments}".split()]


SCRIPTS = (
    Script(
        "trl.scripts.sft",
        "trl",
        "rtx-4090",
        "--model_name_or_path meta-llama/Llama-3.1-8B --dataset_name trl-lib/Capybara "
        "--learning_rate 2.0e-4 --num_train_epochs 1 --packing --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 8 --eos_token <|im_end|> --eval_strategy steps "
        "--eval_steps 100 --use_peft --lora_r 32 --lora_alpha 16 --output_dir SFT --load_in_4bit",
    ),
    Script(
        "trl.scripts.dpo",
        "trl",
        "a100-80gb",
        "--dataset_name trl-lib/ultrafeedback_binarized "
        "--model_name_or_path Qwen/Qwen2-0.5B-Instruct --learning_rate 5.0e-7 "
        "--num_train_epochs 1 --per_device_train_batch_size 2 --max_steps 1000 "
        "--gradient_accumulation_steps 8 --eval_strategy steps --eval_steps 50 "
        "--output_dir Qwen2-0.5B-DPO --no_remove_unused_columns",
    ),
    Script(
        "trl.scripts.kto",
        "trl",
        "rtx-4090",
        "--dataset_name trl-lib/kto-mix-14k --model_name_or_path=trl-lib/qwen1.5-1.8b-sft "
        "--per_device_train_batch_size 8 --num_train_epochs 1 --learning_rate 5e-7 "
        "--lr_scheduler_type=cosine --gradient_accumulation_steps 1 --eval_steps 500 "
        "--output_dir=kto-aligned-model-lora --warmup_steps 0.1 --logging_first_step --use_peft "
        "--load_in_4bit --lora_target_modules=all-linear --lora_r=16 --lora_alpha=16",
    ),
    Script(
        "trl.scripts.reward",
        "trl",
        "t4",
        "--model_name_or_path Qwen/Qwen2-0.5B-Instruct --output_dir Reward --bf16 False "
        "--fp16 --dataset_name trl-lib/ultrafeedback_binarized --per_device_train_batch_size 8",
    ),
    Script(
        "trl.scripts.grpo",
        "trl",
        "h100",
        "--model_name_or_path Qwen/Qwen2-0.5B-Instruct --output_dir GRPO "
        "--dataset_name trl-lib/ultrafeedback-prompt --reward_funcs think_format_reward "
        "--max_completion_length 64",
    ),
    Script(
        "trl.scripts.distillation",
        "trl",
        "a100-80gb",
        "--model_name_or_path Qwen/Qwen2.5-0.5B-Instruct "
        "--teacher_model_name_or_path Qwen/Qwen2.5-1.5B-Instruct "
        "--dataset_name trl-lib/ultrafeedback-prompt --learning_rate 2.0e-5 --num_train_epochs 1 "
        "--output_dir Qwen2.5-0.5B-Distillation --max_completion_length 64",
    ),
    Script(
        "accelerate.test_utils.scripts.external_deps.test_peak_memory_usage",
        "accelerate",
        "rtx-4090",
        "--num_epochs 1",
        gpus=2,
        start="-m accelerate.commands.launch --num_processes 2 --mixed_precision fp16",
    ),
    Script("lightning_fsdp.py", "pytorch-lightning", "rtx-4090", gpus=2),
    Script(
        "torch_fsdp2.py",
        "torch",
        "h100",
        gpus=4,
        start="-m torch.distributed.run --nproc-per-node 4",
    ),
    Script(
        "deepspeed_zero3.py",
        "deepspeed",
        "rtx-4090",
        "--deepspeed --deepspeed_config zero3.json",
        gpus=2,
        start="-m deepspeed.launcher.runner --num_gpus 2",
    ),
)


def row(script: Script, folder: Path) -> str:
    """Run a script in ``folder``; return its row of the table."""
    started = time.monotonic()
    verdict = run_program(
        script.command(),
        gpu=script.gpu,
        gpus=script.gpus,
        steps=STEPS,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        report=lambda sentence: print(f"{script.name}: {sentence}", file=sys.stderr),
    )
    seconds = time.monotonic() - started
    print(f"\n{script.name}\n{verdict}\n", file=sys.stderr)
    words = f"{script.start} {script.arguments}".strip()
    return _cells(
        [
            f"`examples/{script.name}`" if script.name.endswith(".py") else f"`{script.name}`",
            f"{script.package} {importlib.metadata.version(script.package)}",
            f"{script.gpus} × {catalogue.gpu(script.gpu).name}".removeprefix("1 × "),
            f"`{words}`".replace("|", "\\|") if words else "",
            {True: "yes", False: "no", None: "no answer"}[verdict.fits],
            _peaks(verdict),
            str(max((answer.steps for answer in verdict.answers), default=0)),
            f"{seconds:.0f}",
        ]
    )


def _peaks(verdict: FitReport) -> str:
    allocated_bytes = max(
        (gpu.peak_allocated_bytes for answer in verdict.answers for gpu in answer.gpus), default=0
    )
    return f"{format_bytes(allocated_bytes)} / {format_bytes(verdict.peak_reserved_bytes)}"


def _cells(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="what has the text in its name")
    only = parser.parse_args().only
    with TemporaryFolder() as folder:
        prepare = ["-m", phantom_gpu.__name__, "t4", str(OFFLINE), str(folder)]
        subprocess.run([sys.executable, *prepare], check=True)
        rows = [row(script, folder) for script in SCRIPTS if only in script.name]
    heads = ["script", "from", "GPU", "arguments", "fits", "allocated / reserved", "steps", "s"]
    beside = [f"{name} {importlib.metadata.version(name)}" for name in BESIDE]
    note = f"With {', '.join(beside)}, {datetime.now(UTC):%Y-%m-%d}."
    table = "\n".join([_cells(heads), _cells(["---"] * 5 + ["---:"] * 3), *rows, "", note])
    print(table)
    if not only:
        before, begin, rest = PAGE.read_text(encoding="utf-8").partition(MARKERS[0])
        _, end, after = rest.partition(MARKERS[1])
        PAGE.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
