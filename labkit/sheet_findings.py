"""What was found of the claims on this machine and on GPUs, and of techniques in headline runs.

Limits: results are read, never repaired. A run's outcomes are looked for where `labkit run` writes
unless told otherwise.
"""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from labkit import catalogue, headlines, outcomes, results
from labkit.claim_rules import Verdict, all_claims
from labkit.headline_records import Entry
from labkit.lessons import RUN_FOLDER
from labkit.memory import InputError, format_bytes
from labkit.outcomes import RUN_VARIABLE
from labkit.recorded_table import versions_text
from labkit.report import found_here
from labkit.sheet_techniques import TECHNIQUES, Technique


@dataclass(frozen=True)
class Finding:
    """One judgement of one claim, on one machine."""

    claim: str
    verdict: Verdict
    found: str
    where: str
    mode: str
    date: str
    versions: str
    source: str
    recorded: bool


@dataclass(frozen=True)
class Pair:
    """Two runs of one headline that differ by one technique: what a GPU measured."""

    technique: str
    says: str
    where: str
    date: str
    versions: str
    source: str


def run_folder() -> Path | None:
    """Where the last `labkit run` of this machine left its outcomes; None if nowhere we look."""
    named = os.environ.get(RUN_VARIABLE)
    places = [Path(named)] if named else [RUN_FOLDER, results.PACKAGE.parent / RUN_FOLDER]
    return next((place for place in places if any(place.glob("[0-9]*.json"))), None)


def own_findings(folder: Path | None) -> tuple[list[Finding], list[str]]:
    """The judgements of a run's lessons, and a sentence for each file that cannot be read."""
    found, broken = [], []
    for path in sorted(folder.glob("[0-9]*.json")) if folder else []:
        try:
            outcome = outcomes.read_outcome(path)
        except InputError as error:
            broken.append(str(error))
            continue
        result = outcomes.stored_result(outcome, folder) if outcome.passed else None
        if result:
            found += _findings(result, outcome.notebook, recorded=False)
    return found, broken


def recorded_findings(folder: Path | None = None) -> list[Finding]:
    """The judgements in ``results/<gpu>/``. A broken file is named in a warning and left out."""
    return [
        finding
        for gpu, found in results.all_recorded(folder).items()
        for result in found
        for finding in _findings(result, f"results/{gpu}/{result.lesson}.json", recorded=True)
    ]


def _findings(result: results.Result, source: str, *, recorded: bool) -> list[Finding]:
    return [
        Finding(entry["id"], Verdict(entry["verdict"]), found_here(entry), result.where,
                str(entry.get("mode") or ""), result.date[:10], versions_text(result.machine),
                source, recorded)
        for entry in result.judgements
        if entry["id"] in all_claims()
    ]  # fmt: skip


def recorded_pairs(folder: Path | None = None) -> list[Pair]:
    """What headlines say of single techniques: runs that differ by one, but for the batch."""
    pairs = []
    for gpu, found in headlines.recorded(folder).items():
        for headline in found:
            where, versions = str(headline.machine["name"]), versions_text(headline.machine)
            source = f"results/{gpu}/{headline.job.file}"
            for one, other in itertools.permutations(headline.entries, 2):
                for technique in TECHNIQUES:
                    if one.fitted and other.fitted and _differ_by(technique, one, other):
                        says = _compared(one, other, headline.job.largest_batch)
                        pairs.append(Pair(technique.name, says, where, headline.date[:10],
                                          versions, source))  # fmt: skip
    return pairs


def _differ_by(technique: Technique, one: Entry, other: Entry) -> bool:
    if technique.change is None or one.recipe.but(batch_size=1) == other.recipe.but(batch_size=1):
        return False
    # A technique may depend on the card: mixed precision on its formats, which the recipe tells.
    card = catalogue.gpu("rtx-4090" if "bf16" in other.recipe.precision else "t4")
    try:
        changed = technique.change(one.recipe, card)
    except InputError:
        return False
    return changed.but(batch_size=1) == other.recipe.but(batch_size=1)


def _compared(one: Entry, other: Entry, largest_batch: bool) -> str:
    if largest_batch:
        text = f"largest batch {one.recipe.batch_size} → {other.recipe.batch_size}"
    else:
        peaks = [format_bytes(entry.run.peak_bytes) for entry in (one, other)]
        text = f"peak {' → '.join(peaks)}"
    speeds = [entry.tokens_per_second for entry in (one, other)]
    return text + (f", tokens/s {speeds[0]:.0f} → {speeds[1]:.0f}" if all(speeds) else "")
