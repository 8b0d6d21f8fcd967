"""The report about a program's run on phantom GPUs as a page: with figures, and with all its rows.

It is one file: no script runs in it, and nothing is fetched.

Limits: timeline and segments need `run_program(record=True)` and a process that came to its end. A
timeline has the first steps, and later ones in which the peak rose or a request failed.
"""

import shlex
from collections.abc import Sequence
from datetime import datetime
from importlib.metadata import version

from markupsafe import Markup

from gpumem.figures import html_pages
from gpumem.figures.bars import draw_stacked_bars
from gpumem.figures.cards import BAD, GOOD, QUIET
from gpumem.figures.drawing import RESERVED, Picture
from gpumem.figures.segment_map import draw_segment_map
from gpumem.figures.timelines import draw_line
from gpumem.runs import OutOfMemory
from gpumem.trace import ROUNDING
from phantom_gpu.fix import Fix
from phantom_gpu.report import FitReport, Section, gpu_name
from phantom_gpu.report_records import GpuReport, ProcessReport

LOOKS = {True: GOOD, False: BAD, None: QUIET}
TEXT_COLUMNS = ("what", "value")


def page(found: FitReport | Fix, *, command: Sequence[str]) -> str:
    """Return the page about a report, or about what was tried to make a script fit; ``command`` is
    what the user had run."""
    report = (found.last or found.first) if isinstance(found, Fix) else found
    sections = found.sections() if isinstance(found, Fix) and found.plain else []
    sections += [
        Section("The error", [answer.error, *map(report.line, answer.error_stack)])
        for answer in report.answers
        if answer.error and answer.ended != "out of memory"
    ]
    if report.by_gpu():
        named = report.mistakes_named()
        rest = report.sections()[len(named) :]
        sections = [*named, *sections, *_figures(report, *report.worst()), *rest]
    versions = sorted({answer.versions for answer in report.answers if answer.versions})
    about = {
        "Command": shlex.join(command),
        "GPUs": f"{report.gpus} × {report.gpu.name}",
        "Versions": ", ".join([*versions, f"labkit {version('gpu-memory-lab')}"]),
        "Date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    }
    sections.append(Section("About this page", facts=about))
    script = report.answers[0].script if report.answers else shlex.join(command)
    by_id = {f"part{number}": section for number, section in enumerate(sections, 1)}
    return html_pages.render(
        "phantom_gpu/page.html.j2",
        title=f"{report.line(script)[:80]} on a phantom {report.gpu.name}",
        headline=found.headline(),
        look=LOOKS[found.fits],
        gpu=report.gpu.name,
        sections=by_id,
        headings={id: section.title for id, section in by_id.items()},
        table=_table,
    )


def _table(section: Section) -> Markup:
    """Return the table of a section; its last column comes first, where a page names the rows."""
    *others, name = section.headings
    rows = [
        [Markup(".<wbr>").join(what.split(".")), *cells]  # a narrow screen breaks it there
        for *cells, what in section.rows
    ]
    numbers = {place for place, text in enumerate(others, 1) if text not in TEXT_COLUMNS}
    return html_pages.table(section.title, [name, *others], rows, numbers=numbers)


def _figures(report: FitReport, answer: ProcessReport, gpu: GpuReport) -> list[Section]:
    source = f"on a phantom {report.gpu.name}"
    several = len(report.by_gpu()) > 1
    of = f" ({gpu_name(answer, gpu)})" if several else ""
    limit = "capacity" if report.budget_bytes == report.gpu.budget_bytes else "budget"
    bars = draw_stacked_bars(
        {
            gpu_name(process, each) if several else "at the peak": {
                **each.made_of,
                RESERVED: max(0, each.peak_reserved_bytes - each.peak_allocated_bytes),
            }
            for process, each in report.by_gpu()
        },
        title="What the peak is made of",
        source=source,
        limit=(report.gpu.name if limit == "capacity" else "the budget", report.budget_bytes),
    )
    found = [Section(bars.title, figure=_figure(bars))]
    record, failed = gpu.record, gpu.failed
    if record is None or not record.timeline.bytes_by_category:
        none = "There is none: the process was ended before it could write one."
        return [*found, Section("Timeline", [none])]

    totals, oom = record.timeline.totals_bytes(), None
    if failed is not None and answer.ended == "out of memory":
        at = (failed.when.step, failed.when.phase, failed.when.module, "")
        oom = OutOfMemory(failed.nbytes, totals[-1], gpu.capacity_bytes, {}, *at)
    line = draw_line(
        record.timeline,
        title=f"Allocated memory, event by event{of}",
        source=source,
        limit=(limit, report.budget_bytes),
        oom=oom,
    )
    kept = (
        "The first steps, and later ones in which the peak rose or a request failed. Bytes are "
        "those asked for; the allocator rounds them up."
    )
    if max(totals) < gpu.peak_allocated_bytes - gpu.made_of[ROUNDING]:
        kept += " The peak came after the last event that could be kept."
    found.append(Section("Timeline", [kept], figure=_figure(line)))

    streams = sorted({segment["stream"] for segment in record.segments})
    maps = {
        f"stream {number}": [s for s in record.segments if s["stream"] == stream]
        for number, stream in enumerate(streams)
    }
    title = f"Segments {record.segments_at}{of}"
    cut = (
        "The allocator reserves segments and cuts them into blocks for the tensors of one stream. "
        "Free blocks wait for requests; to the GPU it can return cached ones only."
    )
    if maps:
        segments = draw_segment_map(maps, title=title, source=source)
        found.append(Section("Segments", [cut], figure=_figure(segments)))
    return found


def _figure(figure: Picture) -> Markup:
    """Return a figure and its table. Where the screen is narrower than the figure, it scrolls."""
    frame = '<div class="figure" tabindex="0" role="group" aria-label="{}">{}</div>{}'
    parts = (Markup(part.html) for part in (figure.image(), figure.table))
    return Markup(frame).format(figure.title, *parts)
