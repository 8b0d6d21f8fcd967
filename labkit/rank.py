"""One rank of `launch`: ``torchrun ... -m labkit.rank FOLDER`` runs this in each process.

Reads FOLDER/order.json, measures the experiment inside a process group, and writes FOLDER/N.json
(the run) or FOLDER/N.error (the end of a traceback). Limits: as for ``labkit.ranks``.
"""

import contextlib
import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor  # before the tracker, which leaves its rehearsals out

from labkit import hardware
from labkit.measure import measure
from labkit.memory import Run
from labkit.ranks import write

FRAMES = 6  # of a traceback: the experiment's own, not the launcher's
GRACE_SECONDS = 5  # for the other ranks to run out of memory as well


def main(folder: Path) -> int:
    """Do as ordered; the process's exit status."""
    order = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    threading.Thread(target=_end_with, args=(order["launcher"],), daemon=True).start()
    try:
        run = _measured(order, folder, rank, ranks)
    except BaseException:  # distributed checkpoints raise one that is no Exception
        text = traceback.format_exc(limit=-FRAMES, chain=False)
        (folder / f"{rank}.error").write_text(text, encoding="utf-8")
        return 1
    write(run, folder / f"{rank}.json")
    if run.oom is None:
        return 0
    (folder / f"{rank}.error").write_text(str(run.oom), encoding="utf-8")
    deadline = time.monotonic() + GRACE_SECONDS
    while len(list(folder.glob("*.json"))) <= ranks and time.monotonic() < deadline:  # and order's
        time.sleep(0.05)
    return 1  # the others may wait for this rank for ever: this ends them


def _measured(order: dict[str, Any], folder: Path, rank: int, ranks: int) -> Run:
    if order["backend"] == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store = dist.FileStore(str(folder / "store"), ranks)
    limit = timedelta(seconds=order["seconds"])
    dist.init_process_group(order["backend"], store=store, rank=rank, world_size=ranks,
                            timeout=limit)  # fmt: skip
    experiment = getattr(_module(order["module"], Path(order["file"])), order["name"])
    budget = {"name": _card(order["card"]), "budget_bytes": order["budget_bytes"]}
    with hardware.pretend(**budget) if any(budget.values()) else contextlib.nullcontext():
        run = measure(experiment, steps=order["steps"], **order["parameters"])
    if run.oom is None:
        dist.destroy_process_group()  # waits for the others, who may never come after a failure
    return run


def _card(fields: dict[str, Any] | None) -> hardware.Gpu | None:
    if fields is None:
        return None
    capability = fields["compute_capability"]  # a list, after its journey
    return hardware.Gpu(**fields | {"compute_capability": capability and tuple(capability)})


def _module(name: str, path: Path) -> ModuleType:
    """The file as the module ``name``, with the other modules of its folder or package in reach."""
    top = path.parents[name.count(".") + (path.stem == "__init__")]
    sys.path.append(str(top))  # at the end: what lies there must not stand in for a library
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _end_with(launcher: int) -> None:
    """End this process, what it started, and torchrun, when the launcher is gone."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(launcher)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(1)
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process().parent()
        if parent and "torch.distributed.run" in parent.cmdline():
            parent.kill()  # the folder is gone as well, and it would wait for the store in there
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
