"""Public training scripts, unmodified, judged on GPUs that are not there.

    make scripts                                                 # all, held to what is recorded
    .venv-scripts/bin/python benchmarks/scripts.py --only dpo    # what has the text in its name
    .venv-scripts/bin/python benchmarks/scripts.py --unwatched   # each a second time, see below
    .venv-scripts/bin/python benchmarks/scripts.py --update      # that, and write docs/PHANTOM.md

Some lie in installed packages, others in public repositories at a commit, which are cloned, or lie
below ``--sources DIR`` as ``owner--name`` where there is no network. Three, in
``benchmarks/examples``, are written here after a library's documentation, which has its code on
pages only. Each runs with its documentation's arguments where it has any, and ends after three
optimizer steps. One that draws numbers without a seed is given one. `benchmarks.offline` makes what
they would fetch: models at their real size, data.

``--unwatched`` runs each a second time without our watch: all values read as zeros there. Peaks are
the same to the byte, but for scripts that say which of their values decides otherwise. These run a
third time, without our watch and with values followed.

Limits: seconds are those of this machine, with the time that imports and processes take to start.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import phantom_gpu
from benchmarks.pages import write_between
from gpumem.files import TemporaryFolder, cache_folder
from gpumem.hardware import catalogue
from gpumem.trace import Category
from gpumem.units import format_bytes
from phantom_gpu.environment import environment
from phantom_gpu.report import FitReport
from phantom_gpu.run_script import run_program

STEPS = 3
BESIDE = ("torch", "transformers", "diffusers", "torchvision", "peft", "bitsandbytes")
HERE = Path(__file__).resolve().parent
EXAMPLES = HERE / "examples"
RECORD = HERE / "scripts.json"
PAGE = HERE.parent / "docs" / "PHANTOM.md"
UNWATCHED = HERE / "unwatched"
#: Starts a script that draws numbers without a seed.
SEEDED = HERE / "seeded.py"
#: Answers that a model makes never end without values.
UNWATCHED_SECONDS = 1800
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_CACHE": "{data}/hub",
    "NANOCHAT_BASE_DIR": "{data}/nanochat",
    "WANDB_MODE": "disabled",
    "YOLO_CONFIG_DIR": "{data}",
}
#: What is the same watched and unwatched: peaks on one GPU, and optimizer steps.
COMPARED = ("allocated_bytes", "reserved_bytes", "steps")
#: Loader threads race, so peaks of files that are loaded differ a little from run to run.
TOLERANCE = 0.01
#: Of a peak; more without a name is a fault.
MOST_UNATTRIBUTED = 0.01

ACCELERATE = "-m accelerate.commands.launch"
TORCHRUN = "-m torch.distributed.run --nproc-per-node"
PYTORCH = "pytorch/examples@77f55b912142e11fcfdf5b530231fb9c52f181e8"
VISION = "chanwutk/vision_references@aea0f07fa3a7afb81417d4ee84ac0ab6d4b156d3"
DIFFUSERS = "huggingface/diffusers@58eb52c0803ea9af3abec60841c2a093bdf1f951"
#: Copies of transformers' examples with others beside them. Those of speech run in the second only.
TRANSFORMERS = "PerforatedAI/PerforatedAI-Transformers@746e0e9151c668ca6e19f9432b8b2a1e1c6cb4e8"
NEWER_TRANSFORMERS = "macorisd/transformers-qwen3@4a42c1b083066a4ae212edd4bd8d28ff713c0088"


class Script(NamedTuple):
    """A script: where it is from, how it is started, and on which GPUs.

    Attributes:
        name: its module, its file in its source or among the examples, or its package's command.
        trains: what it trains, for the table.
        source: an installed package, or ``owner/name@commit``.
        gpu, gpus: which, and how many.
        arguments, start: words behind and before the script; ``{data}`` is the folder of the data.
        inside: it runs in its source's folder, not in that of the data.
        decides: the value by which it goes another way where values read as zeros, if there is one.
    """

    name: str
    trains: str
    source: str
    gpu: str
    arguments: str = ""
    gpus: int = 1
    start: str = ""
    inside: bool = False
    decides: str = ""

    def command(self, source: Path | None, data: Path) -> list[str]:
        """Return how it is started by this Python."""
        script = f"-m {self.name}"
        if self.name.endswith(".py"):
            script = str((source or EXAMPLES) / self.name)
        elif (command := Path(sys.executable).parent / self.name).exists():
            script = str(command)
        words = f"{self.start} {script} {self.arguments}"
        return [sys.executable, *words.format(data=data).split()]


SCRIPTS = (
    Script(
        "train.py",
        "nanoGPT, compiled",
        "karpathy/nanoGPT@3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        "a100-40gb",
        "--dataset={data}/openwebtext --out_dir={data}/out --eval_iters=2",
        inside=True,
    ),
    Script(
        "scripts.base_train",
        "nanochat with Muon, compiled",
        "karpathy/nanochat@92d63d4e8bb4df75c3b71618f31ddde2378b2bcd",
        "h100",
        "--depth=12 --device-batch-size=16 --window-pattern=L --num-iterations=20 "
        "--core-metric-every=-1 --eval-tokens=65536",
        inside=True,
    ),
    Script(
        "references/classification/train.py",
        "ResNet-50 on pictures",
        VISION,
        "v100-32gb",
        "--model resnet50 --batch-size 64 --data-path images --workers 0",
    ),
    Script(
        "references/detection/train.py",
        "Faster R-CNN on boxes",
        VISION,
        "rtx-3090",
        "--dataset coco --data-path coco --model fasterrcnn_resnet50_fpn --batch-size 4 "
        "--workers 0",
        start=str(SEEDED),
        decides="which boxes it keeps",
    ),
    Script(
        "references/segmentation/train.py",
        "DeepLabv3 on masks",
        VISION,
        "rtx-3090",
        "--dataset coco --data-path coco --model deeplabv3_resnet50 --aux-loss -b 4 --workers 0",
    ),
    Script(
        "train.py",
        "ViT-B/16 by timm",
        "huggingface/pytorch-image-models@aa4b5850c1543fa488abf260f18390eda46cf85d",
        "rtx-3090",
        "images --model vit_base_patch16_224 --batch-size 64 --amp --val-split val",
    ),
    Script(
        "yolo",
        "YOLOv8n, trained and validated",
        "ultralytics",
        "rtx-4090",
        "detect train data=yolo/data.yaml model=yolov8n.yaml epochs=1 batch=16 workers=0 "
        "plots=False project={data}/runs",
        decides="how many boxes a picture has",
    ),
    Script(
        "imagenet/main.py",
        "ResNet-18 on pictures",
        PYTORCH,
        "t4",
        "-a resnet18 -b 64 -j 0 images",
    ),
    Script(
        "dcgan/main.py",
        "DCGAN",
        PYTORCH,
        "t4",
        "--dataset folder --dataroot images/train --workers 0 --accel --outf .",
    ),
    Script(
        "train.py",
        "U-Net on large pictures",
        "milesial/Pytorch-UNet@21d7850f2af30a9695bbeea75f3136aa538cfc4a",
        "rtx-3090",
        "--amp --batch-size 1",
    ),
    Script(
        "examples/text_to_image/train_text_to_image_lora.py",
        "Stable Diffusion 1.5 with LoRA",
        DIFFUSERS,
        "rtx-3090",
        "--mixed_precision fp16 --pretrained_model_name_or_path stable-diffusion-v1-5 "
        "--train_data_dir captions --resolution 512 --random_flip --train_batch_size 1",
        start=f"{ACCELERATE} --mixed_precision fp16",
    ),
    Script(
        "examples/text_to_image/train_text_to_image.py",
        "Stable Diffusion 1.5 with an averaged copy",
        DIFFUSERS,
        "rtx-3090",
        "--pretrained_model_name_or_path stable-diffusion-v1-5 --train_data_dir captions --use_ema "
        "--resolution 512 --center_crop --random_flip --train_batch_size 1 "
        "--gradient_accumulation_steps 4 --gradient_checkpointing --learning_rate 1e-05 "
        "--max_grad_norm 1 --lr_scheduler constant --lr_warmup_steps 0",
        start=f"{ACCELERATE} --mixed_precision fp16",
    ),
    Script(
        "examples/unconditional_image_generation/train_unconditional.py",
        "a diffusion UNet with an averaged copy",
        DIFFUSERS,
        "rtx-3090",
        "--train_data_dir captions --resolution 64 --train_batch_size 16 --num_epochs 1 --use_ema",
    ),
    Script(
        "train.py",
        "DiT-XL/2 with an averaged copy",
        "facebookresearch/DiT@ed81ce2229091fd4ecc9a223645f95cf379d582b",
        "a100-80gb",
        "--data-path images/train --model DiT-XL/2 --global-batch-size 32 --num-workers 0",
        start=f"{TORCHRUN} 1",
        decides="how many parameters each rank has",
    ),
    Script(
        "open_clip_train.main",
        "CLIP ViT-B/32",
        "open_clip_torch",
        "a100-80gb",
        "--train-data captions.csv --model ViT-B-32 --batch-size 64 --precision amp --workers 0",
    ),
    Script(
        "examples/pytorch/language-modeling/run_clm.py",
        "GPT-2 by Trainer",
        TRANSFORMERS,
        "rtx-3090",
        "--model_name_or_path gpt2 --train_file text.txt --do_train "
        "--per_device_train_batch_size 8 --output_dir clm",
        decides="whether texts are padded",
    ),
    Script(
        "examples/pytorch/language-modeling/run_clm.py",
        "Mamba by Trainer",
        TRANSFORMERS,
        "rtx-3090",
        "--model_type mamba --tokenizer_name gpt2 --train_file text.txt --do_train "
        "--block_size 128 --per_device_train_batch_size 8 --output_dir mamba",
    ),
    Script(
        "examples/pytorch/text-classification/run_glue.py",
        "BERT on pairs of sentences",
        TRANSFORMERS,
        "t4",
        "--model_name_or_path bert-base-cased --dataset_name nyu-mll/glue "
        "--dataset_config_name mrpc --do_train --max_seq_length 128 "
        "--per_device_train_batch_size 32 --output_dir glue",
    ),
    Script(
        "examples/pytorch/speech-recognition/run_speech_recognition_ctc.py",
        "wav2vec 2.0 with CTC",
        NEWER_TRANSFORMERS,
        "rtx-3090",
        "--dataset_name speech --train_split_name train --eval_split_name test --do_train "
        "--do_eval --model_name_or_path facebook/wav2vec2-base --per_device_train_batch_size 8 "
        "--fp16 --output_dir ctc",
        decides="which parts of a sound are hidden",
    ),
    Script(
        "examples/pytorch/speech-recognition/run_speech_recognition_seq2seq.py",
        "Whisper small",
        NEWER_TRANSFORMERS,
        "rtx-3090",
        "--dataset_name speech --train_split_name train --eval_split_name test --do_train "
        "--model_name_or_path openai/whisper-small --freeze_feature_encoder False "
        "--per_device_train_batch_size 8 --fp16 --output_dir whisper",
        decides="whether texts are packed",
    ),
    Script(
        "examples/sentence_transformer/training/nli/training_nli_v2.py",
        "sentences by BERT, 128 a batch",
        "UKPLab/sentence-transformers@85ec64559f4414aa536eca4bf53538291e0a333f",
        "a100-40gb",
        "bert-base-uncased",
        decides="whether texts are padded",
    ),
    Script(
        "litgpt",
        "Pythia 160M with LoRA",
        "litgpt",
        "rtx-3090",
        "finetune_lora pythia-160m --data JSON --data.json_path instructions.json "
        "--data.val_split_fraction 0.1 --precision bf16-true --train.micro_batch_size 4",
    ),
    Script(
        "examples/gcn.py",
        "a graph's nodes",
        "pyg-team/pytorch_geometric@5c6461b2305ad068a6d61165b3c55852a11aaa41",
        "t4",
        decides="how many nodes are tested",
    ),
    Script(
        "cleanrl/ppo.py",
        "PPO, which plays",
        "vwxyzjn/cleanrl@fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
        "t4",
        decides="whether probabilities are numbers",
    ),
    Script(
        "distributed/tensor_parallelism/fsdp_tp_example.py",
        "a Llama by FSDP2 and tensor parallelism",
        PYTORCH,
        "h100",
        gpus=4,
        start=f"{TORCHRUN} 4",
    ),
    Script(
        "distributed/FSDP2/example.py",
        "a small transformer by FSDP2",
        PYTORCH,
        "h100",
        "--mixed-precision",
        gpus=4,
        start=f"{TORCHRUN} 4",
    ),
    Script(
        "trl.scripts.sft",
        "Llama-3.1-8B, QLoRA",
        "trl",
        "rtx-4090",
        "--model_name_or_path meta-llama/Llama-3.1-8B --dataset_name trl-lib/Capybara "
        "--learning_rate 2.0e-4 --num_train_epochs 1 --packing --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 8 --eos_token <|im_end|> --eval_strategy steps "
        "--eval_steps 100 --use_peft --lora_r 32 --lora_alpha 16 --output_dir SFT --load_in_4bit",
        decides="which tokens have a label",
    ),
    Script(
        "trl.scripts.dpo",
        "Qwen2-0.5B on preferences",
        "trl",
        "a100-80gb",
        "--dataset_name trl-lib/ultrafeedback_binarized "
        "--model_name_or_path Qwen/Qwen2-0.5B-Instruct --learning_rate 5.0e-7 "
        "--num_train_epochs 1 --per_device_train_batch_size 2 --max_steps 1000 "
        "--gradient_accumulation_steps 8 --eval_strategy steps --eval_steps 50 "
        "--output_dir Qwen2-0.5B-DPO --no_remove_unused_columns",
        decides="which tokens have a label",
    ),
    Script(
        "trl.scripts.kto",
        "Qwen1.5-1.8B, QLoRA",
        "trl",
        "rtx-4090",
        "--dataset_name trl-lib/kto-mix-14k --model_name_or_path=trl-lib/qwen1.5-1.8b-sft "
        "--per_device_train_batch_size 8 --num_train_epochs 1 --learning_rate 5e-7 "
        "--lr_scheduler_type=cosine --gradient_accumulation_steps 1 --eval_steps 500 "
        "--output_dir=kto-aligned-model-lora --warmup_steps 0.1 --logging_first_step --use_peft "
        "--load_in_4bit --lora_target_modules=all-linear --lora_r=16 --lora_alpha=16",
        decides="which answers are wanted",
    ),
    Script(
        "trl.scripts.reward",
        "a reward model of Qwen2-0.5B",
        "trl",
        "t4",
        "--model_name_or_path Qwen/Qwen2-0.5B-Instruct --output_dir Reward --bf16 False "
        "--fp16 --dataset_name trl-lib/ultrafeedback_binarized --per_device_train_batch_size 8",
    ),
    Script(
        "trl.scripts.grpo",
        "Qwen2-0.5B, which answers",
        "trl",
        "h100",
        "--model_name_or_path Qwen/Qwen2-0.5B-Instruct --output_dir GRPO "
        "--dataset_name trl-lib/ultrafeedback-prompt --reward_funcs think_format_reward "
        "--max_completion_length 64",
        decides="whether an answer has ended, which none ever has",
    ),
    Script(
        "trl.scripts.distillation",
        "Qwen2.5-0.5B, taught by 1.5B",
        "trl",
        "a100-80gb",
        "--model_name_or_path Qwen/Qwen2.5-0.5B-Instruct "
        "--teacher_model_name_or_path Qwen/Qwen2.5-1.5B-Instruct "
        "--dataset_name trl-lib/ultrafeedback-prompt --learning_rate 2.0e-5 --num_train_epochs 1 "
        "--output_dir Qwen2.5-0.5B-Distillation --max_completion_length 64",
        decides="whether an answer has ended, which none ever has",
    ),
    Script(
        "accelerate.test_utils.scripts.external_deps.test_peak_memory_usage",
        "BERT on two GPUs",
        "accelerate",
        "rtx-4090",
        "--num_epochs 1",
        gpus=2,
        start=f"{ACCELERATE} --num_processes 2 --mixed_precision fp16",
        decides="how many parameters each rank has",
    ),
    Script(
        "lightning_fsdp.py",
        "a transformer by FSDP",
        "pytorch-lightning",
        "rtx-4090",
        gpus=2,
        decides="where the first rank writes its log",
    ),
    Script(
        "torch_fsdp2.py",
        "Llama-3.1-8B by FSDP2",
        "torch",
        "h100",
        gpus=4,
        start=f"{TORCHRUN} 4",
        decides="whether texts are packed",
    ),
    Script(
        "deepspeed_zero3.py",
        "a transformer by ZeRO-3, offloaded",
        "deepspeed",
        "rtx-4090",
        "--deepspeed --deepspeed_config zero3.json",
        gpus=2,
        start="-m deepspeed.launcher.runner --num_gpus 2",
        decides="how many modules each rank has called",
    ),
)


def source_folder(script: Script, sources: Path | None, data: Path) -> Path | None:
    """Return where a script's repository lies, cloned at its commit if it has to be; None if it
    has none."""
    repository, _, commit = script.source.partition("@")
    if not commit:
        return None
    name = repository.replace("/", "--")
    if sources is not None:
        folder = sources / name
    else:
        folder = cache_folder() / "sources" / f"{name}-{commit[:8]}"
        if not folder.is_dir():
            folder.mkdir(parents=True)
            for command in (
                "init --quiet",
                f"fetch --quiet --depth 1 https://github.com/{repository} {commit}",
                "checkout --quiet FETCH_HEAD",
            ):
                subprocess.run(["git", *command.split()], cwd=folder, check=True)
    graph = folder / "data" / "Planetoid"
    if script.name == "examples/gcn.py":  # it reads beside itself
        graph.parent.mkdir(exist_ok=True)
        graph.unlink(missing_ok=True)
        graph.symlink_to(data / "Planetoid")
    return folder


def run(script: Script, source: Path | None, data: Path) -> FitReport:
    """Run a script on the data, watched."""
    return run_program(
        script.command(source, data),
        gpu=script.gpu,
        gpus=script.gpus,
        steps=STEPS,
        stdout=subprocess.DEVNULL,
        report=lambda sentence: print(f"{script.trains}: {sentence}", file=sys.stderr),
        cwd=source if script.inside else data,
    )


def unwatched(
    script: Script, source: Path | None, data: Path, follows: bool = False
) -> dict[str, int]:
    """Run a script without our watch, and without following its values unless told so; return its
    peaks on one GPU and its steps, or nothing if a rank did not say, or if it does not end."""
    with TemporaryFolder() as folder:
        variables = environment(catalogue.gpu(script.gpu), script.gpus)
        variables["PYTHONPATH"] += f"{os.pathsep}{UNWATCHED}"
        variables["UNWATCHED"] = json.dumps([str(folder), STEPS, follows])
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                script.command(source, data),
                env=variables,
                cwd=source if script.inside else data,
                stdout=subprocess.DEVNULL,
                check=False,  # values that it reads are wrong, and may end it
                timeout=UNWATCHED_SECONDS,
            )
        found = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    ranks = [each for each in found if each["allocated_bytes"]]
    if len(ranks) < script.gpus:
        return {}
    return {name: max(each[name] for each in ranks) for name in COMPARED}


def result(script: Script, source: Path | None, data: Path) -> dict[str, Any]:
    """Run a script and return what is recorded of it."""
    started = time.monotonic()
    verdict = run(script, source, data)
    seconds = round(time.monotonic() - started)
    print(f"\n{script.trains}: {script.name}\n{verdict}\n", file=sys.stderr)
    gpus = [gpu for answer in verdict.answers for gpu in answer.gpus]
    faults = [fault for answer in verdict.answers for fault in answer.faults]
    for gpu in gpus:
        share = gpu.made_of.get(Category.UNATTRIBUTED, 0) / max(1, gpu.peak_allocated_bytes)
        if share >= MOST_UNATTRIBUTED:
            faults.append(f"{share:.1%} of GPU {gpu.index}'s peak has no name")
    return {
        "fits": verdict.fits,
        "allocated_bytes": max((gpu.peak_allocated_bytes for gpu in gpus), default=0),
        "reserved_bytes": verdict.peak_reserved_bytes,
        "steps": max((answer.steps for answer in verdict.answers), default=0),
        "seconds": seconds,
        "faults": faults,
    }


def same(found: dict[str, Any], run: str) -> bool:
    """Return whether a script's peaks and steps are those of its ``unwatched`` run, or of the one
    that is unwatched but ``followed``."""
    return all(found[run].get(name) == found[name] for name in COMPARED)


def difference(script: Script, found: dict[str, Any], recorded: dict[str, Any] | None) -> str:
    """Say where a result differs from the one that is recorded, or unwatched from what the script
    says; empty if it does not."""
    if recorded is None:
        return "it is not recorded"
    if found["faults"]:
        return f"errors inside labkit: {found['faults']}"
    for run, expected in (("unwatched", not script.decides), ("followed", True)):
        if run in found and same(found, run) is not expected:
            return f"{run} {found[run]}, watched {[found[name] for name in COMPARED]}"
    for name in ("fits", "steps"):
        if found[name] != recorded[name]:
            return f"{name} {found[name]}, recorded {recorded[name]}"
    for name in ("allocated_bytes", "reserved_bytes"):
        if abs(found[name] - recorded[name]) > TOLERANCE * recorded[name]:
            return f"{name} {found[name]:,}, recorded {recorded[name]:,}"
    return ""


def table(results: dict[str, dict[str, Any]], note: str) -> str:
    """Return the recorded results as Markdown."""
    heads = ["script", "what it trains", "from", "GPU", "fits", "allocated / reserved", "s"]
    lines = [_cells(heads), _cells(["---"] * 5 + ["---:"] * 2)]
    for script in SCRIPTS:
        found = results[script.trains]
        repository, _, commit = script.source.partition("@")
        url = f"https://github.com/{repository}"
        own = script.name.endswith(".py") and not commit
        name = f"`examples/{script.name}`" if own else f"`{script.name}`"
        if commit:
            file = f"{script.name.removesuffix('.py').replace('.', '/')}.py"
            name = f"[{name}]({url}/blob/{commit}/{file})"
        peaks = (format_bytes(found[f"{kind}_bytes"]) for kind in ("allocated", "reserved"))
        lines.append(
            _cells(
                [
                    name,
                    script.trains,
                    repository,
                    f"{script.gpus} × {catalogue.gpu(script.gpu).name}".removeprefix("1 × "),
                    {True: "yes", False: "no", None: "no answer"}[found["fits"]],
                    " / ".join(peaks),
                    str(found["seconds"]),
                ]
            )
        )
    return "\n".join([*lines, "", _unwatched_sentence(results), "", note])


def _unwatched_sentence(results: dict[str, dict[str, Any]]) -> str:
    compared = [script for script in SCRIPTS if "unwatched" in results[script.trains]]
    equal = sum(same(results[script.trains], "unwatched") for script in compared)
    others = (f"{each.trains} ({each.decides})" for each in compared if each.decides)
    followed = [same(each, "followed") for each in results.values() if "followed" in each]
    return (
        f"Of {len(compared)} that were run a second time without following values, {equal} have "
        f"the same peaks, to the byte. The others decide by a value, which reads as zero there: "
        f"{'; '.join(others)}. Of those that decide, {len(followed)} were run with values "
        f"followed and without the watch: {sum(followed)} have the same peaks, to the byte."
    )


def _cells(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="what has the text in its name")
    parser.add_argument("--sources", type=Path, metavar="DIR", help="where the repositories lie")
    parser.add_argument("--unwatched", action="store_true", help="compare with unwatched runs")
    parser.add_argument("--update", action="store_true", help="record the results of both")
    asked = parser.parse_args()
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"results": {}}
    failed = []
    with TemporaryFolder() as data:
        os.environ |= {name: value.format(data=data) for name, value in VARIABLES.items()}
        prepare = ["-m", phantom_gpu.__name__, "t4", str(HERE / "offline.py"), str(data)]
        chosen = [
            each for each in SCRIPTS if asked.only in f"{each.name} {each.trains} {each.source}"
        ]
        if chosen:  # else nothing but the page is written
            subprocess.run([sys.executable, *prepare], check=True)
        for script in chosen:
            source = source_folder(script, asked.sources, data)
            found = result(script, source, data)
            if asked.unwatched or asked.update:
                found["unwatched"] = unwatched(script, source, data)
                if script.decides:
                    found["followed"] = unwatched(script, source, data, follows=True)
            if asked.update:
                record["results"][script.trains] = found
                _write(record)
            wrong = difference(script, found, record["results"].get(script.trains))
            print(f"{script.trains}: {wrong or 'as recorded'}", flush=True)
            if wrong:
                failed.append(script.trains)
    if asked.update and len(record["results"]) == len(SCRIPTS):
        beside = [f"{name} {importlib.metadata.version(name)}" for name in BESIDE]
        record["note"] = f"With {', '.join(beside)}, {datetime.now(UTC):%Y-%m-%d}."
        _write(record)
        write_between(PAGE, "scripts", table(record["results"], record["note"]))
    return 1 if failed else 0


def _write(record: dict[str, Any]) -> None:
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
