"""The ranks of one `launch`: ``python -m gpumem.ranks.rank FOLDER`` starts them all.

torchrun's launcher starts the processes. Each reads FOLDER/job, measures the experiment inside a
process group, and writes FOLDER/N.run or FOLDER/N.error (the end of a traceback).

On the CPU they are forked from a process that has imported what they need: importing PyTorch and
transformers takes longer than a small experiment. Limits: as for ``gpumem.ranks.launch``.
"""

import contextlib
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import psutil
import torch
import torch.distributed as dist
import torch.distributed.tensor  # before the tracker, which leaves its rehearsals out
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gpumem.hardware import this_machine
from gpumem.measurement import measure
from gpumem.ranks.launch import Job
from gpumem.runs import Run

FRAMES = 6  # of a traceback: the experiment's own, not the launcher's
GRACE_SECONDS = 5  # for the other ranks to run out of memory as well
BLAME_SECONDS = 1  # the launcher looks ten times a second


def main(folder: Path) -> int:
    """Start all ranks of the job in ``folder``, wait for them and return the exit status."""
    job = pickle.loads((folder / "job").read_bytes())
    for name in job.imports:
        importlib.import_module(name)
    # A process that has asked for GPUs must not be forked.
    forked = job.backend == "gloo" and sys.platform == "linux"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.ranks,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint=str(folder / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        max_restarts=0,
        start_method="fork" if forked else "spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
    )
    try:
        elastic_launch(config, run_rank)(folder)
    except ChildFailedError:  # the log and the ranks' files say why
        return 1
    return 0


def run_rank(folder: Path) -> None:
    """Run the job as the rank that the environment says; leave with status 1 if it fails."""
    # The launcher's handler comes along in a fork, and would wait for a collective to end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not _succeeds(folder):
        sys.exit(1)


def _succeeds(folder: Path) -> bool:
    job = pickle.loads((folder / "job").read_bytes())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    above = [psutil.Process(job.caller), psutil.Process(os.getppid())]
    threading.Thread(target=_end_with, args=(above,), daemon=True).start()
    try:
        run = _measured(job, folder, rank, ranks)
    except BaseException:  # distributed checkpoints raise one that is no Exception
        text = traceback.format_exc(limit=-FRAMES, chain=False)
        (folder / f"{rank}.error").write_text(text, encoding="utf-8")
        # A killed rank breaks the others' connections: let the launcher see it end before them.
        time.sleep(BLAME_SECONDS)
        return False
    waiting = folder / f"{rank}.part"
    waiting.write_bytes(pickle.dumps(run))
    os.replace(waiting, folder / f"{rank}.run")  # in one step: other ranks count these files
    if run.oom is None:
        return True
    (folder / f"{rank}.error").write_text(str(run.oom), encoding="utf-8")
    deadline = time.monotonic() + GRACE_SECONDS
    while len(list(folder.glob("*.run"))) < ranks and time.monotonic() < deadline:
        time.sleep(0.05)
    return False  # the others may wait for this rank forever: this ends them


def _measured(job: Job, folder: Path, rank: int, ranks: int) -> Run:
    if job.backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store = dist.FileStore(str(folder / "store"), ranks)
    limit = timedelta(seconds=job.timeout_seconds)
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    experiment = getattr(_module(job.module, job.file), job.name)
    with this_machine.pretend(job.gpu, budget_bytes=job.budget_bytes):
        run = measure(experiment, steps=job.steps, **job.parameters)
    if run.oom is None:
        dist.destroy_process_group()  # waits for the others, who may never come after a failure
    return run


def _module(name: str, path: Path) -> ModuleType:
    """Import the file as the module ``name``, with its folder or package on the path."""
    levels = name.count(".") + 1 if path.stem == "__init__" else name.count(".")
    top = path.parents[levels]
    sys.path.append(str(top))  # at the end: what is in there must not replace a library
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _end_with(above: list[psutil.Process]) -> None:
    """End this process, and those of its group, when one of the processes above it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in above):
            time.sleep(1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
