"""What the commands of `labkit` share: tables on the terminal, the end of a run, numbers as text.

Limits: a cell is at most 44 characters wide, whatever the terminal is; longer ones take more lines.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from labkit.memory import InputError


def announce(outcome: Any) -> None:
    """Print how a lesson went, beside the progress bars."""
    from tqdm import tqdm

    took = f"{outcome.seconds:.1f} s, {outcome.host_peak} of host memory"
    how = "unchanged, passed before" if outcome.reused else took
    tqdm.write(f"{outcome.status}  {outcome.name}  ({how})")
    for problem in outcome.problems:
        tqdm.write(f"        {problem}")


def finish(course: Any, *, continues: str = "--resume") -> int:
    """Write the report, print the tables; the exit code. ``continues`` is what goes on later."""
    from labkit import outcomes, report

    found = [outcomes.stored_result(outcome, course.folder) for outcome in course.outcomes]
    rows = list(report.verdict_rows([result for result in found if result]))
    if rows:
        print_table(report.VERDICT_COLUMNS, rows)
    print_table(
        ("Lesson", "Status", "Seconds", "Host memory, peak"),
        [(o.name, o.status, f"{o.seconds:.1f}", o.host_peak) for o in course.outcomes],
    )
    print(f"Report: {report.report(course.folder, course.outcomes).resolve()}")
    if course.interrupted:
        print(f"Stopped by Ctrl-C. Finished lessons are kept; {continues} continues.")
        return 130
    return 0 if course.passed else 1


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their widest cell, long texts in lines of at most 44 characters."""
    wrapped = [[textwrap.wrap(text, 44) for text in row] for row in rows]
    lines = [line for row in wrapped for line in zip_longest(*row, fillvalue="")]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    print()
    for line in (header, ["-" * width for width in widths], *lines):
        cells = (f"{text:<{width}}" for text, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())
    print()


def whole(text: str, what: str) -> int:
    """``text`` as a whole number.

    Raises:
        InputError: it is none; ``what`` names it.
    """
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"{what} must be a whole number of at least 1, not {text!r}") from error


def seconds(text: str) -> float:
    """A time limit.

    Raises:
        InputError: not a number from 1 second to a week.
    """
    try:
        limit = float(text)
    except ValueError as error:
        raise InputError(
            f"--timeout must be a number of seconds such as 600, not {text!r}"
        ) from error
    if not (math.isfinite(limit) and 1 <= limit <= 7 * 24 * 3600):
        raise InputError(f"--timeout must be from 1 second to a week (604800), not {text}")
    return limit
