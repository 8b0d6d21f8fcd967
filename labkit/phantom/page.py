"""A page about a program's run on phantom GPUs: the verdict, drawn, with all its numbers.

It is one file: no script runs in it, and nothing is fetched. All GPUs are in one figure and table;
the rest is about the one that ran out of memory, else the one on which the most was reserved.

Limits: timeline and segments need `run_program(record=True)` and a process that came to its end. A
timeline has the first steps, and later ones in which the peak rose or a request failed.
"""

import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from markupsafe import Markup

import labkit
from labkit.phantom.answer import Answer, GpuAnswer, Holder, When
from labkit.phantom.program import Verdict, shortest
from labkit.runs import OutOfMemory
from labkit.show.bars import draw_stacked_bars
from labkit.show.cards import BAD, GOOD, QUIET
from labkit.show.picture import RESERVED, Picture
from labkit.show.segment_map import draw_segment_map
from labkit.show.timelines import draw_line
from labkit.support import html_pages
from labkit.support.html_table import MISSING, grid
from labkit.trace import ROUNDING
from labkit.values import MIB, format_bytes

LOOKS = {True: GOOD, False: BAD, None: QUIET}
#: Of a section: paragraphs, which are escaped, and figures and tables, which are ``Markup``.
Parts = list[str | Markup]


def page(verdict: Verdict, *, command: Sequence[str]) -> str:
    """Return the page about a verdict; ``command`` is what the user had run."""
    sections: dict[str, Parts] = {}
    scripts = [answer.script for answer in verdict.answers] or [shlex.join(command)]
    for answer in verdict.answers:
        if answer.error and answer.ended != "out of memory":
            sections["The error"] = [answer.error, _stack(verdict, answer.error_stack)]
    if verdict.by_gpu():
        sections |= _Details(verdict).sections()
    sections = {name: parts for name, parts in sections.items() if parts}
    versions = sorted({answer.versions for answer in verdict.answers if answer.versions})
    zeros = sorted({name for answer in verdict.answers for name in answer.weights_not_read})
    others = sorted({name for answer in verdict.answers for name in answer.tokenizers_stood_in})
    absent = {"Weights that are zeros": zeros, "Tokenizers that others stood in for": others}
    return html_pages.render(
        "phantom/page.html.j2",
        title=f"{_near(verdict, scripts[0])[:80]} on a phantom {verdict.gpu.name}",
        headline=_near(verdict, verdict.headline()),
        look=LOOKS[verdict.fits],
        gpu=verdict.gpu.name,
        sections=sections,
        ids={f"part{number}": name for number, name in enumerate(sections, 1)},
        about={
            "Command": shlex.join(command),
            "GPUs": f"{verdict.gpus} × {verdict.gpu.name}",
            "A step": verdict.a_step() or "not counted",
            **{what: ", ".join(names) for what, names in absent.items() if names},
            "Versions": ", ".join([*versions, f"labkit {labkit.__version__}"]),
            "Date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        },
    )


def _near(verdict: Verdict, text: str) -> str:
    """Return ``text`` with paths from the program's own folder on."""
    return text.replace(f"{verdict.folder}{os.sep}", "")


def _stack(verdict: Verdict, stack: Sequence[str]) -> Markup:
    lines = [_near(verdict, shortest(line)) for line in stack]
    items = Markup("").join(Markup("<li><code>{}</code></li>").format(line) for line in lines)
    return Markup("<p>Innermost first:</p><ol>{}</ol>").format(items) if items else items


def _figure(figure: Picture) -> Markup:
    """Return a figure and its table. Where the screen is narrower than the figure, it scrolls."""
    frame = '<div class="figure" tabindex="0" role="group" aria-label="{}">{}</div>{}'
    parts = (Markup(part.html) for part in (figure.image(), figure.table))
    return Markup(frame).format(figure.title, *parts)


def _name(answer: Answer, gpu: GpuAnswer) -> str:
    return f"rank {answer.rank}, GPU {gpu.index}"


class _Details:
    """What there is to say about the GPU that decides."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.answer, self.gpu = verdict.worst()
        self.source = f"on a phantom {verdict.gpu.name}"
        self.several = len(verdict.by_gpu()) > 1
        self.of = f" ({_name(self.answer, self.gpu)})" if self.several else ""
        own = verdict.budget_bytes != verdict.gpu.budget_bytes
        self.limit = ("budget" if own else "capacity", verdict.budget_bytes)

    def sections(self) -> dict[str, Parts]:
        gpu = self.gpu
        grown = [
            [self._line(h.users_line), h.module or MISSING, format_bytes(h.nbytes), f"{h.blocks:,}"]
            for h in gpu.growth
        ]
        growth = (
            f"Each further step leaves {format_bytes(gpu.growth_bytes)} behind, most of it here"
        )
        unknown = [[self._line(u.line), u.what, str(u.times)] for u in self.answer.unknown]
        zeros = "Nothing is computed: the program read these values as 0"
        saved = [[change.what, format_bytes(change.nbytes)] for change in gpu.changes]
        saves = "What each change alone would save, by the record of this run"
        return {
            "The peak": self._peak(),
            "The request that failed": self._failure(),
            "Timeline": self._timeline(),
            "Segments": self._segments(),
            "By module": self._by_module(),
            "By line of code": self._by_line(),
            "What each step leaves behind": self._table(
                growth, ["your line", "module", "bytes", "blocks"], grown, text_columns=(0, 1)
            ),
            "What would lower the peak": self._table(saves, ["change", "saves about"], saved),
            "Values read as 0": self._table(
                zeros, ["line", "value", "times"], unknown, text_columns=(0, 1)
            ),
        }

    def _table(
        self, caption: str, headings: list[str], rows: list[list[str]], **options: Any
    ) -> Parts:
        """Return a table, or nothing where it has no rows."""
        table = grid(headings, rows, caption=f"{caption}{self.of}.", **options)
        return [Markup(table.html)] if rows else []

    def _line(self, line: str) -> str:
        return _near(self.verdict, shortest(line)) or MISSING

    def _when(self, when: When) -> str:
        return f"{when} ({self._line(when.line)})" if when.line else str(when)

    def _peak(self) -> Parts:
        gpu, answer, (limit, limit_bytes) = self.gpu, self.answer, self.limit
        stacks, rows = {}, []
        for process, each in self.verdict.by_gpu():
            name = _name(process, each) if self.several else "at the peak"
            allocated, reserved = each.peak_allocated_bytes, each.peak_reserved_bytes
            stacks[name] = {**each.made_of, RESERVED: max(0, reserved - allocated)}
            sizes = map(format_bytes, (allocated, reserved, limit_bytes - reserved))
            rows.append([name, *sizes, str(process.steps), process.ended or "without a word"])
        device = "the budget" if limit == "budget" else self.verdict.gpu.name
        title = "What the peak is made of"
        bars = draw_stacked_bars(
            stacks, title=title, source=self.source, limit=(device, limit_bytes)
        )
        numbers = [
            ["reserved at most", gpu.peak_reserved_bytes, self._when(gpu.reserved_at)],
            ["allocated at most", gpu.peak_allocated_bytes, self._when(gpu.allocated_at)],
            [limit, limit_bytes, ""],
            ["left", limit_bytes - gpu.peak_reserved_bytes, ""],
            ["host memory", answer.host_bytes, "at most; the GPU's takes none of it"],
        ]
        if answer.pinned_bytes >= MIB:
            numbers.append(["page-locked of it", answer.pinned_bytes, "at most"])
        numbers = [[name, format_bytes(nbytes), how] for name, nbytes, how in numbers]
        numbers.append(["steps", str(answer.steps), answer.ended or "ended without a word"])
        if gpu.retries:
            served = f"once the cache was given back; {gpu.errors} failed all the same"
            numbers.append(["retries", str(gpu.retries), served])
        headings = ["", "allocated", "reserved", "left", "steps", "ended"]
        caption = "Most bytes on each GPU; details follow for one of them"
        every = self._table(caption, headings, rows, text_columns=(0, 5)) if self.several else []
        headings = ["", "amount", "when, or how"]
        return [
            _figure(bars),
            *every,
            *self._table("The run in numbers", headings, numbers, text_columns=(0, 2)),
        ]

    def _failure(self) -> Parts:
        failed = self.gpu.failed
        if failed is None:
            return []
        asked = f"It asked for {format_bytes(failed.nbytes)}: {failed.when}."
        caught = "" if self.answer.ended == "out of memory" else " The program went on without."
        return [asked + caught, _stack(self.verdict, failed.stack)]

    def _timeline(self) -> Parts:
        gpu, record, failed = self.gpu, self.gpu.record, self.gpu.failed
        if record is None or not record.timeline.bytes_by_category:
            return ["There is none: the process was ended before it could write one."]
        totals, oom = record.timeline.totals_bytes(), None
        if failed is not None and self.answer.ended == "out of memory":
            at = (failed.when.step, failed.when.phase, failed.when.module, "")
            oom = OutOfMemory(failed.nbytes, totals[-1], gpu.capacity_bytes, {}, *at)
        title = f"Allocated memory, event by event{self.of}"
        figure = draw_line(
            record.timeline, title=title, source=self.source, limit=self.limit, oom=oom
        )
        short = max(totals) < gpu.peak_allocated_bytes - gpu.made_of[ROUNDING]
        return [
            "The first steps, and later ones in which the peak rose or a request failed. Bytes are "
            "those asked for; the allocator rounds them up."
            + " The peak came after the last event that could be kept."
            * short,
            _figure(figure),
        ]

    def _segments(self) -> Parts:
        record = self.gpu.record
        if record is None or not record.segments:
            return []
        streams = sorted({segment["stream"] for segment in record.segments})
        maps = {
            f"stream {number}": [s for s in record.segments if s["stream"] == stream]
            for number, stream in enumerate(streams)
        }
        title = f"Segments {record.segments_at}{self.of}"
        return [
            "The allocator reserves segments and cuts them into blocks for the tensors of one "
            "stream. Free blocks wait for requests; to the GPU it can return cached ones only.",
            _figure(draw_segment_map(maps, title=title, source=self.source)),
        ]

    def _by_module(self) -> Parts:
        def names(h: Holder) -> tuple[str, ...]:
            parts = (h.module or "outside of modules").split(".")
            return Markup(".<wbr>").join(parts), h.category  # a narrow screen breaks it there

        return self._holders(["module", "what"], names)

    def _by_line(self) -> Parts:
        def names(h: Holder) -> tuple[str, ...]:
            return self._line(h.users_line), h.category, self._line(h.line)

        return self._holders(["your line", "what", "innermost line outside PyTorch"], names)

    def _holders(self, headings: list[str], names_of: Callable[[Holder], tuple[str, ...]]) -> Parts:
        """Return a table of what is allocated at the peak, by the names of each holder."""
        peak = self.gpu.peak_allocated_bytes
        sums: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
        for holder in self.gpu.holders:
            entry = sums[names_of(holder)]
            entry[0] += holder.nbytes
            entry[1] += holder.blocks
        rest = peak - sum(nbytes for nbytes, _ in sums.values())
        found = sorted(sums.items(), key=lambda row: -row[1][0])
        others = ("all others, and rounding", *[MISSING] * (len(headings) - 1))
        rows = [
            [first, format_bytes(nbytes), f"{nbytes / peak:.1%}", f"{blocks or MISSING}", *more]
            for (first, *more), (nbytes, blocks) in [*found, (others, [rest, 0])]
            if nbytes
        ]
        headings[1:1] = ["bytes", "share", "blocks"]
        caption = f"Who holds the {format_bytes(peak)} allocated at the peak"
        return self._table(caption, headings, rows, text_columns=(0, 4, 5))
