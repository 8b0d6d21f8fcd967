"""Tables of how far simulating and tracking are from what the allocator says, read back from files.

``benchmarks/accuracy.py`` measures and writes them as ``results/<gpu>/accuracy.json``.

Limits: errors are computed from the bytes in the file; the summary beside them is not read.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from labkit.memory import InputError, shown
from labkit.results import read_date, read_file, read_folders, read_machine

FILE = "accuracy.json"
SCHEMA = 2
RECIPES_GROUP, SETUPS_GROUP = "recipes", "set-ups"
_MOST_ROWS, _MOST_TEXT = 1000, 300


@dataclass(frozen=True)
class Row:
    """One recipe or set-up. Bytes; None where it could not run or nothing is reserved."""

    setup: str
    truth_bytes: int | None
    tracked_bytes: int | None
    simulated_bytes: int | None
    reserved_bytes: int | None = None
    simulated_reserved_bytes: int | None = None
    group: str = RECIPES_GROUP

    def errors(self) -> dict[str, float | None]:
        """Per cent of the truth by which each estimate is too high; None where there is none."""
        return {
            "simulated": error_percent(self.simulated_bytes, self.truth_bytes),
            "tracked": error_percent(self.tracked_bytes, self.truth_bytes),
            "reserved": error_percent(self.simulated_reserved_bytes, self.reserved_bytes),
        }


def error_percent(estimate_bytes: int | None, truth_bytes: int | None) -> float | None:
    """By how many per cent of the truth an estimate is too high; None where one is missing."""
    if estimate_bytes is None or not truth_bytes:
        return None
    return 100 * (estimate_bytes - truth_bytes) / truth_bytes


@dataclass(frozen=True)
class AccuracyTable:
    """The rows of one machine, with its ``name``, ``kind`` and ``versions``, and the date."""

    rows: tuple[Row, ...]
    machine: Mapping[str, Any]
    date: str

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return {"schema": SCHEMA, "machine": dict(self.machine), "date": self.date,
                "rows": [asdict(row) for row in self.rows]}  # fmt: skip

    @classmethod
    def from_dict(cls, record: Any) -> "AccuracyTable":
        """Read what the benchmark wrote; nothing in it is trusted.

        Raises:
            InputError: a field is missing, of the wrong kind or out of range.
        """
        if not isinstance(record, Mapping):
            raise InputError(f"an accuracy table must be an object, not {type(record).__name__}")
        if record.get("schema") != SCHEMA or isinstance(record["schema"], bool):
            raise InputError(f"its schema {shown(record.get('schema'))} is not {SCHEMA}")
        rows = record.get("rows")
        if not isinstance(rows, list) or not 1 <= len(rows) <= _MOST_ROWS:
            raise InputError(f"rows must be a list of 1 to {_MOST_ROWS}")
        read = tuple(_read_row(row) for row in rows)
        if len({(row.group, row.setup) for row in read}) != len(read):
            raise InputError("a row stands in it twice")
        machine = read_machine(record.get("machine"))
        return cls(read, machine, read_date(record.get("date")))


def _read_row(record: Any) -> Row:
    names = {field.name for field in fields(Row)}
    if not isinstance(record, Mapping) or set(record) != names:
        raise InputError(f"a row must be an object with the fields {', '.join(sorted(names))}")
    for key, value in record.items():
        if key in ("setup", "group"):
            if not isinstance(value, str) or not 0 < len(value) <= _MOST_TEXT:
                raise InputError(f"{key} must be a text of at most {_MOST_TEXT} characters")
        elif value is not None and (type(value) is not int or not 0 < value < 1 << 60):
            raise InputError(f"{key} must be a number of bytes or null, not {shown(value)}")
    return Row(**record)


def load(path: Path | str) -> AccuracyTable:
    """The table stored at ``path``.

    Raises:
        InputError: there is no such file, it is too large, not JSON, or not a valid table.
    """
    return read_file(Path(path), AccuracyTable.from_dict, "an accuracy table")


def recorded(folder: Path | str | None = None) -> dict[str, AccuracyTable]:
    """The tables of all GPUs, by the name of their folder. A broken file is named and left out.

    Args:
        folder: holds ``<gpu>/accuracy.json``; the course's own recordings if None.
    """
    found = read_folders(folder, FILE, load)
    return {gpu: table for (gpu, _), table in found.items()}
