"""The cheat sheet: every technique's figures and verdicts side by side, and what follows from them.

Bytes and bounds of a technique are those of one `CommonJob`, simulated with that technique alone.
Where no verdict was found, the sheet says what would find it.

Limits: one model, GPU and batch at a time, and techniques rank differently on others.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from labkit.cheat_sheet.figures import CommonJob, Figures, Move, Row, order_of_adoption, row
from labkit.cheat_sheet.findings import Finding, own_findings, recorded_findings, run_folder
from labkit.cheat_sheet.techniques import TECHNIQUES, Technique
from labkit.course.claims import Verdict, all_claims
from labkit.course.results import versions_text
from labkit.hardware.this_machine import machine

NOT_RECORDED = "`labkit record` on a CUDA machine fills it"


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Everything the cheat sheet says.

    ``plain`` are the job's own figures; ``findings`` are by claim, this machine's first, and empty
    where there is none; ``missing`` says what is not there yet and what fills it.
    """

    job: CommonJob
    plain: Figures
    rows: tuple[Row, ...]
    order: tuple[Move, ...]
    findings: Mapping[str, tuple[Finding, ...]]
    missing: tuple[str, ...]
    versions: str
    date: str

    def counts(self) -> dict[str, Counter[Verdict]]:
        """Count the verdicts of each machine: of this one, of real GPUs, of phantom ones."""
        found = itertools.chain.from_iterable(self.findings.values())
        counted: dict[str, Counter[Verdict]] = {}
        for each in sorted(found, key=lambda f: (f.recorded, f.phantom, f.machine)):
            counted.setdefault(each.machine, Counter())[each.verdict] += 1
        return counted

    @property
    def source(self) -> str:
        """What the simulated figures are."""
        return f"simulated for {self.job.simulated_gpu.name}"


def build(
    job: CommonJob | None = None,
    *,
    run: Path | None = None,
    recorded: Path | None = None,
    own: bool = True,
    order: Sequence[Technique] = TECHNIQUES,
    report: Callable[[str], object] = lambda name: None,
) -> Sheet:
    """Simulate the techniques, and gather what was found on this machine and on GPUs.

    Args:
        job: what they are compared on; `CommonJob()` if None.
        run: the folder of a `labkit run`; `run_folder` looks for it if None.
        recorded: holds ``<gpu>/``; the course's own recordings if None.
        own: whether this machine's run counts; recorded findings always do.
        order: the techniques that are put into an order.
        report: called with the name of each technique that is simulated next.
    """
    job = job or CommonJob()
    rows = []
    for technique in TECHNIQUES:
        report(technique.name)
        rows.append(row(technique, job))
    report("the order of adoption")
    moves = order_of_adoption(job, order)
    mine = own_findings(run or run_folder()) if own else []
    theirs = recorded_findings(recorded)
    missing = []
    if own and not mine:
        missing.append("No claim is judged on this machine yet: `labkit run` fills it.")
    if not theirs:
        missing.append(f"No claim is judged on a GPU yet: {NOT_RECORDED}.")
    return Sheet(
        job=job,
        plain=rows[0].before,
        rows=tuple(rows),
        order=moves,
        findings={
            id: tuple(finding for finding in [*mine, *theirs] if finding.claim == id)
            for id in all_claims()
        },
        missing=tuple(missing),
        versions=versions_text({"versions": machine().versions}),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
