"""One result of a participant as a record that can be compared, nothing in it trusted.

Texts are cleaned and shortened, counts are bounded, and verdicts are not believed: each value is
judged again by the course's own rule.

Limits: where a value was measured is believed, since no file can prove it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from labkit import claims
from labkit.claims import Judgement
from labkit.classroom.files import clean
from labkit.memory import InputError, Run
from labkit.results import RESULT_MIME, Result, impossible
from labkit.show.tables import setting_text

MOST_RUNS = 200
MOST_JUDGEMENTS = 100
MOST_CONDITIONS = 30
VERSIONS = ("python", "torch", "cuda", "driver", "transformers", "peft", "bitsandbytes",
            "accelerate")  # fmt: skip


class Computer(NamedTuple):
    """A machine as its result describes it; None where that says nothing usable.

    ``versions`` goes with ``VERSIONS``, "" where one is absent.
    """

    kind: str
    name: str
    capacity_bytes: int | None
    host_memory_bytes: int | None
    cores: int | None
    versions: tuple[str, ...]


class Peak(NamedTuple):
    """How much a run took.

    Attributes:
        total_bytes: at the peak, or up to the failure if ``out_of_memory``.
        label: where that comes from, as ``Run.label`` puts it.
        out_of_memory: it did not go through.
        setting: the lesson's parameters, in words.
        name: the run's.
        parameters: the run's, in words.
    """

    total_bytes: int
    label: str
    out_of_memory: bool
    setting: str
    name: str
    parameters: str


@dataclass(frozen=True)
class Record:
    """What one result says.

    Attributes:
        lesson, title, date, machine: of the result.
        judgements: by the claim's id; each value judged again.
        peaks: by a digest of lesson, run name and parameters, those of the lesson among them. Where
            a result has several such runs, the digest counts them.
    """

    lesson: str
    title: str
    date: datetime
    machine: Computer
    judgements: Mapping[str, Judgement]
    peaks: Mapping[str, Peak]


class Unfit(Exception):  # noqa: N818 (a reason and a detail, not an error)
    """A file is left out; its arguments are the reason and what in the file explains it."""


def document_of(data: bytes) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        Unfit: there is none.
    """
    try:
        document = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Unfit("it is not text in UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise Unfit("it is not JSON that can be read", str(error)) from error
    if not isinstance(document, dict):
        raise Unfit("it is neither a result nor a notebook")
    return document


def record_of(document: dict[str, Any], lessons: set[str]) -> tuple[Record, list[str]]:
    """The record of a result or notebook, and a remark for each judgement that is not taken.

    Args:
        document: of the file.
        lessons: the numbers of the course's lessons.

    Raises:
        Unfit: it is no valid result, or one that cannot be.
    """
    result = _result(document)
    if result.lesson not in lessons:
        raise Unfit(f"the course has no lesson {result.lesson}")
    for number, run in enumerate(result.runs, 1):
        for problem in impossible(run):
            raise Unfit(f"what its run {number} says cannot be: {problem}")
    judgements, remarks = _judgements(result)
    record = Record(
        lesson=result.lesson,
        title=clean(result.title) or "without a title",
        date=_moment(result.date),
        machine=_computer(result.machine),
        judgements=judgements,
        peaks=_peaks(result),
    )
    return record, remarks


def _result(document: dict[str, Any]) -> Result:
    record = _in_notebook(document) if "cells" in document else document
    if not isinstance(record, dict) or "lesson" not in record:
        raise Unfit("it is neither a result nor a notebook")
    for key, most in (("runs", MOST_RUNS), ("judgements", MOST_JUDGEMENTS)):
        if isinstance(record.get(key), list) and len(record[key]) > most:
            raise Unfit(f"it holds more than {most} {key}")
    try:
        return Result.from_dict(record)
    except InputError as error:
        raise Unfit("it is not a valid result", str(error)) from error


def _in_notebook(document: dict[str, Any]) -> Any:
    """The result that a notebook shows, read as plain JSON: nbformat would warn of a broken one
    on the terminal, in the file's own words."""
    found = [
        output["data"][RESULT_MIME]
        for cell in _dicts(document["cells"])
        for output in _dicts(cell.get("outputs"))
        if isinstance(output.get("data"), dict) and RESULT_MIME in output["data"]
    ]
    if len(found) != 1:
        shows = f"{len(found)} results, where one is expected"
        none = "no result; its last cell was not run, or it was not saved"
        raise Unfit(f"it is a notebook that shows {shows if found else none}")
    return found[0]


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _computer(machine: Mapping[str, Any]) -> Computer:
    def whole(key: str) -> int | None:
        value = machine.get(key)
        sound = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 60
        return value if sound else None

    given = machine.get("versions")
    given = given if isinstance(given, Mapping) else {}
    versions = tuple(
        clean(given[name], 24) if isinstance(given.get(name), str) else "" for name in VERSIONS
    )
    kind, name = clean(machine["kind"], 12), clean(machine["name"], 60) or "unnamed"
    sizes = whole("capacity_bytes"), whole("host_memory_bytes"), whole("cores")
    return Computer(kind, name, *sizes, versions)


# --- claims and runs ---------------------------------------------------------------------------


def _judgements(result: Result) -> tuple[dict[str, Judgement], list[str]]:
    judged: dict[str, Judgement] = {}
    remarks = []
    for entry in result.judgements:
        claim = claims.all_claims().get(entry["id"])
        if claim is None or claim.lesson != result.lesson:
            remarks.append("one of its claims is none of this lesson's; the others are shown")
        elif claim.id in judged:
            remarks.append(f"claim {claim.id} is judged twice; the first is shown")
        else:
            judged[claim.id] = again = _judge(claim.id, entry)
            if again.verdict != entry["verdict"]:
                remarks.append(
                    f"claim {claim.id} is called {entry['verdict']}, and by its rule is "
                    f"{again.verdict}, which is shown"
                )
    return judged, list(dict.fromkeys(remarks))


def _judge(id: str, entry: Mapping[str, Any]) -> Judgement:
    measured, mode = entry.get("measured"), entry.get("mode")
    if isinstance(measured, Mapping):
        some = list(measured.items())[:MOST_CONDITIONS]
        measured = {clean(name, 60): _plain(value) for name, value in some}
    else:
        measured = _plain(measured)
    return claims.judge(id, measured, clean(mode, 100) if isinstance(mode, str) else None)


def _plain(value: Any) -> float | bool | None:
    return value if isinstance(value, bool | int | float) else None


def _peaks(result: Result) -> dict[str, Peak]:
    peaks: dict[str, Peak] = {}
    seen: Counter[str] = Counter()
    setting = _setting(result.parameters)
    for run in result.runs:
        same = json.dumps(
            [result.lesson, dict(result.parameters), run.name, dict(run.parameters)], sort_keys=True
        )
        seen[same] += 1
        digest = hashlib.sha256(f"{seen[same]} {same}".encode()).hexdigest()
        peaks[digest] = Peak(
            total_bytes=run.peak_bytes,
            label=clean(run.label),
            out_of_memory=run.oom is not None,
            setting=setting,
            name=_run_name(run, seen[same]),
            parameters=_setting(run.parameters),
        )
    return peaks


def _setting(parameters: Mapping[str, Any]) -> str:
    return clean(setting_text(dict(parameters), parameters), 200)


def _run_name(run: Run, count: int) -> str:
    name = clean(run.name, 60) or "unnamed"
    return f"{name} (number {count})" if count > 1 else name
