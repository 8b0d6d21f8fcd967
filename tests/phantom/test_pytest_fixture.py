"""The fixture `phantom_gpu` in somebody's tests, as docs/CI.md shows it."""

import os
import re
import subprocess
import sys
from pathlib import Path

from phantom_gpu import pytest_plugin

PAGE = Path(__file__).resolve().parents[2] / "docs" / "CI.md"
SCRIPT = """
import sys, torch
layer = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
while True:
    layer(torch.ones(int(sys.argv[2]) << 17, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TOO_LARGE = """

def test_a_module_that_does_not_fit(phantom_gpu):
    verdict = phantom_gpu("-m", "train", "--batch-size", 64, gpu="t4", steps=3)
    assert verdict.fits, verdict
"""


def test_a_script_that_fits_passes_and_one_that_does_not_fails_with_the_verdict(tmp_path):
    [shown] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "test_fit.py").write_text(shown + TOO_LARGE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", pytest_plugin.__name__],
        cwd=tmp_path,
        env=os.environ | {"LD_PRELOAD": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert "= 1 failed, 1 passed in" in done.stdout
    asserted, _, printed = done.stdout.partition("Captured stdout call")
    said = r"It does not fit a phantom NVIDIA T4: .*, it asked for 32\.0 GiB when"
    assert re.search(rf"AssertionError: <{said}", asserted)
    assert re.search(rf"^{said}", printed, re.MULTILINE)
