"""A learner's copy of the lessons: made, and brought up to date without losing what they changed.

Limits: a notebook that was run and saved counts as changed. Lessons that the course no longer has
stay.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from gpumem.files import read_file, write_atomic
from gpumem.inputs import InputError
from labkit.lesson.notebooks import COPIED, course_folder, notebooks_of


def copy_lessons(folder: Path) -> tuple[list[str], list[str]]:
    """Copy the course's lessons into ``folder``; return the files written, and those left alone.

    Left alone is what the learner has changed, and the course, too, since it was copied.

    Raises:
        InputError: the record of what was copied earlier cannot be read.
        OSError: ``folder`` cannot be made or written.
    """
    record = folder / COPIED
    copied = read_file(record, _hashes, "a record of lessons") if record.exists() else {}
    written, kept = [], []
    for source in notebooks_of(course_folder()):
        name, text = source.name, source.read_text(encoding="utf-8")
        new, old = _hash(text), None
        if (target := folder / name).exists():
            old = _hash(target.read_text(encoding="utf-8", errors="replace"))
        if old in (None, new, copied.get(name)):
            if old != new:
                write_atomic(target, text)
                written.append(name)
            copied[name] = new
        elif copied.get(name) != new:
            kept.append(name)
    write_atomic(record, json.dumps(copied, indent=1) + "\n")
    return written, kept


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hashes(found: Any) -> dict[str, str]:
    if not isinstance(found, dict):
        raise InputError("it holds no hashes")
    return found
