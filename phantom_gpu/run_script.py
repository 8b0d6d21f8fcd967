"""Run a program, unmodified, on phantom GPUs, and say whether it fits and where its memory goes.

    report = run_program([sys.executable, "train.py"], gpu="h100")
    print(report)

Every process of the program that uses a GPU watches itself (`watch_script`) and writes an
answer; here they are gathered and judged.

Limits: collectives return at once, so ranks wait for each other only where Python makes them. A
process that is killed leaves the answer of its last second but one.
"""

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpumem.files import TemporaryFolder
from gpumem.hardware import catalogue
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError
from gpumem.processes import END_SECONDS, descendants, end_group
from gpumem.units import format_bytes
from phantom_gpu.environment import SHARED_VARIABLE, WATCH_VARIABLE, environment
from phantom_gpu.report import HANG_SECONDS, FitReport
from phantom_gpu.report_records import ProcessReport

POLL_SECONDS, PROGRESS_SECONDS = 0.5, 10.0
BUSY_SHARE = 0.1  # a process that waits still uses a little: threads that look after others


def run_program(
    command: Sequence[str],
    *,
    gpu: str | Gpu,
    gpus: int = 1,
    steps: int = 0,
    budget_bytes: int | None = None,
    expandable_segments: bool = False,
    snapshot: str | Path = "",
    record: bool = False,
    trials: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (),
    report: Callable[[str], None] = lambda sentence: None,
    **popen: Any,
) -> FitReport:
    """Run ``command`` on phantom GPUs and return what it did.

    Args:
        command: the program and its arguments; Python is found where this one lies.
        gpu: a GPU of the catalogue, or its name.
        gpus: how many of them, 1 to 16.
        steps: end each process after so many optimizer steps; 0: the program ends by itself.
        budget_bytes: what may be reserved on each GPU, as if others held the rest of it; None: all
            that the driver leaves.
        expandable_segments: have the allocator use them.
        snapshot: a file for PyTorch's own memory snapshot of the last process that ends.
        record: have the answers hold what `phantom_gpu.report_page` draws.
        trials: remedies to try, as `phantom_gpu.watch_script.Orders` has them.
        report: called now and then with a sentence about how far it is.
        popen: more options of `subprocess.Popen`.

    Raises:
        InputError: no such GPU, or no phantom can be made of it here; the program cannot be
            started.
    """
    card = catalogue.gpu(gpu) if isinstance(gpu, str) else gpu
    if budget_bytes is not None and not 0 < budget_bytes <= card.usable_bytes:
        room = format_bytes(card.usable_bytes)
        raise InputError(f"the budget must be more than nothing and at most {card.name}'s {room}")
    started_in = str(Path(popen.get("cwd", ".")).resolve())  # the program may remove it
    with TemporaryFolder() as folder:
        budget_bytes = budget_bytes or card.budget_bytes
        held_bytes = card.usable_bytes - budget_bytes  # by CUDA and, in effect, by others
        variables = environment(replace(card, context_bytes=held_bytes), gpus)
        variables[SHARED_VARIABLE] = f"{card.context_bytes};{folder / 'shared'}"
        here = str(Path(sys.executable).parent)
        variables["PATH"] = os.pathsep.join([here, variables.get("PATH", os.defpath)])
        snapshot = str(Path(snapshot).resolve()) if snapshot else ""
        orders = {
            "folder": str(folder),
            "steps": steps,
            "snapshot": snapshot,
            "record": record,
            "trials": trials,
        }
        variables[WATCH_VARIABLE] = json.dumps(orders)
        variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if expandable_segments:
            variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        try:
            process = subprocess.Popen(list(command), env=variables, **popen)
        except OSError as error:
            raise InputError(f"cannot start {command[0]}: {error.strerror}") from None
        hung, interrupted = _wait(process, folder, report)
        answers = read_answers(folder)
        return FitReport(
            gpu=card,
            gpus=gpus,
            budget_bytes=budget_bytes,
            answers=sorted((a for a in answers if a.gpus), key=lambda answer: answer.rank),
            others=[each for each in answers if (each.error or each.allocator) and not each.gpus],
            folder=started_in,
            returncode=process.returncode,
            hung=hung,
            interrupted=interrupted,
        )


def read_answers(folder: Path) -> list[ProcessReport]:
    """Return the answers that processes have written into ``folder``, in the order in which they
    were last written: that of a launcher comes after those of its ranks.

    They are pickled: the program is the user's own, and runs with all the rights that we have.
    """
    files = sorted(folder.glob("*.answer"), key=lambda file: file.stat().st_mtime_ns)
    return [pickle.loads(file.read_bytes()) for file in files]


def _wait(
    process: subprocess.Popen, folder: Path, report: Callable[[str], None]
) -> tuple[str, bool]:
    """Wait for the program; return the line at which it hung, and whether Ctrl-C stopped it."""
    interrupted = False
    while True:
        try:
            return _line_of_end(process, folder, report), interrupted
        except KeyboardInterrupt:  # the program has got it, too, and ends with its answer
            if interrupted:
                _end(process)
            interrupted = True
        except BaseException:  # SIGTERM, for one: the program ends with us
            _end(process)
            raise


def _line_of_end(process: subprocess.Popen, folder: Path, report: Callable[[str], None]) -> str:
    """Wait for the program, end it if it hangs; return the line at which it hung."""
    said, spoken_at = "", time.monotonic()
    worked, worked_at, looked_at = 0.0, time.monotonic(), time.monotonic()
    waits = False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
            return ""
        now = time.monotonic()
        if now - spoken_at > PROGRESS_SECONDS:
            spoken_at = now
            if (sentence := _progress(folder)) not in ("", said):
                said = sentence
                with contextlib.suppress(OSError):  # nobody may be listening any more
                    report(sentence)
        seconds = _cpu_seconds(process)
        # On a busy machine a process that works may get next to none of a core. One that only looks
        # after others is not met twice in a row.
        waits, waited = _wants_a_core(process), waits
        if seconds - worked > BUSY_SHARE * (now - looked_at) or (waits and waited):
            worked_at = now
        worked, looked_at = seconds, now
        if now - worked_at > HANG_SECONDS:
            line = _line_of_hang(process, folder)
            _end(process)
            return line


def _end(process: subprocess.Popen) -> None:
    """End the program: ask first, so that it ends what it started, then kill what is left."""
    known = descendants(process)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    end_group(process, known)


def _progress(folder: Path) -> str:
    answers = read_answers(folder)
    if not answers:
        return ""
    steps = max(answer.steps for answer in answers)
    most = max((g.peak_reserved_bytes for answer in answers for g in answer.gpus), default=0)
    return f"{steps} step{'s' * (steps != 1)}, {format_bytes(most)} reserved at most"


def _cpu_seconds(process: subprocess.Popen) -> float:
    """Return the processor time that the program and all it started have used."""
    import psutil

    total = 0.0
    try:
        everyone = {*descendants(process), psutil.Process(process.pid)}
    except psutil.Error:  # it has just ended
        return total
    for each in everyone:
        with contextlib.suppress(psutil.Error):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def _wants_a_core(process: subprocess.Popen) -> bool:
    """Return whether a thread of the program runs, or waits for a core (Linux's state R)."""
    for pid in (process.pid, *(each.pid for each in descendants(process))):
        for file in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # it has just ended
                if file.read_text().rpartition(") ")[2].startswith("R"):
                    return True
    return False


def _line_of_hang(process: subprocess.Popen, folder: Path) -> str:
    """Return the line of code that a process of the program says that it is at."""
    alive = {process.pid, *(each.pid for each in descendants(process))}
    for file in sorted(folder.glob("*.stack")):
        if int(file.stem) not in alive:
            continue
        with contextlib.suppress(OSError):  # it has just ended
            os.kill(int(file.stem), signal.SIGUSR1)
        time.sleep(POLL_SECONDS)
        found = re.search(r'File "(.+)", line (\d+)', file.read_text(errors="replace"))
        if found:
            return f"{found[1]}:{found[2]}"
    return "an unknown line"
