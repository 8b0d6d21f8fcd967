"""The report about a program on phantom GPUs: does it fit, and what holds the memory.

`FitReport.sections` lists its parts. ``str(report)`` writes them as text, `report_page` as
HTML. All GPUs are in one table; the rest is about the one that ran out of memory, else the one on
which the most was reserved.
"""

import linecache
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gpumem.hardware.catalogue import Gpu
from gpumem.hardware.least_seconds import least_seconds
from gpumem.trace import ROUNDING, WITHOUT_GRADIENTS, Phase
from gpumem.units import MIB, format_bytes, table_lines
from phantom_gpu.report_records import (
    ENDED_WELL,
    CacheHeld,
    GpuReport,
    Holder,
    Mistake,
    PassesAlive,
    ProcessReport,
    StepWork,
    When,
    module_name,
)

HANG_SECONDS = 120.0
MOST_ROWS, MOST_OF_ERROR = 5, 600
MISSING = "-"
LEAST_SHARE = 1 / 1000  # of the peak; who holds less is not named
#: Below it a bound of a step's seconds says nothing: starting its kernels takes longer.
LEAST_SECONDS = 1e-3
LEAST_PINNED_BYTES = 64 * MIB
_PACKAGE = re.compile(r".*/(?:site|dist)-packages/")
_PYTHON = re.compile(r".*/lib/python3\.\d+/")


@dataclass(frozen=True)
class Section:
    """One part of a report; what it lacks is empty.

    Attributes:
        lines: sentences, or code, of which one may have several lines.
        facts: texts, each by a short name.
        headings, rows: of a table, whose last column says what a row is about.
        figure: HTML.
    """

    title: str
    lines: Sequence[str] = ()
    facts: dict[str, str] = field(default_factory=dict)
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    figure: str = ""

    def __str__(self) -> str:
        lines = [] if self.facts else [f"  {self.title}"]
        lines += [textwrap.indent(line, "    ") for line in self.lines]
        lines += [f"  {name:<10} {text}" for name, text in self.facts.items()]
        lines += table_lines(self.headings, self.rows) if self.rows else []
        return "\n".join(lines)


@dataclass(frozen=True)
class FitReport:
    """What a program did on phantom GPUs.

    Attributes:
        gpu, gpus: which, and how many.
        budget_bytes: what it may reserve on each.
        answers: of each process that used a GPU, by rank.
        others: of those that failed and used none, in the order in which they ended.
        folder: where the program ran.
        returncode: the program's own.
        hung: the line at which it hung; empty if it did not.
        interrupted: it was stopped by Ctrl-C.
    """

    gpu: Gpu
    gpus: int
    budget_bytes: int
    answers: list[ProcessReport]
    folder: str
    returncode: int
    others: Sequence[ProcessReport] = ()
    hung: str = ""
    interrupted: bool = False

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that was reserved on one GPU."""
        return max((each.peak_reserved_bytes for _, each in self.by_gpu()), default=0)

    @property
    def out_of_memory(self) -> bool:
        """Whether a GPU could not serve a request, even if the program went on without."""
        ended = any(answer.ended == "out of memory" for answer in self.answers)
        return ended or any(gpu.failed or gpu.errors for _, gpu in self.by_gpu())

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where the program did not get far enough to say.

        A request that failed is a "no" even where the program, or a library, caught the error: what
        it wanted to do with that memory, it did not do.
        """
        if self.out_of_memory or self.peak_reserved_bytes > self.budget_bytes:
            return False
        if any(answer.allocator for answer in [*self.answers, *self.others]):
            return None
        well = all(answer.ended in ENDED_WELL for answer in self.answers)
        return True if self.answers and well and not self.hung and not self.returncode else None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        return {
            "fits": self.fits,
            "headline": self.headline(),
            "gpu": self.gpu.key,
            "gpus": self.gpus,
            "budget_bytes": self.budget_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "returncode": self.returncode,
            "hung": self.hung,
            "interrupted": self.interrupted,
            "mistakes": [mistake._asdict() for mistake in self.mistakes()],
            "processes": [asdict(answer) for answer in self.answers],
        }

    def by_gpu(self) -> list[tuple[ProcessReport, GpuReport]]:
        """Return each GPU that a process used, with that process."""
        return [(answer, gpu) for answer in self.answers for gpu in answer.gpus]

    def worst(self) -> tuple[ProcessReport, GpuReport]:
        """Return the GPU that could not serve a request, with its process; else the one of which
        the most was reserved."""

        def rank(pair: tuple[ProcessReport, GpuReport]) -> tuple:
            answer, gpu = pair
            failed = gpu.failed is not None
            return failed and answer.ended == "out of memory", failed, gpu.peak_reserved_bytes

        return max(self.by_gpu(), key=rank)

    def least_seconds(self, answer: ProcessReport) -> float | None:
        """Return a bound of a step's seconds, as if all ranks were on one server; None where it was
        not counted, or a process used several GPUs, which may work at the same time."""
        work = answer.work
        if work is None or len(answer.gpus) > 1:
            return None
        return least_seconds(
            self.gpu, work.flops, work.moved_bytes, work.crossing_bytes, work.sent_bytes
        )

    def a_step(self) -> str:
        """Return what a step computes and moves, and its least seconds; nothing if not counted."""
        answer = self.worst()[0] if self.by_gpu() else None
        if answer is None or answer.work is None:
            return ""
        return _work(answer.work, self.least_seconds(answer))

    # --- in words -------------------------------------------------------------------------------

    def __str__(self) -> str:
        return "\n\n".join([self.headline(), *map(str, self.sections(MOST_ROWS))])

    def __repr__(self) -> str:
        return f"<{self.headline()}>"

    def headline(self) -> str:
        """Return the answer as one sentence."""
        where = f"a phantom {self.gpu.name}"
        if self.gpus > 1:
            where = f"{self.gpus} × {self.gpu.name} (phantom)"
        room = format_bytes(self.budget_bytes)
        most = format_bytes(self.peak_reserved_bytes)
        if self.fits:
            left = format_bytes(self.budget_bytes - self.peak_reserved_bytes)
            trained = any(each.steps or each.cache is not None for each in self.answers)
            idle = "" if trained else " It made no training step."
            return f"It fits {where}: {most} of {room} reserved at most, {left} left.{idle}"
        if self.out_of_memory:
            answer, gpu = self.worst()
            asked = format_bytes(gpu.failed.nbytes) if gpu.failed else "more memory"
            held = gpu.failed.reserved_bytes if gpu.failed else gpu.peak_reserved_bytes
            when = gpu.failed.when if gpu.failed else gpu.allocated_at
            survived = answer.ended != "out of memory"
            sharing = [each for of, each in self.by_gpu() if of is not answer]
            others = sum(g.peak_reserved_bytes for g in sharing if g.index == gpu.index)
            return (
                f"It does not fit {where}: in {when}, it asked for {asked} when "
                f"{format_bytes(held)} of {room} were reserved."
                + f" Other processes held up to {format_bytes(others)} of GPU {gpu.index}."
                * bool(others)
                + " The program caught the error and went on without." * survived
            )
        if self.fits is False:
            return f"It does not fit {where}: {most} reserved at most, {room} allowed."
        return f"No answer for {where}: {self._why_none()}"

    def _why_none(self) -> str:
        if self.interrupted:
            return "it was interrupted. So far:"
        if self.hung:
            hung = self.line(self.hung)
            return f"nothing happened for {HANG_SECONDS:.0f} s; it was stopped at {hung}."
        everyone = [*self.answers, *self.others]
        for allocator in filter(None, (answer.allocator for answer in everyone)):
            return f"{allocator} is in place of the caching allocator, which alone is watched."
        for answer in everyone:
            if answer.error:
                line = self.line(answer.error_stack[0]) if answer.error_stack else "its end"
                error = answer.error.replace(f"{self.folder}{os.sep}", "")
                error = textwrap.shorten(error, MOST_OF_ERROR).rstrip(".")
                until = " Until then:" if answer.gpus else ""
                return f"it stopped at {line} with {error}.{until}"
        if not self.answers:
            return f"it used no GPU, and ended with exit code {self.returncode}."
        return f"it ended with exit code {self.returncode}, without a word."

    def line(self, line: str) -> str:
        """Return ``file:line`` as people know it: a library's by the library's name and its own,
        the script's by its own, others from the folder on in which the program was started."""
        if _PACKAGE.match(line):
            first, *folders, last = _PACKAGE.sub("", line).split("/")
            return "/".join([first, *["…"][: len(folders)], last])
        line = _PYTHON.sub("", line).removeprefix(f"{self.folder}{os.sep}")
        file = line.rpartition(":")[0]
        scripts = {answer.script.partition(" ")[0] for answer in self.answers}
        return os.path.basename(line) if os.path.isabs(file) or file in scripts else line

    def sections(self, most: int | None = None) -> list[Section]:
        """Return all parts but the headline, with at most ``most`` rows each; without a GPU that
        was used there are none."""
        if not self.by_gpu():
            return []
        answer, gpu = self.worst()
        found = self.mistakes_named()
        if answer.trained < answer.trainable / 2:
            title = f"Only {answer.trained} of {answer.trainable} trainable tensors got a gradient"
            lines = ["The others have no gradient and no optimizer state in this run."]
            found.append(Section(title, lines))
        if len(self.by_gpu()) > 1:
            found.append(self._every_gpu())
        found.append(Section("The run", facts=self._facts(answer, gpu)))
        if gpu.failed is not None:
            asked = f"The request for {format_bytes(gpu.failed.nbytes)} came from"
            found.append(Section(asked, [*map(self.line, gpu.failed.stack[:most])]))
        if gpu.holders:
            found.append(self._holders(gpu, most))
        if gpu.growth:
            left, each = format_bytes(gpu.growth_bytes), "step"
            if gpu.grows_in in WITHOUT_GRADIENTS:
                each = gpu.grows_in
            headings = ("bytes", "blocks", "what", "where")
            rows = [
                (format_bytes(h.nbytes), f"{h.blocks}", _what(h), self._place(h))
                for h in gpu.growth
            ]
            title = f"After the first, each {each} leaves {left} behind, most of it from"
            found.append(Section(title, headings=headings, rows=rows))
        if answer.unknown:
            headings = ("times", "value", "line")
            rows = [(f"{u.times}", u.what, self.line(u.line)) for u in answer.unknown[:most]]
            title = (
                "Values that the script read and nobody computed (taken as 0, a mask as all true)"
            )
            found.append(Section(title, headings=headings, rows=rows))
        if faults := sorted({fault for each in self.answers for fault in each.faults}):
            lines = [
                "This report may lack details because of them. The peaks are PyTorch's own.",
                *faults,
            ]
            found.append(Section("Errors inside labkit", lines))
        return found

    def mistakes(self) -> list[Mistake]:
        """Return the mistakes of all processes, of those alike the first."""
        every = [mistake for answer in self.answers for mistake in answer.mistakes]
        return list({(each.kind, each.place): each for each in reversed(every)}.values())[::-1]

    def mistakes_named(self) -> list[Section]:
        """Return the section about mistakes, if there are any, each with its line's code."""
        lines = []
        for each in self.mistakes():
            file, _, number = each.place.rpartition(":")
            lines.append(f"{self.line(each.place)}: {each.says}" if file else each.says)
            if code := file and linecache.getline(os.path.join(self.folder, file), int(number)):
                lines[-1] += f"\n    {code.strip()}"
        return [Section("Mistakes", lines)] if lines else []

    def _every_gpu(self) -> Section:
        rows = [
            (
                format_bytes(gpu.peak_allocated_bytes),
                format_bytes(gpu.peak_reserved_bytes),
                format_bytes(self.budget_bytes - gpu.peak_reserved_bytes),
                f"{gpu_name(answer, gpu)}: {answer.ended or 'no last word'}, {answer.steps} steps",
            )
            for answer, gpu in self.by_gpu()
        ]
        headings = ("allocated", "reserved", "left", "process")
        return Section("Every GPU at its peak", headings=headings, rows=rows)

    def _facts(self, answer: ProcessReport, gpu: GpuReport) -> dict[str, str]:
        unused = format_bytes(gpu.peak_reserved_bytes - gpu.peak_allocated_bytes)
        peak = f"{format_bytes(gpu.peak_allocated_bytes)} allocated, {self._when(gpu.allocated_at)}"
        facts = {
            "Peak": f"{peak}; {unused} more reserved",
            "Made of": ", ".join(
                f"{name} {format_bytes(nbytes)}"
                for name, nbytes in gpu.made_of.items()
                if nbytes > LEAST_SHARE * (10 if name == ROUNDING else 1) * gpu.peak_allocated_bytes
            ),
            "Steps": _steps(answer),
        }
        if answer.cache is not None:
            facts["KV cache"] = _cache(answer.cache)
        at, allocated_at = gpu.reserved_at, gpu.allocated_at
        if (at.step, at.phase) != (allocated_at.step, allocated_at.phase):
            most = format_bytes(gpu.peak_reserved_bytes)
            facts["Reserved"] = f"{most} at most, {self._when(gpu.reserved_at)}"
        for alive in gpu.passes_alive:
            facts["Graphs" if alive.phase == Phase.FORWARD else "Outputs"] = _alive(alive)
        if answer.pinned_bytes >= LEAST_PINNED_BYTES:
            pinned = format_bytes(answer.pinned_bytes)
            facts["Host"] = f"{format_bytes(answer.host_bytes)} of memory, {pinned} of it pinned"
        if len(self.by_gpu()) > 1:
            facts = {"GPU": gpu_name(answer, gpu)} | facts
        if gpu.retries > gpu.errors:
            times = gpu.retries - gpu.errors
            facts["Allocator"] = f"gave its cache back for {times} of the requests that it served"
        if (a_step := self.a_step()) and not answer.updates_itself:
            facts["A step"] = a_step
        if answer.remedies:
            facts["Remedies"] = (
                f"labkit phantom --fix tries {len(answer.remedies)} on the script itself"
            )
        if libraries := sorted({name for each in self.answers for name in each.unsized_workspaces}):
            facts["Missing"] = f"workspaces of {', '.join(libraries)}, whose sizes are unknown"
            if "cuDNN" in libraries:  # PyTorch's Conv_v8.cpp takes the first that it can allocate
                facts["Missing"] += "; a convolution's may be as large as what is left"
        if zeros := sorted({name for each in self.answers for name in each.weights_not_read}):
            facts["Weights"] = f"of {', '.join(zeros)} were not read: they are zeros"
        if others := sorted({name for each in self.answers for name in each.tokenizers_stood_in}):
            own = f"not of {', '.join(others)}'s own tokenizer"
            facts["Tokens"] = f"{own}: texts have other lengths"
        if saved := sorted({folder for each in self.answers for folder in each.saved_in}):
            first = os.path.relpath(saved[0], self.folder)
            more = f" and {len(saved) - 1} more" if saved[1:] else ""
            facts["Saved"] = f"zeros, in {first}{more}: no run must go on from them"
        return facts

    def _holders(self, gpu: GpuReport, most: int | None) -> Section:
        peak = gpu.peak_allocated_bytes
        holders = [each for each in gpu.holders if each.nbytes >= LEAST_SHARE * peak]
        rows = [(h.nbytes, f"{h.blocks}", _what(h), self._place(h)) for h in holders[:most]]
        rest = peak - sum(nbytes for nbytes, *_ in rows)
        if rest:
            rows.append((rest, MISSING, MISSING, "all others, and rounding"))
        return Section(
            f"Who holds the {format_bytes(peak)} allocated at the peak",
            headings=("bytes", "share", "blocks", "what", "where"),
            rows=[(format_bytes(n), f"{n / peak:.1%}", *others) for n, *others in rows],
        )

    def _place(self, holder: Holder) -> str:
        lines = (holder.line, holder.users_line)
        lines = dict.fromkeys(self.line(each) for each in lines if each)
        module = module_name(holder.module)
        return ", ".join(filter(None, [module, ", called from ".join(lines)])) or MISSING

    def _when(self, when: When) -> str:
        return f"{when} ({self.line(when.line)})" if when.line else str(when)


def gpu_name(answer: ProcessReport, gpu: GpuReport) -> str:
    """Name one of several GPUs."""
    return f"rank {answer.rank}, GPU {gpu.index}"


def _what(holder: Holder) -> str:
    return f"{holder.category} {holder.dtype}".strip()


def _cache(cache: CacheHeld) -> str:
    users = "1 user" if cache.users == 1 else f"{cache.users} users"
    more = format_bytes(1000 * cache.users * cache.token_bytes)
    return (
        f"{format_bytes(cache.nbytes)} at most, for {users} with {cache.tokens:,} tokens each; "
        f"{format_bytes(cache.token_bytes)} a token and user: 1,000 tokens more take {more}"
    )


def _steps(answer: ProcessReport) -> str:
    counted = f"{answer.steps}"
    if answer.updates_itself:
        passes = "1 backward pass" if answer.steps == 1 else f"{answer.steps} backward passes"
        counted = f"{passes}, as there is no optimizer of torch.optim"
    ends = {"": "it ended without a word", "stopped": "stopped by --steps"}
    return f"{counted}; then {ends.get(answer.ended, answer.ended)}"


def _alive(alive: PassesAlive) -> str:
    of = f"({alive.model}): {format_bytes(alive.nbytes)}"
    if alive.phase == Phase.FORWARD:
        ends = "backward() frees a graph, and torch.no_grad() makes none"
        return f"{alive.passes} forward passes' graphs are alive {of}; {ends}"
    return f"those of {alive.passes} forward passes without gradients are alive {of}"


def _work(work: StepWork, seconds: float | None) -> str:
    """Return what a step does; nothing where it is too little to matter."""
    if seconds is not None and seconds < LEAST_SECONDS:
        return ""
    flops = _decimal(sum(work.flops.values()), "FLOP")
    text = f"computes {flops}, moves {_decimal(work.moved_bytes, 'B')}"
    if work.crossing_bytes > work.moved_bytes / 1000:
        text += f", {_decimal(work.crossing_bytes, 'B')} more over the link to the host"
    if work.sent_bytes:
        text += f", sends {_decimal(work.sent_bytes, 'B')} to other ranks"
    if seconds is None:
        return text
    least = f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
    return f"{text}: at least {least}, by the GPU's peak rates"


def _decimal(number: float, unit: str) -> str:
    """Return ``number`` in three digits with a decimal prefix: ``"1.37 TFLOP"``."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * scale:
            return f"{number / scale:.3g} {prefix}{unit}"
    return f"{number:.0f} {unit}"
