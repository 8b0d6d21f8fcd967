"""launch(): run an experiment on several processes of this machine, as ``torchrun`` starts them.

Each process is a *rank*. It joins a process group, imports the file of the experiment, measures it
like any other, and hands its own run back, trace included. Ranks communicate through NCCL where
this machine has a GPU for each, else through gloo on the CPU. They find each other through a file,
and listen on the loopback interface only. None of them outlives ``launch``.

Limits: one machine. A rank has a separate Python: what the notebook defined or set does not exist
there, except for a pretended GPU. A rank that leaves by ``os._exit(0)`` is waited for in vain.
gloo's two threads hold the tensors of a collective a moment longer than NCCL would: on a busy
machine a peak may count two of them more.
"""

import inspect
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gpumem.experiment import Experiment, check_arguments, name_of
from gpumem.files import SOURCE, TemporaryFolder
from gpumem.hardware import this_machine
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError, positive_int
from gpumem.processes import end_group
from gpumem.runs import Run

MOST_RANKS = 64  # processes of one machine; more can be simulated
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # reaches this machine only


class RankError(RuntimeError):
    """A rank failed, was killed, or the ranks did not end in time. The text says which and how."""


@dataclass(frozen=True)
class Job:
    """What the ranks are to run, in the file ``job`` of their folder: an experiment by its file,
    module and name, what the caller pretends and has imported, and the caller's process id."""

    ranks: int
    file: Path
    module: str
    name: str
    steps: int
    parameters: Mapping[str, Any]
    gpu: Gpu | None
    budget_bytes: int | None
    backend: str
    imports: Sequence[str]
    caller: int
    timeout_seconds: float


def launch(
    experiment: Experiment,
    *,
    ranks: int = 2,
    steps: int = 4,
    timeout_seconds: float = 120,
    cpu: bool = False,
    **parameters: Any,
) -> list[Run]:
    """Measure ``experiment`` on ``ranks`` processes, which torchrun's launcher starts.

    Args:
        experiment: generator function ``experiment(device, ...)`` in a separate file (in a
            notebook: ``%%writefile``). When it is called the process group exists. It can import
            modules of its folder, unless a library has the same name.
        ranks: how many processes; with one, that is still a separate process.
        steps: training steps, as for `measure`.
        timeout_seconds: limit for all of it, the start of the processes included.
        cpu: stay on the CPU even where there are enough GPUs.
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
    parameters.pop("steps", None)  # the rank's own `measure` passes it
    for name, value in parameters.items():
        if not isinstance(value, str | int | float | bool | None):
            raise InputError(
                f"{name} travels to another process: a number, text, True, False or None, not "
                f"{type(value).__name__}"
            )
    if not isinstance(timeout_seconds, int | float) or not 0 < timeout_seconds <= 1e7:
        raise InputError(f"timeout_seconds must be above 0, to 10 million, not {timeout_seconds!r}")
    gpu = this_machine.pretended()
    job = Job(
        ranks=ranks,
        file=_file_of(experiment),
        module=experiment.__module__,
        name=name_of(experiment),
        steps=steps,
        parameters=parameters,
        gpu=gpu,
        budget_bytes=None if gpu else this_machine.current_budget_bytes(),
        backend="nccl" if gpu_for_each(ranks) and not cpu else "gloo",
        imports=[name for name in sys.modules if name.startswith("transformers.models.")],
        caller=os.getpid(),
        timeout_seconds=timeout_seconds,
    )
    with TemporaryFolder() as folder:
        (folder / "job").write_bytes(pickle.dumps(job))
        _run(folder, job)
        return [_read(folder, rank, ranks) for rank in range(ranks)]


def _file_of(experiment: Experiment) -> Path:
    """Return the file that a rank imports, or refuse an experiment that no rank could import."""
    file = inspect.getsourcefile(experiment) if inspect.isfunction(experiment) else None
    top_level = getattr(experiment, "__qualname__", "").isidentifier()
    module = getattr(experiment, "__module__", None)
    if module in (None, "__main__") or not top_level or not file or not os.path.isfile(file):
        raise InputError(
            f"each rank is a separate process and imports {name_of(experiment)!r} from a file: "
            "write it to one (%%writefile steps.py), as a function at the top level, and import it"
        )
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise InputError(f"Python itself has a module {module!r}: give {file} another name")
    return Path(file).resolve()


def gpu_for_each(ranks: int) -> bool:
    """Return whether this machine has a GPU for each of ``ranks`` processes."""
    return this_machine.device().type == "cuda" and torch.cuda.device_count() >= ranks


def _run(folder: Path, job: Job) -> None:
    """Run all ranks to their end; a `RankError` says which of them did not succeed."""
    with open(folder / "log", "wb") as log:
        launcher = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.rank", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=rank_environment(job.ranks, job.backend),
            start_new_session=True,  # this process handles Ctrl-C
        )
        try:
            launcher.wait(job.timeout_seconds)
        except subprocess.TimeoutExpired:
            raise RankError(
                f"the {job.ranks} ranks did not end within {job.timeout_seconds:g} seconds and "
                f"were stopped. {_reason(folder, job.ranks)}"
            ) from None
        finally:
            end_group(launcher)
    if not all((folder / f"{rank}.run").exists() for rank in range(job.ranks)):
        raise RankError(_reason(folder, job.ranks))


def rank_environment(ranks: int, backend: str) -> dict[str, str]:
    """Return the environment of ``torchrun`` and its ``ranks``, which see no GPU under gloo."""
    paths = [str(SOURCE), os.environ.get("PYTHONPATH")]
    environment = {
        # A rank gets its share of the cores.
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",  # a file in the current folder must not replace a library
        # The store through which the ranks meet is a file. torchrun would open a port for another.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
    }
    if backend == "gloo":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # too few GPUs for the ranks: then none
    return environment


def _reason(folder: Path, ranks: int) -> str:
    """Return the first rank's error, which rank was killed, or the end of the log."""
    log = (folder / "log").read_text(encoding="utf-8", errors="replace")
    failed = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", log)
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if failed and int(failed[1]) < 0 and not (folder / f"{failed[2]}.error").exists():
        return f"rank {failed[2]} of {ranks} was killed by signal {-int(failed[1])}"
    if errors:
        text = errors[0].read_text(encoding="utf-8", errors="replace").strip()
        return f"rank {errors[0].stem} of {ranks} failed:\n{text}"
    return f"No rank says why. The end of their log:\n{log[-2000:].strip() or '(empty)'}"


def _read(folder: Path, rank: int, ranks: int) -> Run:
    run = pickle.loads((folder / f"{rank}.run").read_bytes())
    name = f"{run.name}, rank {rank}" if ranks > 1 else run.name
    return replace(run, name=name, parameters={**run.parameters, "ranks": ranks, "rank": rank})
