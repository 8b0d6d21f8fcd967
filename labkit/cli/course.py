"""How lessons went, on the terminal: while they run, and at the end."""

from typing import Any

from gpumem.cli import print_table


def announce(outcome: Any) -> None:
    """Print how a lesson went, beside the progress bars."""
    from tqdm import tqdm

    how = f"{outcome.seconds:.1f} s, {outcome.host_peak} of host memory"
    tqdm.write(f"{outcome.status}  {outcome.name}  ({how})")
    for problem in outcome.problems:
        tqdm.write(f"        {problem}")


def finish(course: Any) -> int:
    """Write the report of a `labkit.course.runner.Course`, print tables, return the exit code."""
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
        print("Stopped by Ctrl-C. Finished lessons are kept.")
        return 130
    return 0 if course.passed else 1
