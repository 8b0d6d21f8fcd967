"""The files for clusters, as far as one machine can try them."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gpumem.ranks.launch import rank_environment

CLUSTER = Path(__file__).resolve().parents[2] / "docs" / "cluster"
PROBE = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
print(f"<rank {dist.get_rank()} of {dist.get_world_size()}: {' '.join(sys.argv[1:])}>", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""
STANDINS = {
    "scontrol": '#!/bin/sh\ntest "$3" = "node[1-2]" && printf "127.0.0.1\\nother\\n"\n',
    # Each task of srun runs the same command; two here, as on two machines.
    "srun": '#!/bin/sh\nshift\n"$@" & first=$!\n"$@" & second=$!\nwait $first && wait $second\n',
    "torchrun": '#!/bin/sh\nexec "$PYTHON" -m torch.distributed.run --local-addr 127.0.0.1 "$@"\n',
}


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_slurm_script_with_standins(tmp_path):
    for name, text in STANDINS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Another port than a real job's: the file is used as it is but for that.
    script = (CLUSTER / "slurm.sbatch").read_text().replace(":29500", f":{port}")
    (tmp_path / "job.sbatch").write_text(script)
    (tmp_path / "probe.py").write_text(PROBE)
    settings = rank_environment(2, "gloo")
    del settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
    slurm = "JOB_NODELIST=node[1-2] NNODES=2 GPUS_ON_NODE=1 CPUS_PER_TASK=2 JOB_ID=17"
    settings |= {f"SLURM_{each.split('=')[0]}": each.split("=")[1] for each in slurm.split()}
    settings |= {"PYTHON": sys.executable, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "job.sbatch", "probe.py", "my.txt", "--steps", "3"]
    done = subprocess.run(
        command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    words = "my.txt --steps 3"
    found = sorted(re.findall(r"<rank (\d) of (\d): (.*?)>", done.stdout))
    assert found == [("0", "2", words), ("1", "2", words)]


def test_skypilot_task_is_a_task():
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    # Named in SkyPilot's documentation of distributed jobs.
    known = {"SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE"}
    assert set(re.findall(r"SKYPILOT_\w+", task["run"])) == known
    done = subprocess.run(["bash", "-n"], input=task["run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert task["file_mounts"]["/checkpoints"]["mode"] == "MOUNT"
