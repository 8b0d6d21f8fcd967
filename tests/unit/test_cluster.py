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


@pytest.fixture
def probe(tmp_path):
    path = tmp_path / "probe.py"
    path.write_text(PROBE)
    return path


def environment(**more):
    settings = rank_environment(2, "gloo")
    del settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
    return {**settings, "PYTHON": sys.executable, **more}


def met(printed):
    return sorted(re.findall(r"<rank (\d) of (\d): (.*?)>", printed))


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_slurm_script_with_standins(probe, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in STANDINS.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    # Another port than a real job's: the file is used as it is but for that.
    script = (CLUSTER / "slurm.sbatch").read_text().replace(":29500", f":{free_port()}")
    job = tmp_path / "job.sbatch"
    job.write_text(script)
    given = environment(
        PATH=f"{tools}{os.pathsep}{os.environ['PATH']}",
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="1",
        SLURM_CPUS_PER_TASK="2",
        SLURM_JOB_ID="17",
    )
    printed = run(["bash", str(job), str(probe), "my.txt", "--steps", "3"], given)
    words = "my.txt --steps 3"
    assert met(printed) == [("0", "2", words), ("1", "2", words)]


def run(command, environment):
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.nightly
def test_accelerate_configuration_starts_the_ranks(probe, tmp_path):
    config = yaml.safe_load((CLUSTER / "accelerate.yaml").read_text())
    # The same fields, for two processes of one machine. (Accelerate does not ask for their GPUs.)
    here = {
        "num_machines": 1,
        "num_processes": 2,
        "main_process_ip": "127.0.0.1",
        "main_process_port": free_port(),
    }
    assert set(here) <= set(config)
    path = tmp_path / "here.yaml"
    path.write_text(yaml.safe_dump(config | here))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    printed = run([*launch, str(probe), "my.txt"], environment())
    assert met(printed) == [("0", "2", "my.txt"), ("1", "2", "my.txt")]


def test_skypilot_task_is_a_task():
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    # Named in SkyPilot's documentation of distributed jobs.
    known = {"SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE"}
    assert set(re.findall(r"SKYPILOT_\w+", task["run"])) == known
    done = subprocess.run(["bash", "-n"], input=task["run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert task["file_mounts"]["/checkpoints"]["mode"] == "MOUNT"
