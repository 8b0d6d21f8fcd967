"""What GPUs found of the claims when they recorded, and one verdict for each claim."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from labkit.lesson import results
from labkit.lesson.claims import Verdict, all_claims, format_found
from labkit.lesson.results import Plain


@dataclass(frozen=True)
class RecordedVerdict:
    """One judgement of one claim, on a GPU that recorded, a phantom or not.

    ``agrees`` and ``differs`` are what was found under the conditions that support the claim, and
    under the others.
    """

    claim: str
    verdict: Verdict
    found: str
    machine: str
    phantom: bool = False
    agrees: str = ""
    differs: str = ""


@dataclass(frozen=True)
class Trial:
    """The judgements by claim; none where nobody could judge."""

    findings: Mapping[str, tuple[RecordedVerdict, ...]]

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
        """The machines that judged, phantoms last."""
        every = [finding for found in self.findings.values() for finding in found]
        every.sort(key=lambda finding: (finding.phantom, finding.machine))
        return list(dict.fromkeys(finding.machine for finding in every))


def gather(folder: Path | None = None) -> Trial:
    """Return every judgement in ``folder/<gpu>/``; the course's own recordings if None.

    A broken file is named in a warning and left out.
    """
    by_gpu = results.all_recorded(folder).values()
    found = [each for recorded in by_gpu for result in recorded for each in _findings(result)]
    return Trial({id: tuple(each for each in found if each.claim == id) for id in all_claims()})


def _findings(result: results.Result) -> list[RecordedVerdict]:
    """Return its judgements. "Not testable here" is none."""
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
            findings.append(
                RecordedVerdict(id, verdict, found, result.where, result.phantom, *texts)
            )
    return findings
