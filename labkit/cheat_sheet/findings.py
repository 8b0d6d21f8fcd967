"""What was found of the claims on GPUs and on this machine, and one verdict for each claim.

Limits: a run's outcomes are looked for where `labkit run` writes by default.
"""

import os
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from labkit.course import outcomes, results
from labkit.course.claims import Verdict, all_claims, format_found
from labkit.course.outcomes import RUN_VARIABLE
from labkit.course.results import Plain
from labkit.support.files import PACKAGE, RUN_FOLDER
from labkit.values import InputError


@dataclass(frozen=True)
class Finding:
    """One judgement of one claim: on a GPU that recorded, a phantom or not, or on this machine.

    ``agrees`` and ``differs`` are what was found under the conditions that support the claim, and
    under the others.
    """

    claim: str
    verdict: Verdict
    found: str
    machine: str
    recorded: bool
    phantom: bool = False
    on_gpu: bool = True
    agrees: str = ""
    differs: str = ""


@dataclass(frozen=True)
class Trial:
    """The judgements by claim, this machine's first; none where nobody could judge."""

    findings: Mapping[str, tuple[Finding, ...]]

    def verdict(self, id: str) -> Verdict:
        """Return the claim's one verdict over all records: *depends* where these disagree."""
        found = {finding.verdict for finding in self.findings[id]}
        if len(found) > 1:
            return Verdict.DEPENDS
        return found.pop() if found else Verdict.NOT_TESTABLE

    def by_article(self) -> dict[str, Counter[Verdict]]:
        """Count the verdicts on each article's claims; a claim of two articles counts in both."""
        counted: dict[str, Counter[Verdict]] = {}
        for id, claim in all_claims().items():
            for letter in claim.sources:
                counted.setdefault(letter, Counter())[self.verdict(id)] += 1
        return dict(sorted(counted.items()))

    @property
    def machines(self) -> list[str]:
        """The machines that judged, this one first, phantoms last."""
        every = [finding for found in self.findings.values() for finding in found]
        every.sort(key=lambda finding: (finding.recorded, finding.phantom, finding.machine))
        return list(dict.fromkeys(finding.machine for finding in every))


def gather(*, run: Path | None = None, recorded: Path | None = None, own: bool = True) -> Trial:
    """Return every judgement, of GPUs and of this machine.

    Args:
        run: the folder of a `labkit run`; `run_folder` looks for it if None.
        recorded: holds ``<gpu>/``; the course's own recordings if None.
        own: whether this machine's run counts, that of a CPU only where no GPU has judged;
            recorded findings always do.
    """
    found = recorded_findings(recorded)
    judged = {each.claim for each in found}  # a CPU counts only where no GPU has judged
    here = own_findings(run or run_folder()) if own else []
    found = [each for each in here if each.on_gpu or each.claim not in judged] + found
    return Trial({id: tuple(each for each in found if each.claim == id) for id in all_claims()})


def run_folder() -> Path | None:
    """Return where the last `labkit run` of this machine left its outcomes; None if not found."""
    named = os.environ.get(RUN_VARIABLE)
    places = [Path(named)] if named else [RUN_FOLDER, PACKAGE.parent / RUN_FOLDER]
    return next((place for place in places if any(place.glob("[0-9]*.json"))), None)


def own_findings(folder: Path | None) -> list[Finding]:
    """Return the judgements of a run's lessons; a broken file is named in a warning."""
    found = []
    for path in sorted(folder.glob("[0-9]*.json")) if folder else []:
        try:
            outcome = outcomes.read_outcome(path)
        except InputError as error:
            warnings.warn(f"outcome left out: {error}", UserWarning, stacklevel=2)
            continue
        result = outcomes.stored_result(outcome, folder) if outcome.passed else None
        if result:
            found += _findings(result, recorded=False)
    return found


def recorded_findings(folder: Path | None = None) -> list[Finding]:
    """Return the judgements in ``results/<gpu>/``; a broken file is named in a warning."""
    by_gpu = results.all_recorded(folder).values()
    return [each for found in by_gpu for result in found for each in _findings(result)]


def _findings(result: results.Result, *, recorded: bool = True) -> list[Finding]:
    """Return its judgements. "Not testable here" is none."""
    machine = result.where if recorded else f"this machine, {result.where}"
    phantom = recorded and result.phantom
    on_gpu = result.machine["kind"] in ("cuda", "rocm")
    findings = []
    for entry in result.judgements:
        id, verdict = entry["id"], Verdict(entry["verdict"])
        if id in all_claims() and verdict != Verdict.NOT_TESTABLE:
            measured, unit = entry.get("measured"), all_claims()[id].unit
            found = format_found(measured, unit)
            agrees: dict[str, Plain] = {}
            differs: dict[str, Plain] = {}
            for name, judged in entry.get("by_condition", {}).items():
                if judged != Verdict.NOT_TESTABLE and isinstance(measured, Mapping):
                    kept = agrees if judged == Verdict.SUPPORTED else differs
                    kept[name] = measured.get(name)
            texts = format_found(agrees, unit), format_found(differs, unit)
            findings.append(Finding(id, verdict, found, machine, recorded, phantom, on_gpu, *texts))
    return findings
