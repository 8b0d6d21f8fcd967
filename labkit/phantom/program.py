"""Run a program, unmodified, on phantom GPUs, and say whether it fits and where its memory goes.

    verdict = run_program([sys.executable, "train.py"], gpu="h100")
    print(verdict)

Every process of the program that uses a GPU watches itself (`labkit.phantom.watch`) and writes an
answer; here they are gathered and judged.

Limits: collectives return at once, so ranks wait for each other only where Python makes them. A
process that is killed leaves the answer of its last second but one.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.hardware import catalogue
from labkit.hardware.bound import least_seconds
from labkit.hardware.catalogue import Gpu
from labkit.phantom.answer import Answer, GpuAnswer, StepWork, UnknownValue
from labkit.phantom.process import environment
from labkit.support.files import read_file
from labkit.support.processes import END_SECONDS, descendants, end_group
from labkit.support.scratch import TemporaryFolder
from labkit.trace import ROUNDING
from labkit.values import MIB, WATCH_VARIABLE, InputError, format_bytes, table_lines

POLL_SECONDS, PROGRESS_SECONDS = 0.5, 10.0
#: A process that waits still uses a little: threads that look after others.
HANG_SECONDS, BUSY_SHARE = 120.0, 0.1
MOST_ROWS, MOST_OF_ERROR = 12, 600
ENDED_WELL = ("finished", "stopped")


@dataclass(frozen=True)
class Verdict:
    """What a program did on phantom GPUs.

    Attributes:
        gpu, gpus: which, and how many.
        budget_bytes: what it may reserve on each.
        answers: of each process that used a GPU, by rank.
        folder: where the program ran.
        returncode: the program's own.
        hung: the line at which it hung; empty if it did not.
        interrupted: it was stopped by Ctrl-C.
    """

    gpu: Gpu
    gpus: int
    budget_bytes: int
    answers: list[Answer]
    folder: str
    returncode: int
    hung: str = ""
    interrupted: bool = False

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that was reserved on one GPU."""
        return max((each.peak_reserved_bytes for _, each in self.by_gpu()), default=0)

    @property
    def out_of_memory(self) -> bool:
        """Whether a process ended for lack of GPU memory."""
        return any(answer.ended == "out of memory" for answer in self.answers)

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where the program did not get far enough to say."""
        if self.out_of_memory or self.peak_reserved_bytes > self.budget_bytes:
            return False
        well = all(answer.ended in ENDED_WELL for answer in self.answers)
        return True if self.answers and well and not self.hung and not self.returncode else None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        return {
            "fits": self.fits,
            "gpu": self.gpu.key,
            "gpus": self.gpus,
            "budget_bytes": self.budget_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "returncode": self.returncode,
            "hung": self.hung,
            "interrupted": self.interrupted,
            "processes": [asdict(answer) for answer in self.answers],
        }

    def by_gpu(self) -> list[tuple[Answer, GpuAnswer]]:
        """Return each GPU that a process used, with that process."""
        return [(answer, gpu) for answer in self.answers for gpu in answer.gpus]

    def a_step(self) -> str:
        """Return what a step computes and moves, and its least seconds; nothing if not counted."""
        answer = self.worst()[0] if self.by_gpu() else None
        if answer is None or answer.work is None:
            return ""
        return _work(answer.work, self.least_seconds(answer))

    def least_seconds(self, answer: Answer) -> float | None:
        """Return a bound of a step's seconds, as if all ranks were on one server; None where it was
        not counted, or a process used several GPUs, which may work at the same time."""
        work = answer.work
        if work is None or len(answer.gpus) > 1:
            return None
        return least_seconds(
            self.gpu, work.flops, work.moved_bytes, work.crossing_bytes, work.sent_bytes
        )

    def __str__(self) -> str:
        lines = [self.headline(), ""]
        if len(self.by_gpu()) > 1:
            lines += [*self._gpu_lines(), ""]
        if self.answers and self.by_gpu():
            answer, gpu = self.worst()
            lines += _held_lines(answer, gpu, self.a_step())
            lines += _unknown_lines(answer.unknown)
        return "\n".join(lines).rstrip().replace(f"{self.folder}{os.sep}", "")

    def __repr__(self) -> str:
        return f"<{self.headline()}>"

    def worst(self) -> tuple[Answer, GpuAnswer]:
        """Return the process that ran out of memory, else the one that reserved the most."""
        return max(
            self.by_gpu(),
            key=lambda pair: (pair[0].ended == "out of memory", pair[1].peak_reserved_bytes),
        )

    def headline(self) -> str:
        """Return the verdict as one sentence."""
        many = f"{self.gpus} × " if self.gpus > 1 else ""
        where = (
            f"{many}a phantom {self.gpu.name}" if not many else f"{many}{self.gpu.name} (phantom)"
        )
        room = format_bytes(self.budget_bytes)
        most = format_bytes(self.peak_reserved_bytes)
        if self.fits:
            left = format_bytes(self.budget_bytes - self.peak_reserved_bytes)
            return f"It fits {where}: {most} of {room} reserved at most, {left} left."
        if self.out_of_memory:
            _, gpu = self.worst()
            asked = format_bytes(gpu.failed.nbytes) if gpu.failed else "more memory"
            when = gpu.failed.when if gpu.failed else gpu.allocated_at
            return (
                f"It does not fit {where}: {when}, it asked for {asked} when "
                f"{format_bytes(gpu.peak_reserved_bytes)} of {room} were reserved."
            )
        if self.fits is False:
            return f"It does not fit {where}: {most} reserved at most, {room} allowed."
        return f"No answer for {where}: {self._why_none()}"

    def _why_none(self) -> str:
        if self.interrupted:
            return "it was interrupted. So far:"
        if self.hung:
            return f"nothing happened for {HANG_SECONDS:.0f} s; it was stopped at {self.hung}."
        for answer in self.answers:
            if answer.error:
                line = shortest(answer.error_stack[0]) if answer.error_stack else "its end"
                error = textwrap.shorten(answer.error, MOST_OF_ERROR).rstrip(".")
                return f"it stopped at {line} with {error}." + " Until then:" * bool(answer.gpus)
        if not self.answers:
            return f"it used no GPU, and ended with exit code {self.returncode}."
        return f"it ended with exit code {self.returncode}, without a word."

    def _gpu_lines(self) -> list[str]:
        rows = [
            (
                str(answer.rank),
                str(gpu.index),
                format_bytes(gpu.peak_allocated_bytes),
                format_bytes(gpu.peak_reserved_bytes),
                f"{answer.ended}, {answer.steps} steps",
            )
            for answer, gpu in self.by_gpu()
        ]
        return table_lines(("rank", "GPU", "allocated", "reserved", "process"), rows)


def run_program(
    command: Sequence[str],
    *,
    gpu: str,
    gpus: int = 1,
    steps: int = 0,
    budget_bytes: int | None = None,
    expandable_segments: bool = False,
    snapshot: str | Path = "",
    record: bool = False,
    report: Callable[[str], None] = lambda sentence: None,
    **popen: Any,
) -> Verdict:
    """Run ``command`` on phantom GPUs and return what it did.

    Args:
        command: the program and its arguments; Python is found where this one lies.
        gpu: a GPU of the catalogue.
        gpus: how many of them, 1 to 16.
        steps: end each process after so many optimizer steps; 0: the program ends by itself.
        budget_bytes: what may be reserved on each GPU; None: all that the driver leaves.
        expandable_segments: have the allocator use them.
        snapshot: a file for PyTorch's own memory snapshot of the last process that ends.
        record: have the answers hold what `labkit.phantom.page` draws.
        report: called now and then with a sentence about how far it is.
        popen: more options of `subprocess.Popen`.

    Raises:
        InputError: no such GPU, or no phantom can be made of it here; the program cannot be
            started.
    """
    card = catalogue.gpu(gpu)
    if budget_bytes is not None and not 0 < budget_bytes <= card.usable_bytes:
        room = format_bytes(card.usable_bytes)
        raise InputError(f"the budget must be more than nothing and at most {card.name}'s {room}")
    with TemporaryFolder() as folder:
        variables = environment(card, gpus)
        here = str(Path(sys.executable).parent)
        variables["PATH"] = os.pathsep.join([here, variables.get("PATH", os.defpath)])
        snapshot = str(Path(snapshot).resolve()) if snapshot else ""
        orders = {"folder": str(folder), "steps": steps, "snapshot": snapshot, "record": record}
        variables[WATCH_VARIABLE] = json.dumps(orders)
        variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if expandable_segments:
            variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        try:
            process = subprocess.Popen(list(command), env=variables, **popen)
        except OSError as error:
            raise InputError(f"cannot start {command[0]}: {error.strerror}") from None
        hung, interrupted = _wait(process, folder, report)
        return Verdict(
            gpu=card,
            gpus=gpus,
            budget_bytes=budget_bytes or card.budget_bytes,
            answers=read_answers(folder),
            folder=str(Path(popen.get("cwd", ".")).resolve()),
            returncode=process.returncode,
            hung=hung,
            interrupted=interrupted,
        )


def read_answers(folder: Path) -> list[Answer]:
    """Return the answers that processes have written into ``folder``, by rank."""
    files = sorted(folder.glob("*.json"))
    answers = [read_file(file, Answer.from_dict, "an answer") for file in files]
    used = [answer for answer in answers if answer.gpus]  # a launcher, for one, uses none
    return sorted(used or [a for a in answers if a.error], key=lambda answer: answer.rank)


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
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
            return ""
        now = time.monotonic()
        if now - spoken_at > PROGRESS_SECONDS:
            spoken_at = now
            if (sentence := _progress(folder)) not in ("", said):
                report(sentence)
                said = sentence
        seconds = _cpu_seconds(process)
        if seconds - worked > BUSY_SHARE * (now - looked_at):
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
    return f"{steps} steps, {format_bytes(most)} reserved at most"


def _cpu_seconds(process: subprocess.Popen) -> float:
    """Return the processor time that the program and all it started have used."""
    import psutil

    total = 0.0
    for each in {*descendants(process), psutil.Process(process.pid)}:
        try:
            times = each.cpu_times()
        except psutil.Error:  # it has just ended
            continue
        total += times.user + times.system
    return total


def _line_of_hang(process: subprocess.Popen, folder: Path) -> str:
    """Return the line of code that a process of the program says that it is at."""
    for file in sorted(folder.glob("*.stack")):
        os.kill(int(file.stem), signal.SIGUSR1)
        time.sleep(POLL_SECONDS)
        for line in file.read_text(errors="replace").splitlines():
            if '"' in line:
                name, number = line.split('"')[1], line.split("line ")[1].split()[0]
                return shortest(f"{name}:{number}")
    return "an unknown line"


# --- as text --------------------------------------------------------------------------------------


def shortest(line: str) -> str:
    """Return ``file:line`` as it is, or from the folder of installed libraries."""
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in line:
            return line.rpartition(folder)[2]
    return line


def _held_lines(answer: Answer, gpu: GpuAnswer, a_step: str) -> list[str]:
    at = gpu.allocated_at
    line = f" ({shortest(at.line)})" if at.line else ""
    unused = format_bytes(gpu.peak_reserved_bytes - gpu.peak_allocated_bytes)
    made_of = ", ".join(
        f"{name} {format_bytes(nbytes)}"
        for name, nbytes in gpu.made_of.items()
        if nbytes and (name != ROUNDING or nbytes > gpu.peak_allocated_bytes / 100)
    )
    peak = f"{format_bytes(gpu.peak_allocated_bytes)} allocated, {at}{line}"
    lines = [f"  Peak       {peak}; {unused} more reserved"]
    lines.append(f"  Made of    {made_of}")
    lines.append(f"  Steps      {answer.steps}")
    if answer.weights_not_read:
        names = ", ".join(answer.weights_not_read)
        lines.append(f"  Weights    of {names} were not read: they are zeros")
    if answer.tokenizers_stood_in:
        names = ", ".join(answer.tokenizers_stood_in)
        lines.append(f"  Tokens     not of {names}'s own tokenizer: texts have other lengths")
    if gpu.growth_bytes:
        at = shortest(gpu.growth[0].users_line)
        grown = format_bytes(gpu.growth_bytes)
        lines.append(f"  Growth     each step leaves {grown} behind, most from {at}")
    if gpu.retries:
        errors = f", of which {gpu.errors} failed all the same" if gpu.errors else ""
        times = "once" if gpu.retries == 1 else f"{gpu.retries} times"
        lines.append(f"  Allocator  gave its cache back {times} for a request{errors}")
    host = f"{format_bytes(answer.host_bytes)} of memory"
    if answer.pinned_bytes > MIB:
        host += f", {format_bytes(answer.pinned_bytes)} of it pinned"
    lines.append(f"  Host       {host}; the GPU's memory takes none of it")
    if a_step:
        lines.append(f"  A step     {a_step}")
    if gpu.failed is not None and answer.ended == "out of memory":
        lines += ["", "  The request that failed came from"]
        lines += [f"    {shortest(each)}" for each in gpu.failed.stack[:6]]
    rows = [
        (
            format_bytes(holder.nbytes),
            str(holder.blocks),
            holder.category,
            _place(holder.module, holder.line, holder.users_line),
        )
        for holder in gpu.holders[:MOST_ROWS]
    ]
    lines += ["", *table_lines(("bytes", "blocks", "what", "where"), rows), ""]
    if gpu.changes:
        lines.append("  What would lower the peak most, by its own record, each alone")
        lines += [f"    about {format_bytes(c.nbytes)}: {c.what}" for c in gpu.changes]
        lines.append("")
    return lines


def _work(work: StepWork, seconds: float | None) -> str:
    text = f"computes {sum(work.flops.values()) / 1e12:.4g} TFLOP, moves {_gb(work.moved_bytes)}"
    if work.crossing_bytes:
        text += f", {_gb(work.crossing_bytes)} more over the link to the host"
    if work.sent_bytes:
        text += f", sends {_gb(work.sent_bytes)} to other ranks"
    if seconds is None:
        return text
    return f"{text}: at least {seconds:.3g} s, by the GPU's peak rates"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.4g} GB"


def _place(module: str, line: str, users_line: str) -> str:
    lines = dict.fromkeys(shortest(each) for each in (line, users_line) if each)
    return ", ".join(filter(None, [module, " from ".join(lines)]))


def _unknown_lines(unknown: Sequence[UnknownValue]) -> list[str]:
    if not unknown:
        return []
    lines = ["  Nothing is computed: these values were read as if all were 0."]
    for value in unknown[:5]:
        lines.append(f"    {shortest(value.line)}: {value.what}, {value.times} times")
    return lines
