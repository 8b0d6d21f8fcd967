"""What was found of the claims on this machine and on GPUs.

Limits: a run's outcomes are looked for where `labkit run` writes by default.
"""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from labkit.course import outcomes, results
from labkit.course.claims import Verdict, all_claims, format_found
from labkit.course.outcomes import RUN_VARIABLE
from labkit.course.results import versions_text
from labkit.support.files import PACKAGE, RUN_FOLDER
from labkit.values import InputError


@dataclass(frozen=True)
class Finding:
    """One judgement of one claim: on a GPU that recorded, a phantom or not, or on this machine.

    ``where`` names the machine and its versions, ``origin`` the mode, the date and the file.
    """

    claim: str
    verdict: Verdict
    found: str
    where: str
    origin: str
    recorded: bool
    phantom: bool = False

    @property
    def machine(self) -> str:
        """The machine's name, without its versions."""
        name = self.where.partition(",")[0]
        return name if self.recorded else f"this machine, {name}"


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
            found += _findings(result, outcome.notebook, recorded=False)
    return found


def recorded_findings(folder: Path | None = None) -> list[Finding]:
    """Return the judgements in ``results/<gpu>/``; a broken file is named in a warning.

    What a phantom GPU could not judge is left out.
    """
    findings = []
    for gpu, found in results.all_recorded(folder).items():
        for result in found:
            source = f"results/{gpu}/{result.lesson}.json"
            findings += _findings(result, source, recorded=True)
    return findings


def _findings(result: results.Result, source: str, *, recorded: bool) -> list[Finding]:
    findings = []
    for entry in result.judgements:
        id = entry["id"]
        if id not in all_claims():
            continue
        found = format_found(entry.get("measured"), all_claims()[id].unit)
        where = f"{result.where}, {versions_text(result.machine)}"
        origin = [entry.get("mode"), where if recorded else None, result.date[:10], source]
        text = "; ".join(filter(None, origin))
        phantom = recorded and result.phantom
        if not phantom or entry["verdict"] != Verdict.NOT_TESTABLE:
            verdict = Verdict(entry["verdict"])
            findings.append(Finding(id, verdict, found, where, text, recorded, phantom))
    return findings
