"""What changed between two recordings on one GPU: peaks, and tokens per second.

Limits: what is compared has the same name and the same parameters; what has not is counted. Speed
is never quite the same twice, so a headline is always shown.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from labkit.accuracy import AccuracyTable
from labkit.headline_records import Headline
from labkit.memory import format_bytes
from labkit.results import Result

_MOST_WIDTH = 60


class Figure(NamedTuple):
    """One run: what identifies it, what to call it, its peak (None if it did not fit), its speed
    in tokens per second where that was recorded."""

    key: tuple
    name: str
    peak_bytes: int | None
    tokens_per_second: float | None = None


def figures(record: Result | Headline | AccuracyTable) -> list[Figure]:
    """The figures of a record that are compared."""
    if isinstance(record, Headline):
        found = [(entry.label, entry.label,
                  entry.run.peak_bytes if entry.fitted else None, entry.tokens_per_second)
                 for entry in record.entries]  # fmt: skip
    elif isinstance(record, AccuracyTable):
        found = [(row.setup, row.setup, row.truth_bytes, None) for row in record.rows]
    else:
        found = [(_identity(run), run.name, None if run.oom else run.peak_bytes, None)
                 for run in record.runs]  # fmt: skip
    seen: Counter = Counter()
    numbered = []
    for key, name, *rest in found:  # two runs may be alike in name and parameters
        seen[key] += 1
        numbered.append(Figure((key, seen[key]), name, *rest))
    return numbered


def _identity(run) -> str:
    return json.dumps([run.name, run.mode, run.device, dict(run.parameters)], sort_keys=True)


def drift(what: str, old: Sequence[Figure], new: Sequence[Figure]) -> list[str]:
    """Lines that say what changed from ``old`` to ``new``; one line if nothing did.

    Args:
        what: what was recorded again.
        old, new: from `figures`.
    """
    before = {figure.key: figure for figure in old}
    pairs = [(before[figure.key], figure) for figure in new if figure.key in before]
    changed = [(a, b) for a, b in pairs
               if a.peak_bytes != b.peak_bytes
               or a.tokens_per_second != b.tokens_per_second]  # fmt: skip
    added, gone = len(new) - len(pairs), len(old) - len(pairs)
    parts = [f"{len(changed)} of {_many(len(pairs), 'run')} changed" if changed
             else f"no change in {_many(len(pairs), 'run')}"]  # fmt: skip
    parts += [f"{_many(added, 'run')} new"] * bool(added)
    parts += [f"{_many(gone, 'run')} gone"] * bool(gone)
    return [f"{what}: {', '.join(parts)}", *_table(changed)]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _table(changed: Iterable[tuple[Figure, Figure]]) -> list[str]:
    rows = [("", "peak before", "now", "change", "tokens/s before", "now", "change")]
    for old, new in changed:
        name = new.name if len(new.name) <= _MOST_WIDTH else new.name[: _MOST_WIDTH - 1] + "…"
        rows.append((
            name,
            _size(old.peak_bytes), _size(new.peak_bytes), _change(old.peak_bytes, new.peak_bytes),
            _speed(old.tokens_per_second), _speed(new.tokens_per_second),
            _change(old.tokens_per_second, new.tokens_per_second),
        ))  # fmt: skip
    if len(rows) == 1:
        return []
    if all(row[4] == row[5] == "–" for row in rows[1:]):
        rows = [row[:4] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([f"  {row[0]:<{widths[0]}}", *cells]))
    return lines


def _size(nbytes: int | None) -> str:
    return "no fit" if nbytes is None else format_bytes(nbytes)


def _speed(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _change(old: float | None, new: float | None) -> str:
    return f"{100 * (new - old) / old:+.2f} %" if old and new is not None else "–"
