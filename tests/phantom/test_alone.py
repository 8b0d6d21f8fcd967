"""In an environment with PyTorch and two small packages alone, a plain script gets its answer."""

import importlib.util
import os
import subprocess
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest

NEEDED = ("filelock", "psutil", "torch")
#: What PyTorch itself imports, and does not start without; ``nvidia`` holds CUDA's runtime.
OF_TORCH = ("mpmath", "sympy", "torchgen", "typing_extensions", "nvidia")
OURS = ("gpumem", "labkit", "phantom_gpu")
SCRIPT = """
import torch
layer = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(3):
    layer(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return the Python of an environment that holds these packages and no others."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder, with_pip=False)
    [packages] = folder.glob("lib/python*/site-packages")
    for name in (*NEEDED, *OF_TORCH, *OURS):
        found = importlib.util.find_spec(name)
        place = Path([*(found.submodule_search_locations or []), found.origin][0])
        (packages / place.name).symlink_to(place)
    about = Path(distribution("gpu-memory-lab")._path)  # what pip writes of our packages
    (packages / about.name).symlink_to(about)
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--gpu", "t4"), 0, "workspaces 16.2 MiB"),
        (("--html", "x.html"), 2, "which is missing: pip install"),
    ],
)
def test_a_plain_script_needs_no_other_package(python, tmp_path, options, code, said):
    (tmp_path / "train.py").write_text(SCRIPT)
    own = {"LD_PRELOAD", "PYTHONPATH", "PYTHONHOME"}  # of the phantom that runs this test
    done = subprocess.run(
        [python, "-P", "-m", "labkit", "phantom", *options, "train.py"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name not in own},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert "known_values.py" not in done.stdout  # which is no line of the program's, nor of torch's
