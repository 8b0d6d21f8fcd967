"""Scripts get their answer in the environments that people have, not only in the course's."""

import json
import os
import shutil
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest

from gpumem.files import PACKAGES
from gpumem.units import KIB

#: Python, PyTorch, CUDA's runtime for its headers, and what the scripts of transformers need.
ENVIRONMENTS = {
    "torch 2.6": ("3.11", "torch==2.6.0", "nvidia-cuda-runtime-cu12==12.4.127"),
    "transformers 4.48": (
        "3.11",
        *("torch==2.7.1", "nvidia-cuda-runtime-cu12==12.6.77", "transformers==4.48.3"),
        *("tokenizers==0.21.4", "peft==0.14.0", "accelerate==1.3.0"),
    ),
    "transformers 4.57": (
        "3.11",
        *("torch==2.9.1", "nvidia-cuda-runtime-cu12==12.8.90", "transformers==4.57.6"),
        *("tokenizers==0.22.2", "peft==0.18.1", "accelerate==1.12.0"),
    ),
    "Python 3.12": ("3.12", "torch==2.9.1", "nvidia-cuda-runtime-cu12==12.8.90"),
    "Python 3.13": ("3.13", "torch==2.9.1", "nvidia-cuda-runtime-cu12==12.8.90"),
}
OF_TORCH = ("typing_extensions", "sympy==1.13.3", "mpmath", "jinja2", "markupsafe", "networkx")
NEEDED = ("filelock", "psutil", "fsspec", *OF_TORCH)
OF_HUB = ("huggingface_hub==0.36.2", "requests", "certifi", "charset_normalizer", "idna", "urllib3")
OF_TRANSFORMERS = ("numpy", "packaging", "pyyaml", "regex", "safetensors", "tqdm", *OF_HUB)
TRAIN = """
import torch
net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(2)]).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(5):
    batch = torch.ones(256, 512).cuda()
    loss = net(batch).sum()
    torch.equal(batch, batch)
    (batch > 0).prod(dim=0)  # a kernel that PyTorch compiles when it is called
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FULL = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

name = "HuggingFaceTB/SmolLM2-135M"
model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float32)
if "lora" in sys.argv:
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
assert len(AutoTokenizer.from_pretrained(name)) == 49_152
row = dict.fromkeys(("input_ids", "labels"), torch.zeros(64, dtype=torch.int64))
kept = dict(max_steps=3, save_strategy="no", report_to=[], optim="adamw_torch")
options = TrainingArguments("out", **kept)
Trainer(model=model, args=options, train_dataset=[row] * 32).train()
"""


@pytest.fixture(params=ENVIRONMENTS)
def environment(request, tmp_path):
    """Build an environment and return a function that gives the answer for a script in it."""
    version, *packages = ENVIRONMENTS[request.param]
    python = shutil.which(f"python{version}")
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    own = {"LD_PRELOAD", "PYTHONPATH", "PYTHONHOME"}  # of the phantom that runs this test
    clean = {name: value for name, value in os.environ.items() if name not in own}
    clean |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], env=clean, check=True)
    python = tmp_path / "venv" / "bin" / "python"
    packages += [*NEEDED, *(OF_TRANSFORMERS if len(packages) > 2 else [])]
    pip = [python, "-m", "pip", "install", "-qq", "--no-deps", *packages]
    subprocess.run(pip, env=clean, check=True)
    [site] = tmp_path.glob("venv/lib/python*/site-packages")
    for place in (*PACKAGES, Path(distribution("gpu-memory-lab")._path)):
        (site / place.name).symlink_to(place)

    def answer(text: str, *arguments: str) -> dict:
        (tmp_path / "train.py").write_text(text)
        command = [python, "-m", "labkit", "phantom", "--gpu", "t4", "--steps", "3", "--json"]
        run = [*command, "train.py", *arguments]
        done = subprocess.run(run, cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        [process] = json.loads(done.stdout)["processes"]
        assert (process["steps"], process["faults"]) == (3, [])
        return process

    answer.has_transformers = len(packages) > len(NEEDED) + 2
    return answer


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_an_environment_of_the_users_gives_the_right_answer(environment):
    [gpu] = environment(TRAIN)["gpus"]
    weights = 2 * 4 * (512 + 1) * 512
    exact = {
        "weights": weights,
        "gradients": weights,
        "optimizer": 2 * weights,
        "inputs": 512 * KIB,
    }
    assert {name: gpu["made_of"].get(name) for name in exact} == exact
    assert "unattributed" not in gpu["made_of"]
    assert gpu["allocated_at"]["phase"] == "optimizer"
    if not environment.has_transformers:
        return
    model, lora = 4 * 134_515_008, 4 * 8 * 30 * (2 * 576 + 576 + 192)
    for arguments, trained in (((), model), (("lora",), lora)):
        process = environment(FULL, *arguments)
        name = "HuggingFaceTB/SmolLM2-135M"
        assert process["weights_not_read"] == process["tokenizers_stood_in"] == [name]
        made_of = process["gpus"][0]["made_of"]
        assert made_of["weights"] == model + (lora if arguments else 0)
        assert made_of["optimizer"] == 2 * trained
        assert made_of.get("unattributed", 0) <= 16  # sums of losses, Trainer's own
