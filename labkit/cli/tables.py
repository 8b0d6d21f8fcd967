"""What the commands of `labkit` share: tables on the terminal, the end of a run, option types.

Limits: where the output is no terminal, tables are 160 characters wide.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import Any

WIDTH_WITHOUT_TERMINAL = 160

#: A parent of parsers: arguments of what is run.
parameters = argparse.ArgumentParser(add_help=False)
parameters.add_argument(
    "-p",
    nargs=2,
    action="append",
    default=[],
    metavar=("NAME", "VALUE"),
    dest="parameters",
    help="set a parameter of the lesson or of your experiment; may be given several times",
)


def recipe_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return those of ``options`` that are fields of a recipe."""
    from labkit.plan.recipe import Recipe

    names = {field.name for field in dataclasses.fields(Recipe)}
    return {name: value for name, value in vars(options).items() if name in names}


def announce(outcome: Any) -> None:
    """Print how a lesson went, beside the progress bars."""
    from tqdm import tqdm

    how = f"{outcome.seconds:.1f} s, {outcome.host_peak} of host memory"
    if outcome.reused:
        how = "unchanged, passed before"
    tqdm.write(f"{outcome.status}  {outcome.name}  ({how})")
    for problem in outcome.problems:
        tqdm.write(f"        {problem}")


def finish(course: Any, *, continues: str = "--resume") -> int:
    """Write the report, print the tables and return the exit code.

    Args:
        course: what `labkit.course.runner.run` returned.
        continues: the option or command that continues a run that was stopped.
    """
    from labkit.course import outcomes, report

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
    """Print a table as wide as the terminal at most; long texts take more lines."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table

    columns = [Column(name, overflow="fold") for name in header]
    table = Table(*columns, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    Console(width=width, markup=False, highlight=False).print("", table, "", sep="\n")
