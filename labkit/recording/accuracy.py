"""Tables of how far simulating and tracking are from what the allocator says, read back from files.

``benchmarks/accuracy.py`` measures and writes them as ``results/<gpu>/accuracy.json``. Beside it
are jobs that people ask for, as ``headlines.json``, and what was tried of the table of
`will_it_fit`, as ``fits.json``.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from gpumem.files import read_file
from gpumem.hardware.this_machine import Machine
from gpumem.inputs import read_record
from labkit.lesson.results import Date, Recorded, read_folders

FILE, HEADLINES_FILE, FITS_FILE = FILES = ("accuracy.json", "headlines.json", "fits.json")
RECIPES_GROUP, SETUPS_GROUP = "recipes", "set-ups"
Text = Annotated[str, Meta(min_length=1, max_length=300)]
Bytes = Annotated[int, Meta(gt=0, lt=1 << 60)]


@dataclass(frozen=True)
class AccuracyRow:
    """One recipe or set-up. Bytes; None where it could not run or nothing is reserved."""

    setup: Text
    truth_bytes: Bytes | None
    tracked_bytes: Bytes | None
    simulated_bytes: Bytes | None
    reserved_bytes: Bytes | None = None
    simulated_reserved_bytes: Bytes | None = None
    group: Text = RECIPES_GROUP

    def errors(self) -> dict[str, float | None]:
        """Return by how many percent of the truth each estimate is too high; None if unknown."""
        pairs = {
            "simulated": (self.simulated_bytes, self.truth_bytes),
            "tracked": (self.tracked_bytes, self.truth_bytes),
            "reserved": (self.simulated_reserved_bytes, self.reserved_bytes),
        }
        return {
            name: None if None in (ours, truth) else 100 * (ours - truth) / truth
            for name, (ours, truth) in pairs.items()
        }


@dataclass(frozen=True)
class AccuracyTable(Recorded):
    """The rows of one machine, with its ``name``, ``kind`` and ``versions``, and the date."""

    rows: Annotated[tuple[AccuracyRow, ...], Meta(min_length=1, max_length=1000)]
    machine: Machine
    date: Date
    schema: Literal[2] = 2

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Any) -> "AccuracyTable":
        """Read what the benchmark wrote; an `InputError` names a field that is wrong."""
        return read_record(cls, record, "an accuracy table")


def load(path: Path | str) -> AccuracyTable:
    """Read the table stored at ``path``, as `read_file` does."""
    return read_file(Path(path), AccuracyTable.from_dict, "an accuracy table")


def recorded_tables(file: str = FILE) -> dict[str, AccuracyTable]:
    """Return the tables of all GPUs by key, as `read_folders` reads them."""
    return {gpu: table for (gpu, _), table in read_folders(file, load).items()}
