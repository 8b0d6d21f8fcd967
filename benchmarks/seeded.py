"""Run a script as Python does, but with PyTorch's random numbers seeded.

    python benchmarks/seeded.py SCRIPT ...

For one that draws them without a seed, so that its peaks differ from run to run.
"""

import runpy
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    torch.manual_seed(0)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
