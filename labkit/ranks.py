"""launch(): run an experiment on several processes of this machine, as ``torchrun`` starts them.

Each process is a *rank*. It joins a process group, imports the file in which the experiment
stands, measures it like any other, and hands its own run back, trace included. Ranks talk through
NCCL where this machine has a GPU for each, else through gloo on the CPU.

They find each other through a file, and listen on the loopback interface only. When ``launch``
ends, in whatever way, none of its processes is left; ranks whose launcher is killed end by
themselves within seconds.

Limits: one machine. A rank has its own copy of Python: what the notebook defined or set does not
exist there, but for a pretended GPU.
"""

import inspect
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from labkit import hardware
from labkit.disk import Scratch
from labkit.experiment import Experiment, check_arguments, name_of
from labkit.family import Family
from labkit.memory import (
    Category,
    Event,
    InputError,
    Mark,
    Phase,
    Run,
    Storage,
    Trace,
    Work,
    positive_int,
)

PACKAGE = Path(__file__).resolve().parent
MOST_RANKS = 64  # processes of one machine; a larger world can be simulated
POLL_SECONDS = 0.05


class RankError(RuntimeError):
    """A rank failed, was killed, or the ranks did not end in time. The text says which and how."""


def launch(
    experiment: Experiment,
    *,
    ranks: int = 2,
    steps: int = 4,
    timeout_seconds: float = 120,
    cpu: bool = False,
    **parameters: Any,
) -> list[Run]:
    """Measure ``experiment`` on ``ranks`` processes, started by ``torchrun``.

    Args:
        experiment: generator function ``experiment(device, ...)`` that stands in a file of its
            own (in a notebook: ``%%writefile``). When it is called the process group is there.
            Modules of its folder can be imported, but for names that a library has too.
        ranks: how many processes. One is a world of its own, in a process of its own.
        steps: training steps, as for `measure`.
        timeout_seconds: limit for all of it, the start of the processes included.
        cpu: stay on the CPU where there are enough GPUs, too.
        **parameters: the experiment's own arguments: numbers, text, booleans or None.

    Returns:
        One run per rank, in order, with ``ranks`` and ``rank`` among its parameters.

    Raises:
        InputError: a bad argument, or an experiment that another process could not import.
        RankError: a rank raised an error, ran out of memory alone, was killed, or all of them
            together took longer than ``timeout_seconds``.
    """
    ranks = positive_int(ranks, "ranks", most=MOST_RANKS)
    steps = positive_int(steps, "steps")
    parameters = check_arguments(experiment, parameters, steps=steps)
    parameters.pop("steps", None)  # the rank's own `measure` tells the experiment
    timeout_seconds = _seconds(timeout_seconds)
    card = hardware.pretended()
    with Scratch() as folder:
        order = {
            "file": str(_file_of(experiment)),
            "module": experiment.__module__,
            "name": name_of(experiment),
            "steps": steps,
            "parameters": _plain(parameters),
            "card": asdict(card) if card else None,
            "budget_bytes": None if card else hardware.current_budget_bytes(),
            "backend": "nccl" if gpu_for_each(ranks) and not cpu else "gloo",
            "launcher": os.getpid(),
            "seconds": timeout_seconds,
        }
        (folder / "order.json").write_text(json.dumps(order), encoding="utf-8")
        _run(folder, ranks, timeout_seconds, order["backend"])
        return [_read(folder, rank, ranks) for rank in range(ranks)]


def _seconds(limit: Any) -> float:
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit <= 1e7:
        raise InputError(f"timeout_seconds must be a number above 0, to 10 million, not {limit!r}")
    return limit


def _file_of(experiment: Experiment) -> Path:
    """The file that a rank imports.

    Raises:
        InputError: there is none, the experiment is not at its top level, or the file is called
            as one of Python's own modules, which it would replace in the rank.
    """
    name = getattr(experiment, "__qualname__", "")
    file = inspect.getsourcefile(experiment) if inspect.isfunction(experiment) else None
    module = getattr(experiment, "__module__", None)
    here = module in (None, "__main__")
    if not file or not name.isidentifier() or here or not os.path.isfile(file):
        raise InputError(
            f"each rank is a process of its own and imports {name_of(experiment)!r} from a file: "
            "write it to one (%%writefile steps.py), as a function at the top level, and import it"
        )
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise InputError(f"Python has a module {module!r} of its own: give {file} another name")
    return Path(file).resolve()


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in parameters.items():
        if not isinstance(value, str | int | float | bool | None):
            raise InputError(
                f"{name} travels to another process: a number, text, True, False or None, not "
                f"{type(value).__name__}"
            )
    return dict(parameters)


def gpu_for_each(ranks: int) -> bool:
    """Whether this machine has a GPU for each of so many ranks."""
    import torch

    return hardware.device().type == "cuda" and torch.cuda.device_count() >= ranks


def _run(folder: Path, ranks: int, timeout_seconds: float, backend: str) -> None:
    """All ranks to their end.

    Raises:
        RankError: not all of them ended well.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}",
        "--max-restarts=0", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={folder / 'rendezvous'}", f"--rdzv-id={folder.name}",
        f"--log-dir={folder / 'logs'}",
        "-m", "labkit.rank", str(folder),
    ]  # fmt: skip
    with open(folder / "log", "wb") as log:
        head = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=rank_environment(ranks, backend),
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        family = Family(head)
        try:
            deadline = time.monotonic() + timeout_seconds
            while head.poll() is None and time.monotonic() < deadline:
                family.look()
                time.sleep(POLL_SECONDS)
            overdue = head.poll() is None
        finally:
            family.kill()
            head.wait()
    if overdue:
        raise RankError(
            f"the {ranks} ranks did not end within {timeout_seconds:g} seconds and were stopped. "
            f"{_last_words(folder, ranks)}"
        )
    if not all((folder / f"{rank}.json").exists() for rank in range(ranks)):
        raise RankError(_last_words(folder, ranks))


def rank_environment(ranks: int, backend: str) -> dict[str, str]:
    """This process's environment variables, and what ``torchrun`` and its ranks are to know.

    Args:
        ranks: how many share this machine's cores.
        backend: ``"nccl"``, or ``"gloo"``, which sees no GPU.
    """
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {
        # A rank gets its share of the cores; torchrun gives it one thread, and says so at length.
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")])
        ),
        "PYTHONSAFEPATH": "1",  # a file in the current folder must not stand in for a library
        # The store that finds the ranks is a file. torchrun would open a port for another one.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": _loopback(),
        "NCCL_SOCKET_IFNAME": _loopback(),
    }
    if backend == "gloo":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # too few GPUs for the ranks: then none
    return environment


def _loopback() -> str:
    """The name of the interface that reaches this machine only (``lo`` on Linux)."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return "lo"


def _last_words(folder: Path, ranks: int) -> str:
    """Why it ended: the first rank with an error, or one that was killed, or the end of the log."""
    log = (folder / "log").read_text(encoding="utf-8", errors="replace")
    failed = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", log)
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if failed and int(failed[1]) < 0 and not (folder / f"{failed[2]}.error").exists():
        return f"rank {failed[2]} of {ranks} was killed by signal {-int(failed[1])}"
    if errors:
        text = errors[0].read_text(encoding="utf-8", errors="replace").strip()
        return f"rank {errors[0].stem} of {ranks} failed:\n{text}"
    return f"No rank says why. The end of their log:\n{log[-2000:].strip() or '(empty)'}"


# --- a run on its way from one process to another --------------------------------------------


def write(run: Run, path: Path) -> None:
    """Store ``run`` with its trace, in one step: another process is waiting for the file."""
    record: dict[str, Any] = {"run": run.to_dict()}
    if run.trace is not None:
        record["trace"] = {
            "device": run.trace.device,
            "storages": run.trace.storages,
            "events": run.trace.events,
            "marks": run.trace.marks,
            "work": run.trace.work,
        }
    waiting = path.with_suffix(".part")
    waiting.write_text(json.dumps(record), encoding="utf-8")
    os.replace(waiting, path)


def _read(folder: Path, rank: int, ranks: int) -> Run:
    record = json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
    run = Run.from_dict(record["run"])
    trace = _trace(record["trace"]) if "trace" in record else None
    name = f"{run.name}, rank {rank}" if ranks > 1 else run.name
    parameters = {**run.parameters, "ranks": ranks, "rank": rank}
    return replace(run, name=name, parameters=parameters, trace=trace)


def _trace(record: Mapping[str, Any]) -> Trace:
    storages = tuple(
        Storage(nbytes, Category(category), device, operator, module, name, Phase(phase),
                tuple(shape), dtype)
        for nbytes, category, device, operator, module, name, phase, shape, dtype
        in record["storages"]
    )  # fmt: skip
    events = tuple(
        Event(number, change, Phase(phase)) for number, change, phase in record["events"]
    )
    marks = tuple(Mark(*mark) for mark in record["marks"])
    work = {name: Work(*counts) for name, counts in record["work"].items()}
    return Trace(record["device"], storages, events, marks, work)
