"""The cheat sheet: every technique's figures and verdicts side by side, and what follows from them.

    sheet = build()                        # simulates; reads results/ and the last `labkit run`
    print(sheet_export.markdown(sheet))

Bytes and bounds of a technique are those of one `CommonJob`, simulated with that technique alone;
beside them stands what GPUs recorded. `order_of_adoption` and `faq` are computed from the same
figures. Nothing is filled in: where nothing was measured the sheet says what would measure it.

Limits: one model, card and batch at a time, and techniques rank differently on others. A bound is
no time: it counts neither kernels' launches nor the CPU's work on an offloaded optimizer. The
greedy order looks one move ahead, or two where nothing is free and neither saves by itself.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from labkit import headlines
from labkit.claim_rules import Verdict, all_claims
from labkit.headline_records import Headline
from labkit.recorded_table import RecordedGpu, recorded_gpus, versions_text
from labkit.sheet_figures import CommonJob, Figures, Row, row
from labkit.sheet_findings import (
    Finding,
    Pair,
    own_findings,
    recorded_findings,
    recorded_pairs,
    run_folder,
)
from labkit.sheet_order import Move, order_of_adoption
from labkit.sheet_techniques import TECHNIQUES

NOT_RUN = "`labkit run` on this machine fills it"
NOT_RECORDED = "`labkit record` on a CUDA machine fills it"


@dataclass(frozen=True)
class Sheet:
    """Everything the cheat sheet says.

    Attributes:
        job: on which techniques are compared.
        plain: its figures.
        rows: one for each technique.
        order: the order of adoption.
        findings: by claim, this machine's first; an empty tuple where there is none.
        headlines: what GPUs recorded of them, by the name of their folder.
        gpus: which GPUs have recorded, and what.
        missing: what is not there yet and what fills it, a sentence each.
        versions: of what simulated.
        date: when, in ISO 8601, UTC.
    """

    job: CommonJob
    plain: Figures
    rows: tuple[Row, ...]
    order: tuple[Move, ...]
    findings: Mapping[str, tuple[Finding, ...]]
    headlines: Mapping[str, Sequence[Headline]]
    gpus: tuple[RecordedGpu, ...]
    missing: tuple[str, ...]
    versions: str
    date: str

    def row(self, name: str) -> Row:
        """The row of the technique called ``name``."""
        return next(row for row in self.rows if row.technique.name == name)

    def counts(self, *, recorded: bool) -> Counter[Verdict]:
        """How many findings had which verdict, on GPUs that recorded or on this machine."""
        found = itertools.chain.from_iterable(self.findings.values())
        return Counter(finding.verdict for finding in found if finding.recorded == recorded)

    @property
    def source(self) -> str:
        """What the simulated figures are."""
        return f"simulated for {self.job.card.name}"


def build(
    job: CommonJob | None = None,
    *,
    run: Path | None = None,
    recorded: Path | None = None,
    own: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Sheet:
    """Simulate the techniques, and gather what was found on this machine and on GPUs.

    Args:
        job: what they are compared on.
        run: the folder of a `labkit run`; `run_folder` looks for it if None.
        recorded: holds ``<gpu>/``; the course's own recordings if None.
        own: whether this machine's run counts; recorded findings always do.
        tell: called with the name of each technique that is simulated next.

    Raises:
        InputError: the job cannot be simulated.
    """
    from labkit.hardware import machine

    job, say = job or CommonJob(), tell or (lambda name: None)
    pairs = recorded_pairs(recorded)
    rows = []
    for technique in TECHNIQUES:
        say(technique.name)
        rows.append(row(technique, job, [p for p in pairs if p.technique == technique.name]))
    say("the order of adoption")
    order = order_of_adoption(job)
    run = (run or run_folder()) if own else None
    mine, broken = own_findings(run)
    theirs = recorded_findings(recorded)
    findings = {
        id: tuple(finding for finding in [*mine, *theirs] if finding.claim == id)
        for id in all_claims()
    }
    return Sheet(job, rows[0].before, tuple(rows), order, findings, headlines.recorded(recorded),
                 recorded_gpus(recorded),
                 (*_missing(mine, theirs, pairs, own), *broken),
                 versions_text({"versions": machine().versions}),
                 datetime.now(UTC).isoformat(timespec="seconds"))  # fmt: skip


def _missing(
    mine: Sequence[Finding], theirs: Sequence[Finding], pairs: Sequence[Pair], own: bool
) -> list[str]:
    missing = []
    if own:
        missing += _not_judged(mine, "on this machine", NOT_RUN)
    missing += _not_judged(theirs, "on a GPU", NOT_RECORDED)
    if not pairs:
        missing.append(f"No GPU has recorded a pair of runs with and without a technique yet: "
                       f"{NOT_RECORDED.replace('record`', 'record --headlines`')}.")  # fmt: skip
    return missing


def _not_judged(found: Sequence[Finding], where: str, remedy: str) -> list[str]:
    judged = {finding.claim for finding in found}
    lessons = sorted({claim.lesson for id, claim in all_claims().items() if id not in judged})
    if not found:
        return [f"No claim has been judged {where} yet: {remedy}."]
    if not lessons:
        return []
    return [f"Not judged {where} yet are claims of lesson {', '.join(lessons)}: {remedy}."]
