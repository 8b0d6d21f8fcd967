"""Whether a folder of recordings can be taken in: ``labkit record --check results/<gpu>``.

Everything that is sent in is read by the readers that show it, and held to what they cannot know of
each other: one GPU, whose key the folder's name is; files that `labkit record` writes, unchanged
since, and none besides; sizes and texts that a repository can carry.

Limits: figures that could be true are believed. A register proves that files are as they were
written, not that a GPU wrote them: it is no signature.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from labkit import accuracy, headlines, register, results
from labkit.accuracy import AccuracyTable
from labkit.headline_records import PREFIX, Headline
from labkit.memory import InputError, format_bytes, shown
from labkit.results import Result
from labkit.this_gpu import gpu_key

#: A lesson's record takes about 10 KB, at most 40.
LARGEST_RECORD_BYTES = 1 << 20
LARGEST_FOLDER_BYTES = 8 << 20
MOST_TEXT = 2000
_MARKUP = re.compile(r"<\s*[a-z!/?]|javascript:|&#", re.IGNORECASE)
_DIGEST = re.compile(r"[0-9a-f]{64}")
#: Unicode's categories of characters that show nothing, or turn the text around them.
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn"}

Record = Result | Headline | AccuracyTable


def problems(folder: Path | str) -> list[str]:
    """What is wrong with the recordings in ``folder``, one sentence each; empty if nothing is.

    Args:
        folder: ``results/<gpu>``.

    Raises:
        InputError: there is no such folder.
    """
    folder = Path(folder).resolve()
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; `labkit record` makes results/<gpu>")
    files = sorted(folder.iterdir())
    found = [problem for path in files for problem in _file(path)]
    if found:
        return found  # what stands in such files is not read
    if sum(path.stat().st_size for path in files) > LARGEST_FOLDER_BYTES:
        return [f"{folder.name} is larger than {format_bytes(LARGEST_FOLDER_BYTES)}"]
    records: dict[str, Record] = {}
    for path in files:
        if path.name == register.FILE:
            continue
        try:
            records[path.name] = _load(path)
        except InputError as error:
            found.append(str(error))
            continue
        found += [f"{path.name}: {problem}" for problem in _record(path, records[path.name])]
    if not records and not found:
        found.append(f"{folder.name} holds no recording")
    return [*found, *_one_gpu(folder.name, records), *_registered(folder, files)]


def all_problems(folder: Path | str) -> dict[str, list[str]]:
    """What is wrong with every GPU's recordings in ``folder``, by the name of each thing in it.

    Args:
        folder: ``results``, which holds a ``README.md`` and a folder for each GPU.

    Raises:
        InputError: there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; `labkit record` makes it")
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            found[path.name] = problems(path)
        elif path.name != "README.md" or path.is_symlink():
            found[path.name] = [f"{shown(path.name)} is neither a GPU's folder nor README.md"]
    return found


# --- files ----------------------------------------------------------------------------------------


def _file(path: Path) -> Iterator[str]:
    """What is wrong with a file before it is read."""
    name = path.name
    if path.is_symlink() or not path.is_file():
        yield f"{shown(name)} is no plain file"
    elif name == register.LOCK:
        yield f"{name}: a recording goes on, or was broken off; run `labkit record` to its end"
    elif not _is_ours(name):
        yield f"{shown(name)} is not of those that `labkit record` writes"
    elif path.stat().st_size > LARGEST_RECORD_BYTES:
        yield f"{name} is larger than {format_bytes(LARGEST_RECORD_BYTES)}"


def _is_ours(name: str) -> bool:
    lesson = re.fullmatch(r"(\d\d)\.json", name, re.ASCII)
    if lesson:
        return lesson[1] in results.known_lessons()
    headline_files = {job.file for job in headlines.HEADLINES.values()}
    return name in {accuracy.FILE, register.FILE, *headline_files}


def _load(path: Path) -> Record:
    if path.name == accuracy.FILE:
        return accuracy.load(path)
    if path.name.startswith(PREFIX):
        return headlines.load(path)
    return results.load_recorded(path)


# --- records --------------------------------------------------------------------------------------


def _record(path: Path, record: Record) -> Iterator[str]:
    """What is wrong with one record by itself."""
    if isinstance(record, Result):
        yield from record.broken_invariants()
    if record.machine["kind"] not in ("cuda", "rocm"):
        yield f"it was made on {shown(record.machine['kind'])}, not on a GPU that is measured"
    if datetime.fromisoformat(record.date).date() > datetime.now(UTC).date() + timedelta(days=1):
        yield f"its date {record.date} is still to come"
    capacity_bytes = record.machine.get("capacity_bytes")
    if isinstance(capacity_bytes, int):
        for peak_bytes in _measured(record):
            if peak_bytes > capacity_bytes:
                yield (f"it measured {format_bytes(peak_bytes)} on a GPU of "
                       f"{format_bytes(capacity_bytes)}")  # fmt: skip
    texts = _texts(json.loads(path.read_text(encoding="utf-8")))
    yield from dict.fromkeys(problem for text in texts if (problem := _text(text)))


def _measured(record: Record) -> list[int]:
    """The peaks that were measured, in bytes."""
    if isinstance(record, AccuracyTable):
        return [row.truth_bytes for row in record.rows if row.truth_bytes]
    runs = record.runs if isinstance(record, Result) else [each.run for each in record.entries]
    return [run.peak_bytes for run in runs if run.mode == "measured"]


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys included, however deep."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += [*value.keys(), *value.values()]


def _text(text: str) -> str:
    """What is wrong with a text of a record; "" if nothing is."""
    if len(text) > MOST_TEXT:
        return f"the text {shown(text)} is longer than {MOST_TEXT} characters"
    if any(unicodedata.category(letter) in _UNSEEN for letter in text if letter != "\n"):
        return f"the text {shown(text)} holds characters that cannot be seen"
    return f"the text {shown(text)} looks like markup" if _MARKUP.search(text) else ""


# --- the folder -----------------------------------------------------------------------------------


def _one_gpu(key: str, records: dict[str, Record]) -> Iterator[str]:
    """Whether all records are of one GPU, and the folder has its name."""
    names = sorted({record.machine["name"] for record in records.values()})
    if len(names) > 1:
        yield f"it holds records of several GPUs: {', '.join(map(shown, names))}"
        return
    sizes = {record.machine.get("capacity_bytes") for record in records.values()} - {None}
    for name in names:
        # The accuracy matrix does not say the size; beside others, theirs decides.
        keys = {gpu_key(name, size) for size in sizes if isinstance(size, int)} or {gpu_key(name)}
        if keys != {key}:
            yield f"the folder of {shown(name)} is called {' or '.join(sorted(keys))}, not {key}"


def _registered(folder: Path, files: list[Path]) -> Iterator[str]:
    """Whether the register knows every file, as it is."""
    complaints: list[str] = []
    known = register.Register(folder, complaints.append).files
    if complaints:
        yield f"{register.FILE} cannot be read"
        return
    there = {path.name: path for path in files if path.name != register.FILE}
    for name in sorted(there.keys() | known.keys()):
        if name not in known:
            yield f"{name} is not in {register.FILE}: record it again"
        elif name not in there:
            yield f"{shown(name)} is in {register.FILE}, and is not here"
        elif not _DIGEST.fullmatch(known[name]["made_by"]):
            yield f"{register.FILE} does not say what made {name}"
        elif known[name]["sha256"] != hashlib.sha256(there[name].read_bytes()).hexdigest():
            yield f"{name} was changed after it was recorded: record it again"
