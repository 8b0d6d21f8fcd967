"""The command line: ``labkit doctor | run | estimate | advise | report | record | cheat-sheet |
class``.

Exit codes: 0 all is well; 1 a lesson failed, doctor found a problem, a recipe does not fit, or no
result of a class could be read; 2 something we were given cannot be used, or a file cannot be
written (one sentence says which); 130 Ctrl-C.

Limits: ``record`` needs a CUDA machine. The other commands work on any.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from labkit import cli_class, cli_planning, cli_recording, cli_sheet, cli_text
from labkit.lessons import RUN_FOLDER, find
from labkit.memory import InputError, one_of, positive_int

COMMANDS = ("doctor", "run", "report", cli_recording.COMMAND, cli_sheet.COMMAND,
            cli_class.COMMAND, *cli_planning.COMMANDS)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (`{self.prog} --help` explains)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
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

    cli_recording.add_command(commands)
    cli_sheet.add_command(commands)
    cli_class.add_command(commands)
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
    from labkit.doctor.findings import as_text

    findings = examine()
    columns = min(shutil.get_terminal_size().columns, 100)
    print(as_text(findings, columns=columns, encoding=sys.stdout.encoding or "ascii"))
    return 1 if any(finding.status == "problem" for finding in findings) else 0


def _run(options: argparse.Namespace) -> int:
    from labkit import notebooks

    jobs = positive_int(cli_text.whole(options.jobs, "--jobs"), "--jobs", most=256)
    timeout_seconds = cli_text.seconds(options.timeout)
    course = notebooks.run(
        find(options.lessons),
        folder=Path(options.out),
        parameters=[tuple(pair) for pair in options.parameters],
        jobs=jobs,
        resume=options.resume,
        timeout_seconds=timeout_seconds,
        on_done=cli_text.announce,
    )
    return cli_text.finish(course)


def _report(options: argparse.Namespace) -> int:
    from labkit.report import report

    print(f"Report: {report(Path(options.out)).resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
