"""The cheat sheet: every technique's figures and verdicts side by side, and what follows from them.

Bytes and bounds of a technique are those of one `CommonJob`, simulated with that technique alone.

Limits: one model, GPU and batch at a time, and techniques rank differently on others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from labkit.cheat_sheet.figures import CommonJob, Figures, Move, Row, order_of_adoption, row
from labkit.cheat_sheet.findings import Trial, gather
from labkit.cheat_sheet.techniques import TECHNIQUES, Technique
from labkit.course.results import versions_text
from labkit.hardware.this_machine import machine


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Everything the cheat sheet says; ``plain`` are the job's own figures."""

    job: CommonJob
    plain: Figures
    rows: tuple[Row, ...]
    order: tuple[Move, ...]
    trial: Trial
    versions: str
    date: str


def build(
    job: CommonJob | None = None,
    *,
    trial: Trial | None = None,
    techniques: Sequence[Technique] = TECHNIQUES,
    report: Callable[[str], object] = lambda name: None,
) -> Sheet:
    """Simulate the techniques, each alone and in their order of adoption.

    Args:
        job: what they are compared on; `CommonJob()` if None.
        trial: the verdicts; what `gather` finds if None.
        techniques: those that are simulated.
        report: called with the name of each technique that is simulated next.
    """
    job = job or CommonJob()
    rows = []
    for technique in techniques:
        report(technique.name)
        rows.append(row(technique, job))
    report("the order of adoption")
    return Sheet(
        job=job,
        plain=rows[0].before,
        rows=tuple(rows),
        order=order_of_adoption(job, techniques),
        trial=gather() if trial is None else trial,
        versions=versions_text({"versions": machine().versions}),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
