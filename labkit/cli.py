"""The command line: ``labkit doctor | run | estimate | advise | report | record``.

Exit codes: 0 all is well; 1 a lesson failed, doctor found a problem, or a recipe does not fit; 2
something we were given cannot be used, or a file cannot be written (one sentence says which); 130
Ctrl-C.

Limits: ``record`` needs a CUDA machine. The other commands work on any.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from labkit import cli_planning
from labkit.lessons import declared_parameters, find, read_notebook
from labkit.memory import InputError, one_of, positive_int

COMMANDS = ("doctor", "run", "report", "record", *cli_planning.COMMANDS)
RUN_FOLDER = Path("build/course")
RECORD_FOLDER = Path("build/record")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (`{self.prog} --help` explains)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and not arguments[0].startswith("-"):
            arguments[0] = one_of(arguments[0], COMMANDS, "command")
        options = _parser().parse_args(arguments)
        return options.action(options)
    except InputError as error:
        return _refuse(str(error))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _refuse(f"{error.strerror or error}{where}. What was finished is kept.")
    except KeyboardInterrupt:
        print("\nlabkit: stopped", file=sys.stderr)
        return 130


def _refuse(sentence: str) -> int:
    print(f"labkit: {sentence}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="labkit", description="Run GPU Memory Lab's lessons and look after them.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    doctor = commands.add_parser("doctor", help="say what is wrong with this machine's set-up")
    doctor.set_defaults(action=_doctor)

    run = commands.add_parser("run", help="execute and check lessons, write one HTML report")
    _lesson_options(run)
    run.add_argument(
        "-p",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        dest="parameters",
        help="set a lesson's parameter; may be given several times",
    )
    run.add_argument("--out", default=RUN_FOLDER, help="folder (default: %(default)s)")
    run.add_argument("--jobs", default="1", metavar="N", help="lessons at a time (default: 1)")
    run.add_argument(
        "--resume", action="store_true", help="skip lessons that passed and have not changed"
    )
    run.add_argument(
        "--timeout", default="600", metavar="SECONDS", help="limit per lesson (default: 600)"
    )
    run.set_defaults(action=_run)

    report = commands.add_parser("report", help="write the HTML report of an earlier run again")
    report.add_argument("--out", default=RUN_FOLDER, help="the run's folder (default: %(default)s)")
    report.set_defaults(action=_report)

    record = commands.add_parser("record", help="store what this machine's GPU gives (CUDA only)")
    _lesson_options(record)
    record.add_argument("--out", default="results", help="folder (default: %(default)s)")
    record.add_argument(
        "--timeout", default="3600", metavar="SECONDS", help="limit per lesson (default: 3600)"
    )
    record.set_defaults(action=_record)
    cli_planning.add_commands(commands)
    return parser


def _lesson_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "lessons",
        nargs="*",
        metavar="LESSON",
        help="number, name or path of a notebook (default: all)",
    )


# --- commands ----------------------------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    from labkit.doctor import examine

    findings = examine()
    symbols = {"ok": "✓", "note": "·", "problem": "✗"}
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{symbols[finding.status]} {finding.subject:<{width}}  {finding.text}")
        if finding.remedy and finding.status != "ok":
            print(f"  {'':<{width}}  → {finding.remedy}")
    problems = sum(finding.status == "problem" for finding in findings)
    print(f"{problems} problem{'s' if problems != 1 else ''}." if problems else "All is well.")
    return 1 if problems else 0


def _run(options: argparse.Namespace) -> int:
    from labkit import notebooks

    jobs = positive_int(_whole(options.jobs, "--jobs"), "--jobs", most=256)
    timeout_seconds = _seconds(options.timeout)
    course = notebooks.run(
        find(options.lessons),
        folder=Path(options.out),
        parameters=[tuple(pair) for pair in options.parameters],
        jobs=jobs,
        resume=options.resume,
        timeout_seconds=timeout_seconds,
        on_done=_announce,
    )
    return _finish(course)


def _report(options: argparse.Namespace) -> int:
    from labkit.report import report

    print(f"Report: {report(Path(options.out)).resolve()}")
    return 0


def _record(options: argparse.Namespace) -> int:
    from labkit import hardware, notebooks, outcomes, results

    timeout_seconds = _seconds(options.timeout)
    here = hardware.machine()
    if not here.can_measure:
        raise InputError(
            f"record needs a CUDA GPU, and this machine has none that PyTorch can use "
            f"({here.name}); `labkit run` works here, and `labkit doctor` says more"
        )
    lessons = find(options.lessons)
    unfit = [
        lesson.name
        for lesson in lessons
        if "size" not in declared_parameters(read_notebook(lesson.path))
    ]
    if unfit:
        raise InputError(f"lesson {unfit[0]!r} has no parameter 'size', so it cannot be recorded")
    gpu = gpu_key(here.name)
    target, work = Path(options.out) / gpu, RECORD_FOLDER / gpu
    notebooks.prepare_folder(target)

    def keep(outcome: Any) -> None:
        _announce(outcome)
        result = outcomes.stored_result(outcome, work) if outcome.passed else None
        if result is None:
            return
        path = target / f"{result.lesson}.json"
        if not (outcome.reused and path.exists()):
            results.save(result, path)

    course = notebooks.run(
        lessons,
        folder=work,
        parameters=[("size", "auto")],
        resume=True,  # a recording may take hours
        timeout_seconds=timeout_seconds,
        on_done=keep,
    )
    print(f"Results: {target.resolve()}")
    return _finish(course)


def gpu_key(name: str) -> str:
    """The results folder of the GPU called ``name``: its catalogue key, else made from it."""
    from labkit.hardware import gpu

    try:
        return gpu(name).key
    except InputError:  # a card that the catalogue lacks, or two of one name
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"


def _announce(outcome: Any) -> None:
    from tqdm import tqdm

    how = "unchanged, passed before" if outcome.reused else f"{outcome.seconds:.1f} s"
    tqdm.write(f"{outcome.status}  {outcome.name}  ({how})")
    for problem in outcome.problems:
        tqdm.write(f"        {problem}")


def _finish(course: Any) -> int:
    """Write the report, print the tables; the exit code."""
    from labkit import outcomes, report

    found = [outcomes.stored_result(outcome, course.folder) for outcome in course.outcomes]
    rows = list(report.verdict_rows([result for result in found if result]))
    if rows:
        _print_table(report.VERDICT_COLUMNS, rows)
    _print_table(
        ("Lesson", "Status", "Seconds"),
        [(o.name, o.status, f"{o.seconds:.1f}") for o in course.outcomes],
    )
    print(f"Report: {report.report(course.folder, course.outcomes).resolve()}")
    if course.interrupted:
        print("Stopped by Ctrl-C. Finished lessons are kept; --resume continues.")
        return 130
    return 0 if course.passed else 1


def _print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their widest cell, long texts cut at 44 characters."""
    cut = [[text if len(text) <= 44 else text[:43] + "…" for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cut, strict=True)]
    print()
    for row in (header, ["-" * width for width in widths], *cut):
        cells = (f"{text:<{width}}" for text, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    print()


# --- values ------------------------------------------------------------------------------------


def _whole(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"{what} must be a whole number of at least 1, not {text!r}") from error


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError as error:
        raise InputError(
            f"--timeout must be a number of seconds such as 600, not {text!r}"
        ) from error
    if not (math.isfinite(seconds) and 1 <= seconds <= 7 * 24 * 3600):
        raise InputError(f"--timeout must be from 1 second to a week (604800), not {text}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
