"""Whose published figures `benchmarks.silicon` runs: their code, and how a row becomes a command.

A source is a `Source`: which rows one process answers, and the `Job` that this process is. Code
comes from a clone at the row's commit, or from a release's source package; libraries of the time
are installed aside, in front of the phantom's own environment. `drivers.py` and `liger.py` set up
small data where their code would fetch some.

Limits: where a published version cannot be had on a phantom, PyTorch before 2.8 first of all, a row
is run with a later one.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from gpumem.files import cache_folder
from gpumem.units import MIB

HERE = Path(__file__).resolve().parent
DRIVERS = HERE / "drivers.py"

Row = dict[str, str]

#: What published figures call a GPU, and the phantom that answers: one with other memory where
#: the catalogue has none of that size.
GPUS = {
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA B200": "b200",
    "Tesla T4": "t4",
    "H100": "h100",
    "A100 40GB": "a100-40gb",
    "RTX PRO 5000 72GB": "rtx-pro-5000",
    "RTX 3090 Ti": "rtx-3090",
    "L40S": "l40s",
}
#: What a row needs in front of the phantom's own environment, by pip without what it asks for.
RELEASES = {
    "transformers 4.34": (
        *("transformers==4.34.1", "tokenizers==0.14.1", "huggingface_hub==0.17.3"),
        *("safetensors==0.4.5", "numpy<2"),
    ),
    "transformers 4.44": ("transformers==4.44.2", "tokenizers==0.19.1", "huggingface_hub==0.24.7"),
    "transformers 4.48": ("transformers==4.48.3", "tokenizers==0.21.4", "huggingface_hub==0.36.2"),
    "transformers 4.57": ("transformers==4.57.6", "tokenizers==0.22.2", "huggingface_hub==0.36.2"),
    "transformers 5.0": (
        *("transformers==5.0.0", "tokenizers==0.22.2", "huggingface_hub==1.5.0"),
        "peft==0.19.1",
    ),
    "transformers 5.17": ("transformers==5.17.0", "huggingface_hub==1.5.0", "peft==0.20.0"),
    "transformers 5.12": (
        *("transformers==5.12.1", "tokenizers==0.22.2", "huggingface_hub==1.5.0"),
        "peft==0.20.0",
    ),
    "torchvision": ("torchvision",),
    "lightning 2.6": ("lightning==2.6.1",),
    "megatron-core 0.16": ("megatron-core==0.16.1",),
    "torch 2.8": ("torch==2.8.0", "triton==3.4.0", "nvidia-cuda-runtime-cu12==12.8.90"),
    "torch 2.10": ("torch==2.10.0", "nvidia-cuda-runtime-cu12==12.8.90"),
}
LIGER_PATHS = ("benchmark/scripts", "src", "test/*.py")
#: Scripts whose kernels have other names than they.
LIGER_SCRIPTS = {
    "fused_linear_orpo_loss": "orpo_loss",
    "fused_linear_cpo_loss": "cpo_loss",
    "fused_linear_simpo_loss": "simpo_loss",
    "fused_linear_grpo_loss_token": "grpo_loss",
    "fused_linear_grpo_loss_sequence": "grpo_loss",
    "tiled_geglu": "tiled_mlp",
    "tiled_swiglu": "tiled_mlp",
}
#: Liger-Kernel imports models of the transformers of its time; newer ones lack what it asks for.
OLD_TRANSFORMERS = {
    "b5672a153b": "transformers 4.44",
    "90fb5e4a3c": "transformers 4.48",
    "a307eac8b0": "transformers 4.48",
    "6817c2d34d": "transformers 4.48",
    "ff6650bbce": "transformers 4.48",
    "6b2fd02d57": "transformers 4.48",
    "16d06edf4f": "transformers 4.48",
    "ebd5303530": "transformers 4.48",
    "aa2d23dc7f": "transformers 4.48",
    "ee5aaf26b9": "transformers 4.48",
}


class Job(NamedTuple):
    """Rows that one process of theirs answers.

    Attributes:
        rows: the rows.
        gpu: the phantom.
        releases: of `RELEASES`, what lies in front of the environment.
        folder: their code.
        words: what Python runs.
        cases: one for each row, which a driver of ours answers with its number and bytes.
        printed: for a row, the pattern of what their code prints, with one group.
        unit_bytes: what is printed for one.
    """

    rows: list[Row]
    gpu: str
    releases: tuple[str, ...]
    folder: Path
    words: list[str]
    cases: list[dict[str, Any]] | None = None
    printed: Callable[[Row], str] | None = None
    unit_bytes: int = 1


class Source(NamedTuple):
    """Where figures were published.

    Attributes:
        name: as in the record.
        together: rows for which it is equal are answered by one process.
        job: makes that process of these rows and a folder with clones, or None.
        bounds: for what was measured, by how much a compared row may differ: a share of it, or so
            many bytes.
    """

    name: str
    together: Callable[[Row], tuple]
    job: Callable[[list[Row], Path | None], Job]
    bounds: dict[str, tuple[float, int]]

    def jobs(self, rows: list[Row], sources: Path | None) -> Iterator[Job]:
        """Yield the processes that answer those of the rows that are of this source."""
        here = sorted((row for row in rows if row["source"] == self.name), key=self.together)
        for _, group in groupby(here, self.together):
            yield self.job(list(group), sources)


def what(row: Row) -> str:
    """Return what was measured, with a 4-bit model's storage."""
    storage = re.search(r'"storage": "(\w+)"', row["settings"])
    return row["kind"] + (f", {storage[1]}" if storage else "")


def _liger_script(row: Row) -> tuple[str, str, str]:
    kernel = row["case"].split()[0]
    return row["commit"], row["gpu"], LIGER_SCRIPTS.get(kernel, kernel)


def _liger(rows: list[Row], sources: Path | None) -> Job:
    """One of its benchmark scripts at a commit."""
    commit, gpu, script = _liger_script(rows[0])
    folder = checkout("linkedin/Liger-Kernel", commit, LIGER_PATHS, sources)
    release = (OLD_TRANSFORMERS.get(commit, "transformers 4.57"),)
    if script.startswith("megatron"):
        release += ("megatron-core 0.16",)
    words = [str(HERE / "liger.py"), str(folder), f"benchmark_{script}.py"]
    return Job(rows, GPUS[gpu], release, folder, words, [_liger_case(row) for row in rows])


def _liger_case(row: Row) -> dict[str, Any]:
    kernel, provider, mode, x = row["case"].split()
    config, _ = json.JSONDecoder().raw_decode(row["settings"])
    value = float(x.partition("=")[2])
    x_value = int(value) if value.is_integer() else value
    return {"kernel": kernel, "provider": provider, "mode": mode, "x": x_value, "config": config}


def _fitcheck_way(row: Row) -> tuple[str, str]:
    """Rows that repeat a run share it."""
    return row["case"].partition(" run ")[0], row["settings"]


def _fitcheck(rows: list[Row], sources: Path | None) -> Job:
    """One way of training that the T4 measured."""
    asked = json.loads(rows[0]["settings"])
    folder = package("fitcheck-llm", "0.3.1", sources)
    words = f"{folder}/scripts/measure.py {asked['model']} "
    words += "--gpu t4 --precision fp16 --lora-r 32 --grad-checkpoint --json --no-predict "
    words += f"--quant {asked['storage']} --batch-size {asked['batch_size']} "
    words += f"--seq-len {asked['seq_len']}"
    words += " --flash-attn --attn-impl sdpa" if asked["attention"] == "sdpa" else ""
    releases = ("torch 2.10", "transformers " + asked["transformers"].rpartition(".")[0])

    def printed(row: Row) -> str:
        return rf'"peak_{row["kind"]}_mib": ([\d.]+)'

    return Job(rows, "t4", releases, folder, words.split(), None, printed, MIB)


def _driven(name: str, folder: Path) -> list[str]:
    return [str(DRIVERS), name, str(folder)]


def _nanovlm(rows: list[Row], sources: Path | None) -> Job:
    """All batch sizes, one after the other, as its README has them."""
    paths = ("data", "models", "measure_vram.py")
    folder = checkout("huggingface/nanoVLM", rows[0]["commit"], paths, sources)
    rows = sorted(rows, key=_batch_size)
    cases = [{"batch_size": _batch_size(row)} for row in rows]

    def printed(row: Row) -> str:
        return rf"^Batch Size {_batch_size(row)}: (?:OOM \(Peak before OOM: )?([\d.]+) MB"

    releases = ("transformers 4.57", "torchvision")
    words = _driven("nanovlm", folder)
    return Job(rows, GPUS[rows[0]["gpu"]], releases, folder, words, cases, printed, MIB)


def _batch_size(row: Row) -> int:
    return int(row["case"].split()[1])


def _fakegpu_process(row: Row) -> tuple[str, str, str]:
    """One process says what Qwen3-8B takes when it is loaded, and at its peak."""
    model = "Qwen3-8B" if row["case"].startswith("Qwen3-8B") else row["case"]
    return row["gpu"], model, row["settings"]


def _fakegpu(rows: list[Row], sources: Path | None) -> Job:
    """One of its workers in the mode for a real GPU."""
    size, *_ = rows[0]["case"].removeprefix("3090Ti ").split()
    sft = not size.startswith("Qwen3-8B")
    case = {
        "model": f"Qwen3.5-{size}" if sft else size,
        "script": f"qwen_{'sft' if sft else 'inference'}_memory_worker.py",
        "words": rows[0]["settings"].partition(";")[0].split(),
    }
    paths = ("fakegpu", "verification")
    folder = checkout("FanBB2333/FakeGPU", rows[0]["commit"], paths, sources)

    def printed(row: Row) -> str:
        peak = "overall_peak" if sft else "inference_peak"
        return rf'"{"model_load_current" if row["case"].endswith("load") else peak}_bytes": (\d+)'

    releases = ("torch 2.8", "transformers 5.12")
    gpu = GPUS[rows[0]["gpu"]]
    return Job(rows, gpu, releases, folder, _driven("fakegpu", folder), [case], printed)


def _litgpt_script(row: Row) -> tuple[str, str]:
    return row["commit"], row["case"].split()[0]


def _litgpt(rows: list[Row], sources: Path | None) -> Job:
    """One of its fine-tuning scripts at a commit."""
    commit = rows[0]["commit"].rpartition("/")[2]
    paths = ("finetune", "generate", "lit_gpt", "scripts")
    folder = checkout("Lightning-AI/litgpt", commit, paths, sources)
    cases = []
    for row in rows:
        script, model, storage, rows_at_once = row["case"].split()
        quantize = None if storage == "None" else storage
        case = {"script": script, "model": model, "quantize": quantize}
        cases.append(case | {"micro_batch_size": int(rows_at_once.removeprefix("mb"))})
    gpu = GPUS[rows[0]["gpu"]]
    return Job(rows, gpu, ("lightning 2.6",), folder, _driven("litgpt", folder), cases)


def _optimum(rows: list[Row], sources: Path | None) -> Job:
    """All that one process of optimum-benchmark counted with one number of users."""
    sizes = re.fullmatch(r".* (\d+) x (\d+) \+ (\d+) \w+", rows[0]["case"]).groups()
    case = dict(zip(("users", "prompt_tokens", "new_tokens"), map(int, sizes), strict=True))
    cases = [case | {"way": row["case"].split()[-1], "kind": row["kind"]} for row in rows]
    releases = ("torch 2.8", "transformers 4.34")
    return Job(rows, GPUS[rows[0]["gpu"]], releases, HERE, _driven("optimum", HERE), cases)


SOURCES = {
    "liger": Source("Liger-Kernel", _liger_script, _liger, {"allocated": (0.0002, 2 * MIB)}),
    "t4": Source(
        "fitcheck-llm",
        _fitcheck_way,
        _fitcheck,
        {
            "allocated, none": (0.0, 0),
            "reserved, none": (0.0, 8 * MIB),
            # of a 4-bit model the threads that load race, on the T4, too
            "allocated, nf4": (0.005, 0),
            "reserved, nf4": (0.08, 0),
        },
    ),
    "nanovlm": Source("nanoVLM", lambda row: (), _nanovlm, {"allocated": (0.001, 0)}),
    "fakegpu": Source("FakeGPU", _fakegpu_process, _fakegpu, {"allocated": (0.0002, 2 * MIB)}),
    "optimum": Source(
        "optimum-benchmark",
        lambda row: (row["case"].rpartition(" ")[0],),
        _optimum,
        {"allocated": (0.001, 2 * MIB), "reserved": (0.01, 2 * MIB)},
    ),
    "litgpt": Source("litgpt", _litgpt_script, _litgpt, {"allocated": (0.003, 0)}),
}
OF = {source.name: source for source in SOURCES.values()}


def checkout(repository: str, commit: str, paths: tuple[str, ...], sources: Path | None) -> Path:
    """Return a folder with the named paths of a repository at a commit."""
    name = repository.replace("/", "--")
    clone = (sources or cache_folder() / "clones") / name
    if not clone.exists():
        url = f"https://github.com/{repository}"
        subprocess.run(["git", "clone", "--quiet", "--bare", url, str(clone)], check=True)
    folder = cache_folder() / "sources" / f"{name}-{commit[:8]}-held"
    if not (folder / ".complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        index = dict(os.environ, GIT_INDEX_FILE=str(folder / ".index"))
        at = ["--git-dir", str(clone / ".git" if (clone / ".git").is_dir() else clone)]
        take = ["git", *at, "--work-tree", str(folder), "checkout", "--quiet", commit, "--", *paths]
        subprocess.run(take, env=index, cwd=folder, check=True)
        (folder / ".complete").touch()
    return folder


def package(name: str, version: str, sources: Path | None) -> Path:
    """Return the unpacked source package of a release."""
    folder = (sources or cache_folder() / "packages") / f"{name.replace('-', '_')}-{version}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _pip("download", "--no-binary", name, "--dest", str(folder.parent), f"{name}=={version}")
        with tarfile.open(f"{folder}.tar.gz") as archive:
            archive.extractall(folder.parent, filter="data")
    return folder


def release(name: str) -> Path:
    """Return the folder with a release, installed if it has to be."""
    folder = cache_folder() / "releases" / name.replace(" ", "-")
    if not (folder / ".complete").exists():
        _pip("install", "--target", str(folder), *RELEASES[name])
        (folder / ".complete").touch()
    return folder


def _pip(*words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", words[0], "-qq", "--no-deps", *words[1:]], check=True
    )
