"""`labkit phantom` on a plain PyTorch script needs PyTorch and three small packages."""

import os
import subprocess
import sys

import pytest

NEEDED = {"filelock", "psutil", "torch"}
#: What PyTorch itself imports, and does not start without.
OF_TORCH = {"mpmath", "sympy", "torchgen", "typing_extensions"}
#: Hides every other package, from the command and the script, and notes those that are loaded.
HIDES = """
import os, sys
from importlib.machinery import PathFinder

ALLOWED = set(os.environ["ALLOWED"].split()) | set(sys.stdlib_module_names) | {"labkit"}

class Allowed:
    @staticmethod
    def find_spec(name, path=None, target=None):
        package = name.partition(".")[0]
        if package not in ALLOWED and not package.startswith("_"):
            return None
        if package not in sys.stdlib_module_names:
            print(package, file=open(os.environ["LOADED"], "a"))
        return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Allowed if finder is PathFinder else finder for finder in sys.meta_path]
"""
SCRIPT = """
import torch
layer = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(3):
    layer(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--gpu", "t4"), 0, "Made of    weights 16.2 KiB"),
        (("--html", "x.html"), 2, "which is missing: pip install"),
    ],
)
def test_a_plain_script_needs_no_other_package(tmp_path, options, code, said):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "sitecustomize.py").write_text(HIDES)
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = {
        "LD_PRELOAD": "",
        "PYTHONPATH": paths,
        "ALLOWED": " ".join(NEEDED | OF_TORCH),
        "LOADED": str(tmp_path / "loaded"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "labkit", "phantom", *options, "train.py"],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    if not code:
        assert set((tmp_path / "loaded").read_text().split()) >= NEEDED
