"""Which GPUs have recorded: by name, versions and date, with what each of them recorded.

    gpus = recorded_gpus()                  # reads results/<gpu>/
    [gpu.cells for gpu in gpus]             # the rows of a table below COLUMNS

Used by the site and the cheat sheet, which so cannot differ.

Limits: versions are those of the newest record of a GPU; where its records have several, that is
said, not listed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit import accuracy, headlines, results

NOBODY = "No GPU has recorded yet: yours can be the first."
COLUMNS = ("GPU", "Recorded", "Lessons", "Headline runs", "Accuracy matrix", "Versions")
#: What decides a figure, in the order of the text.
_PACKAGES = ("driver", "cuda", "torch", "transformers", "bitsandbytes")


@dataclass(frozen=True, kw_only=True)
class RecordedGpu:
    """What one GPU recorded.

    Attributes:
        key: the name of its folder.
        name: as its driver says it.
        first, last: the dates of its oldest and newest record, ``2026-01-02``.
        lessons: their numbers.
        headlines: their names.
        accuracy_rows: of the accuracy matrix; 0 if it was not recorded.
        versions: in words, of the newest record.
        mixed: other records were made with other versions.
    """

    key: str
    name: str
    first: str
    last: str
    lessons: tuple[str, ...]
    headlines: tuple[str, ...]
    accuracy_rows: int
    versions: str
    mixed: bool

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row of the table, a text for each of ``COLUMNS``."""
        dates = self.last if self.first == self.last else f"{self.first} to {self.last}"
        rows = f"{self.accuracy_rows} recipes and set-ups" if self.accuracy_rows else "–"
        versions = self.versions + (" (older records: others)" if self.mixed else "")
        return (self.name, dates, str(len(self.lessons)), ", ".join(self.headlines) or "–", rows,
                versions)  # fmt: skip


def recorded_gpus(folder: Path | str | None = None) -> tuple[RecordedGpu, ...]:
    """The GPUs that have recorded, by name.

    Args:
        folder: holds ``<gpu>/``; the course's own recordings if None.

    A file that cannot be read is named in a warning and left out.
    """
    lessons, tables = results.all_recorded(folder), accuracy.recorded(folder)
    runs = headlines.recorded(folder)
    keys = {*lessons, *tables, *runs}
    gpus = [_gpu(key, lessons.get(key, []), runs.get(key, []), tables.get(key)) for key in keys]
    return tuple(sorted(gpus, key=lambda gpu: (gpu.name, gpu.key)))


def _gpu(key: str, lessons: Sequence, runs: Sequence, table: Any) -> RecordedGpu:
    records = sorted([*lessons, *runs, *([table] if table else [])], key=lambda each: each.date)
    spelled = [versions_text(record.machine, _PACKAGES) for record in records]
    return RecordedGpu(
        key=key,
        name=str(records[-1].machine["name"]),
        first=records[0].date[:10],
        last=records[-1].date[:10],
        lessons=tuple(result.lesson for result in lessons),
        headlines=tuple(headline.name for headline in runs),
        accuracy_rows=len(table.rows) if table else 0,
        versions=spelled[-1],
        mixed=len(set(spelled)) > 1,
    )


def versions_text(
    machine: Mapping[str, Any], packages: Sequence[str] = ("torch", "transformers")
) -> str:
    """The versions of these packages in a record's machine, in words."""
    found = machine.get("versions")
    found = found if isinstance(found, Mapping) else {}
    return ", ".join(f"{name} {found[name]}" for name in packages if found.get(name))
