"""Scripts get their answer with the PyTorch that people have, not only with the course's."""

import json
import os
import subprocess
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest

from gpumem.files import PACKAGES
from gpumem.units import KIB

#: CUDA's runtime, for its headers, and what PyTorch itself imports.
HEADERS = {
    "2.6.0": "nvidia-cuda-runtime-cu12==12.4.127",
    "2.7.1": "nvidia-cuda-runtime-cu12==12.6.77",
    "2.9.1": "nvidia-cuda-runtime-cu12==12.8.90",
}
OF_TORCH = ("typing_extensions", "sympy==1.13.3", "mpmath", "jinja2", "markupsafe", "networkx")
NEEDED = ("filelock", "psutil", "fsspec", *OF_TORCH)
TRAIN = """
import torch
net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(2)]).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(5):
    batch = torch.ones(256, 512).cuda()
    loss = net(batch).sum()
    torch.equal(batch, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", HEADERS)
def test_an_older_pytorch_gives_the_same_answer(tmp_path, version):
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    own = {"LD_PRELOAD", "PYTHONPATH", "PYTHONHOME"}  # of the phantom that runs this test
    clean = {name: value for name, value in os.environ.items() if name not in own}
    packages = (f"torch=={version}", HEADERS[version], *NEEDED)
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", *packages]
    subprocess.run(pip, env=clean, check=True)
    [site] = folder.glob("lib/python*/site-packages")
    for place in (*PACKAGES, Path(distribution("gpu-memory-lab")._path)):
        (site / place.name).symlink_to(place)
    (tmp_path / "train.py").write_text(TRAIN)
    command = [python, "-m", "labkit", "phantom", "--gpu", "t4", "--steps", "3", "--json"]
    run = [*command, "train.py"]
    done = subprocess.run(run, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [process] = json.loads(done.stdout)["processes"]
    assert (process["steps"], process["faults"]) == (3, [])
    [gpu] = process["gpus"]
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
