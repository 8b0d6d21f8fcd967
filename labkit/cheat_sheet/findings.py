"""What was found of the claims on this machine and on GPUs, and of techniques in benchmarks.

Limits: a run's outcomes are looked for where `labkit run` writes by default.
"""

import itertools
import os
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from labkit.cheat_sheet.techniques import TECHNIQUES, Technique
from labkit.course import outcomes, results
from labkit.course.claims import Verdict, all_claims, format_found
from labkit.course.outcomes import RUN_VARIABLE
from labkit.hardware import catalogue
from labkit.recording import benchmarks
from labkit.recording.benchmark_result import Entry
from labkit.recording.summary import versions_text
from labkit.support.files import PACKAGE, RUN_FOLDER
from labkit.values import InputError, format_bytes


@dataclass(frozen=True)
class Finding:
    """One judgement of one claim: on a GPU that recorded, or on this machine.

    ``where`` names the machine and its versions, ``origin`` the mode, the date and the file.
    """

    claim: str
    verdict: Verdict
    found: str
    where: str
    origin: str
    recorded: bool


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
    """Return the judgements in ``results/<gpu>/``; a broken file is named in a warning."""
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
        findings.append(Finding(id, Verdict(entry["verdict"]), found, where, text, recorded))
    return findings


def recorded_pairs(folder: Path | None = None) -> dict[str, list[str]]:
    """Return by technique what benchmarks say: their runs that differ by it alone, or the batch."""
    pairs = defaultdict(list)
    for gpu, found in benchmarks.recorded(folder).items():
        for result in found:
            where = f"{result.machine['name']}, {result.date[:10]}"
            source = f"results/{gpu}/{result.benchmark.file}; {versions_text(result.machine)}"
            fitted = [entry for entry in result.entries if entry.fitted]
            for one, other in itertools.permutations(fitted, 2):
                for technique in TECHNIQUES:
                    if _differ_by(technique, one, other):
                        says = _compared(one, other, result.benchmark.largest_batch)
                        pairs[technique.name].append(f"{where}: {says} ({source})")
    return pairs


def _differ_by(technique: Technique, one: Entry, other: Entry) -> bool:
    before, after = one.recipe.but(batch_size=1), other.recipe.but(batch_size=1)
    if technique.change is None or before == after:
        return False
    # Mixed precision depends on the GPU's formats, which the recipe shows.
    gpu = catalogue.gpu("rtx-4090" if "bf16" in after.precision else "t4")
    try:
        return technique.change(one.recipe, gpu).but(batch_size=1) == after
    except InputError:
        return False


def _compared(one: Entry, other: Entry, largest_batch: bool) -> str:
    if largest_batch:
        text = f"largest batch {one.recipe.batch_size} → {other.recipe.batch_size}"
    else:
        peaks = [format_bytes(entry.run.peak_bytes) for entry in (one, other)]
        text = f"peak {' → '.join(peaks)}"
    speeds = [entry.tokens_per_second for entry in (one, other)]
    return text + (f", tokens/s {speeds[0]:.0f} → {speeds[1]:.0f}" if all(speeds) else "")
