"""Which GPUs have recorded: a table of names, dates, versions and what each of them recorded.

The site and the cheat sheet show it.

Limits: versions are those of a GPU's newest record; the others' are in the records.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.course import results
from labkit.recording import accuracy, benchmarks

NOT_YET = "No GPU has recorded yet: yours can be the first."
COLUMNS = ("GPU", "Recorded", "Lessons", "Headline runs", "Accuracy matrix", "Versions")
#: Packages that decide a figure.
_PACKAGES = ("driver", "cuda", "torch", "transformers", "bitsandbytes")


def recorded_gpus(folder: Path | str | None = None) -> tuple[tuple[str, ...], ...]:
    """Return a row of texts, below ``COLUMNS``, for each GPU that has recorded, by name.

    Args:
        folder: holds ``<gpu>/``; the course's own recordings if None.

    A file that cannot be read is named in a warning and left out.
    """
    lessons, tables = results.all_recorded(folder), accuracy.recorded(folder)
    runs = benchmarks.recorded(folder)
    keys = {*lessons, *tables, *runs}
    return tuple(
        sorted(_row(lessons.get(key, []), runs.get(key, []), tables.get(key)) for key in keys)
    )


def _row(lessons: Sequence, runs: Sequence, table: Any) -> tuple[str, ...]:
    records = sorted([*lessons, *runs, *([table] if table else [])], key=lambda each: each.date)
    newest = records[-1]
    dates = dict.fromkeys([records[0].date[:10], newest.date[:10]])
    return (
        newest.machine["name"],
        " to ".join(dates),
        str(len(lessons)),
        ", ".join(each.benchmark.name for each in runs) or "–",
        f"{len(table.rows)} recipes and set-ups" if table else "–",
        versions_text(newest.machine, _PACKAGES),
    )


def versions_text(
    machine: Mapping[str, Any], packages: Sequence[str] = ("torch", "transformers")
) -> str:
    """Return the versions of these packages in a record's machine as text."""
    found = machine.get("versions", {})
    return ", ".join(f"{name} {found[name]}" for name in packages if found.get(name))
