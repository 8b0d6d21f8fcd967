"""Scripts that torchrun starts end without an abort, though gloo's threads outlive their group."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat

from gpumem.estimation.recipe import Recipe
from gpumem.estimation.script import script as training_script
from gpumem.ranks.launch import rank_environment
from labkit.exercises.lesson_26 import script as capstone

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
ENDING = (
    "dist.barrier()  # nobody leaves while another still talks\n"
    "dist.destroy_process_group()\n"
    "sys.stdout.flush()\n"
    "os._exit(0)  # gloo's threads outlive the group, and can abort a Python that ends\n"
)
# Collectives that nobody waits for still hold tensors when the script ends, and a mesh keeps the
# group alive: with Python's own ending three launches of four aborted.
BUSY = """
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
for _ in range(200):
    dist.all_reduce(torch.ones(100_000), async_op=True)
print("done")
"""


def written(notebook):
    """Return the files that a lesson writes, whole, by name."""
    files = {}
    for cell in nbformat.read(NOTEBOOKS / notebook, 4).cells:
        if begun := re.match(r"%%writefile (?:-a )?\{.*\}/(\S+)\n", cell.source):
            files[begun[1]] = files.get(begun[1], "") + cell.source[begun.end() :] + "\n"
    return files


def test_every_script_for_torchrun_has_the_ending_that_cannot_abort():
    scripts = {
        "lesson 19": written("19_fsdp.ipynb")["sharded.py"],
        "capstone, given": written("26_capstone_8x80gb.ipynb")["given_job.py"],
        "capstone, solved": capstone(),
        "template": training_script(Recipe(ranks=2), model="SmolLM2-135M"),
    }
    for name, text in scripts.items():
        ending = re.sub(
            r"^    ", "", text[text.rindex("\n", 0, text.rindex("dist.barrier")) + 1 :], flags=re.M
        )
        assert ending.rstrip() + "\n" == ENDING, name


def test_with_it_ranks_end_well_while_gloo_still_holds_tensors(tmp_path):
    path = tmp_path / "busy.py"
    path.write_text(BUSY + ENDING)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    store = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"]
    ended = subprocess.run(
        [*launcher, *store, "--rdzv-endpoint", str(tmp_path / "met"), str(path)],
        env=rank_environment(2, "gloo"),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 2
