"""What a class found: participants' result files gathered into records that can be compared.

A participant sends a result (`labkit record` writes one per lesson), an executed notebook, which
holds its result, a whole folder of `labkit run`, or a zip of any of these. ``gather`` reads a
folder of such, each named by its file or folder.

Nothing in them is trusted: see `labkit.classroom.files` and `labkit.classroom.records`.

Limits: a participant who sends several files must send them in one folder or zip, since files
beside each other are different people. Of several results of one lesson the newest counts. Without
names there is still what a result says of its machine, and whatever its sender wrote into it.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labkit.classroom.files import LeftOut, Reader, clean, senders, shortened
from labkit.classroom.records import Computer, Record, Unfit, document_of, record_of
from labkit.memory import InputError
from labkit.outcomes import STATUSES
from labkit.results import known_lessons

MOST_MACHINES = 5


@dataclass(frozen=True)
class Participant:
    """Who sent what.

    Attributes:
        name: cleaned, or a number; unlike every other's.
        records: the newest of each lesson, by lesson.
        unfinished: lessons that did not pass, ``"06 failed"``.
        left_out: what was not taken.
    """

    name: str
    records: tuple[Record, ...]
    unfinished: tuple[str, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def machines(self) -> list[Computer]:
        """Each machine of the records, once, at most ``MOST_MACHINES``."""
        return list(dict.fromkeys(record.machine for record in self.records))[:MOST_MACHINES]

    def record(self, lesson: str) -> Record | None:
        """What was found in a lesson."""
        return next((record for record in self.records if record.lesson == lesson), None)


@dataclass(frozen=True)
class Classroom:
    """Everybody, and the files that are nobody's."""

    participants: tuple[Participant, ...]
    left_out: tuple[LeftOut, ...]

    def with_lesson(self, lesson: str) -> list[tuple[Participant, Record]]:
        """Who sent a result of a lesson, with it."""
        found = [(participant, participant.record(lesson)) for participant in self.participants]
        return [(participant, record) for participant, record in found if record]

    @property
    def lessons(self) -> dict[str, str]:
        """Lessons that somebody sent, with the title that most results give them."""
        titles: dict[str, Counter[str]] = {}
        for participant in self.participants:
            for record in participant.records:
                titles.setdefault(record.lesson, Counter())[record.title] += 1
        return {lesson: titles[lesson].most_common(1)[0][0] for lesson in sorted(titles)}


def gather(folder: Path, *, anonymous: bool = False, page: Path | None = None) -> Classroom:
    """What the participants sent.

    Args:
        folder: holds a file, folder or zip per participant.
        anonymous: number the participants, in an order that their names do not decide, and
            leave out of every note what could name them.
        page: where the class's page goes or lies, which nobody sent.

    Raises:
        InputError: there is no such folder, or nothing in it that a participant could have sent.
    """
    paths, left_out = senders(folder, page)
    if not paths:
        raise InputError(
            f"{folder} holds nothing to compare: it needs a .json, .ipynb or .zip file, "
            "or a folder of them, for each participant"
        )
    lessons = known_lessons()
    found = [_participant(path, lessons) for path in paths]
    if anonymous:
        found.sort(key=lambda p: hashlib.sha256(repr(p.records).encode()).digest())
        found = [_nameless(p, number) for number, p in enumerate(found, 1)]
        left_out = [_hidden(each) for each in left_out]
    else:
        found = _told_apart(found)
    return Classroom(tuple(found), tuple(left_out))


def _nameless(participant: Participant, number: int) -> Participant:
    notes = tuple(_hidden(each) for each in participant.left_out)
    return replace(participant, name=f"Participant {number}", left_out=notes)


def _hidden(note: LeftOut) -> LeftOut:
    return LeftOut("(not shown)", note.reason)


def _told_apart(participants: list[Participant]) -> list[Participant]:
    """The same with a number after each name that another has already."""
    used: set[str] = set()
    named = []
    for participant in participants:
        name, count = participant.name, 1
        while name.casefold() in used:
            count += 1
            name = f"{participant.name} ({count})"
        used.add(name.casefold())
        named.append(replace(participant, name=name))
    return named


# --- one participant ---------------------------------------------------------------------------


def _participant(path: Path, lessons: set[str]) -> Participant:
    reader = Reader(path)
    newest: dict[str, tuple[str, Record]] = {}
    unfinished: dict[str, None] = {}
    for name, data in reader:
        try:
            document = document_of(data)
            if "fingerprint" in document and "notebook" in document:  # of `labkit run`
                unfinished |= dict.fromkeys(_unfinished(document))
                continue
            record, remarks = record_of(document, lessons)
        except Unfit as unfit:
            reader.leave(name, *unfit.args)
            continue
        for remark in remarks:
            reader.leave(name, remark)
        _keep_newest(newest, name, record, reader)
    if not (newest or unfinished or reader.left_out):
        reader.leave(path.name, "it holds no result")
    records = tuple(newest[lesson][1] for lesson in sorted(newest))
    name = clean(path.name if path.is_dir() else path.stem, 60) or "unnamed"
    return Participant(name, records, tuple(unfinished), tuple(shortened(reader.left_out)))


def _keep_newest(
    newest: dict[str, tuple[str, Record]], name: str, record: Record, reader: Reader
) -> None:
    other = newest.get(record.lesson)
    if other is None or record.date > other[1].date:
        newest[record.lesson] = name, record
        if other:
            reader.leave(other[0], f"there is a newer result of lesson {record.lesson}")
    elif record != other[1]:
        reader.leave(name, f"there is a newer result of lesson {record.lesson}")


def _unfinished(outcome: dict[str, Any]) -> Iterator[str]:
    number, status = outcome.get("number"), outcome.get("status")
    if status in STATUSES[1:] and isinstance(number, str) and len(number) == 2:
        yield f"{clean(number)} {status}"
