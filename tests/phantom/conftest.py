"""Tests on a phantom GPU: `make test-phantom` starts them on an A100, others leave them out."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import phantom_gpu
from gpumem.hardware import PHANTOM_VARIABLE

HERE = Path(__file__).parent
if PHANTOM_VARIABLE not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def on_phantom():
    """Run Python on a phantom GPU of another kind; what it prints."""

    def run(gpu: str, *arguments: object, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", phantom_gpu.__name__, gpu, *map(str, arguments)],
            env=os.environ | {"LD_PRELOAD": ""} | variables,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def run(tmp_path, capfd):
    """Run a script's text on phantom GPUs; return the verdict and what it printed."""
    from phantom_gpu.run_script import run_program

    def run(text, *arguments, gpu="rtx-4090", launch=(), **options):
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(text))
        command = [sys.executable, *launch, str(script), *arguments]
        verdict = run_program(command, gpu=gpu, cwd=tmp_path, **options)
        return verdict, capfd.readouterr().out

    return run


BITSANDBYTES_TABLE = 1024
"""Of 256 numbers, which the library keeps on the GPU once it has quantized an optimizer's state."""


@pytest.fixture(autouse=True)
def nothing_stays():
    """After each test the allocator holds nothing, once its cache is emptied."""
    yield
    assert left() == 0


def left() -> int:
    """Bytes that stay allocated after all that a program can free, bitsandbytes' table aside."""
    import torch

    from gpumem.hardware import cuda

    cuda.free_memory()
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert reserved == (2 << 20 if held else 0)
    return 0 if held == BITSANDBYTES_TABLE else held
