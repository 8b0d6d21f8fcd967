"""The command line.

Exit codes: 0 all is well; 1 a lesson failed, doctor found a problem, a recipe does not fit, or no
participant's result could be read; 2 something we were given cannot be used, or a file cannot be
written (one sentence says which); 130 Ctrl-C; 143 SIGTERM. Both end what was started.

Limits: ``record`` needs CUDA or ROCm, but for ``--check``, and records the current GPU. The other
commands work on any machine; ``--phantom`` needs PyTorch's CUDA build. ``start`` lets JupyterLab
take this process's place, for this machine only, with a token.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import gpumem.cli
import phantom_gpu.cli
from gpumem.cli import add_recipe_options, print_table, recipe_fields
from gpumem.files import RUN_FOLDER, SOURCE
from gpumem.inputs import InputError, one_of, positive_int
from gpumem.processes import ends_in_order

DISTRIBUTION = "gpu-memory-lab"
COPY, FIRST = "gpu-memory-lab", "00_start_here.ipynb"
RECORD_FOLDER = Path("build/record")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (`{self.prog} --help` explains)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        parser = _Parser(
            prog="labkit", description="Run GPU Memory Lab's lessons and look after them."
        )
        commands = _add_commands(parser)
        if not arguments[0].startswith("-"):
            arguments[0] = one_of(arguments[0], commands.choices, "command")
        command: list[str] = []
        if arguments[0] == "phantom":  # what follows our own options belongs to the script
            own, command = phantom_gpu.cli.split(arguments[1:])
            arguments = ["phantom", *own]
        options = parser.parse_args(arguments)
        if command:
            options.command = command
        options.typed = ["labkit", *arguments, *command]
        if getattr(options, "lent", None) is not None:
            from phantom_gpu.environment import restart_on

            restart_on(options.lent)  # before PyTorch, which needs the libraries to be imported
        with ends_in_order():
            return options.action(options)
    except InputError as error:
        sentence = str(error)
    except ModuleNotFoundError as error:
        extra = extra_with(error.name or "")
        if extra is None:  # no extra brings it: a fault of ours
            raise
        sentence = f"{error.name} is missing: pip install 'gpu-memory-lab[{extra}]'"
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        sentence = f"{error.strerror or error}{where}. What was finished is kept."
    except KeyboardInterrupt:
        print("\nlabkit: stopped", file=sys.stderr)
        return 130
    print(f"labkit: {sentence}", file=sys.stderr)
    return 2


def extra_with(module: str) -> str | None:
    """Return the smallest extra of the distribution that brings ``module``; None if none does."""
    from labkit.doctor import EXTRAS, requirements

    name = module.partition(".")[0].replace("_", "-").lower()
    found = {extra for each, extras in requirements() if each.name == name for extra in extras}
    return min(found, key=EXTRAS.index, default=None)


def _add_commands(parser: argparse.ArgumentParser) -> argparse._SubParsersAction:
    parser.add_argument("--version", action="version", version=f"labkit {version(DISTRIBUTION)}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    doctor = commands.add_parser("doctor", help="say what is wrong with this machine's set-up")
    doctor.set_defaults(action=_doctor)

    start = commands.add_parser(
        "start",
        help="copy the lessons into a folder and open the first in JupyterLab",
        description="Lessons that are there already are brought up to date, unless you changed "
        "them: those are kept, and named where the course has newer ones.",
        epilog="exit code: 0, or 2 for bad input",
    )
    option = start.add_argument
    option("folder", nargs="?", default=COPY, metavar="DIR", help="(default: %(default)s)")
    option("--no-open", action="store_true", help="only copy")
    start.set_defaults(action=_start)

    run = commands.add_parser("run", help="execute and check lessons, write one HTML report")
    option = run.add_argument
    given = {"nargs": 2, "action": "append", "default": [], "metavar": ("NAME", "VALUE")}
    several = "set a parameter of the lesson; may be given several times"
    option("-p", dest="parameters", help=several, **given)
    option("lessons", nargs="*", metavar="LESSON", help="number, name or path (default: all)")
    option("--out", default=RUN_FOLDER, help="folder (default: %(default)s)")
    option("--jobs", type=int, default=1, metavar="N", help="lessons at a time")
    limit = "limit per lesson (default: %(default)s)"
    option("--timeout", type=int, default=600, metavar="SECONDS", help=limit)
    lent = "on a GPU that is not there, by PyTorch's CUDA build: a100-80gb, or h100x4 for four"
    option("--phantom", dest="lent", metavar="GPU", help=lent)
    run.set_defaults(action=_run)

    report = commands.add_parser(
        "report",
        help="write the HTML report of an earlier run again, or compare what participants found",
        description="One folder of `labkit run` gets its report. Several folders or files, each "
        "named after a participant, get one page: executed notebooks, folders of `labkit run`, or "
        "results of `labkit record`.",
        epilog="exit code: 0, 1 if no participant's result could be read, or 2 for bad input",
    )
    option = report.add_argument
    option("paths", nargs="*", metavar="PATH", help=f"folder or file (default: {RUN_FOLDER})")
    option("--out", metavar="FILE.html", help="(default: report.html, in the run's folder if one)")
    option("--anonymous", action="store_true", help="compare; number participants, no names")
    report.set_defaults(action=_report)

    record = commands.add_parser(
        "record",
        help="store what this machine's GPU gives in all lessons (CUDA only)",
        description="What is recorded already is skipped, so that the same command continues an "
        "interrupted recording.",
        epilog="exit code: 0, 1 if something failed or is not valid, or 2 for bad input or no GPU",
    )
    option = record.add_argument
    option("--lessons", nargs="*", default=[], metavar="LESSON", help="(default: all)")
    option("--accuracy", action="store_true", help="no lessons: how far simulations are off")
    lent = "record in results/phantom/<gpu> what a GPU that is not there gives: a100-80gb"
    option("--phantom", dest="lent", metavar="GPU", help=lent)
    option("--again", action="store_true", help="record also what is recorded already")
    option("--out", default="results", help="folder (default: %(default)s)")
    option("--timeout", type=int, default=1800, metavar="SECONDS", help=limit)
    option("--check", nargs="*", metavar="FOLDER", help="only check results/<gpu> (default: all)")
    record.set_defaults(action=_record)

    sheet = commands.add_parser(
        "cheat-sheet",
        help="print all techniques, their order and the verdicts, as Markdown",
        epilog="exit code: 0, or 2 for bad input",
    )
    option = sheet.add_argument
    option("--model", metavar="NAME", help="a model of the table")
    option("--gpu", metavar="NAME", help="the GPU that is simulated")
    add_recipe_options(sheet, ("precision", "attention", "batch_size", "seq_len"))
    sheet.set_defaults(action=_cheat_sheet)

    gpumem.cli.add_commands(commands)
    phantom_gpu.cli.add_command(commands)
    return commands


# --- commands ----------------------------------------------------------------------------------


def _doctor(_: argparse.Namespace) -> int:
    from labkit.doctor import as_text, examine

    findings = examine()
    print(as_text(findings))
    return int(any(finding.status == "problem" for finding in findings))


def _start(options: argparse.Namespace) -> int:
    from labkit.lesson.notebooks import INSTALL, copy_lessons

    if not options.no_open and importlib.util.find_spec("jupyterlab") is None:
        raise InputError(f"to open lessons: {INSTALL}; --no-open only copies them")
    folder = Path(options.folder)
    written, kept = copy_lessons(folder)
    print(f"{len(written)} lessons written into {folder.resolve()}")
    for name in kept:
        print(f"{name}: you changed it, so it stays; rename it and start again for the newer one")
    if not options.no_open:
        first = str((folder / FIRST).resolve())
        sys.stdout.flush()
        command = [sys.executable, "-P", "-m", "jupyterlab", first, "--ServerApp.ip=127.0.0.1"]
        os.execv(sys.executable, [*command, "--allow-root"])
    return 0


def _run(options: argparse.Namespace) -> int:
    from labkit.course import runner
    from labkit.lesson.notebooks import find

    course = runner.run(
        find(options.lessons),
        folder=Path(options.out),
        parameters=[tuple(pair) for pair in options.parameters],
        jobs=positive_int(options.jobs, "--jobs", most=256),
        timeout_seconds=positive_int(options.timeout, "--timeout"),
        on_done=announce,
    )
    return finish(course)


def announce(outcome: Any) -> None:
    """Print how a lesson went, its `Outcome`, beside the progress bars."""
    from tqdm import tqdm

    how = f"{outcome.seconds:.1f} s, {outcome.host_peak} of host memory"
    tqdm.write(f"{outcome.status}  {outcome.name}  ({how})")
    for problem in outcome.problems:
        tqdm.write(f"        {problem}")


def finish(course: Any) -> int:
    """Write the report of a `Course` that was run, print tables, return the exit code."""
    from labkit.course import outcomes, report

    found = [outcomes.stored_result(outcome, course.folder) for outcome in course.outcomes]
    rows = report.verdict_rows([result for result in found if result])
    if rows:
        print_table(report.VERDICT_COLUMNS, rows)
    rows = [(o.name, o.status, f"{o.seconds:.1f}", o.host_peak) for o in course.outcomes]
    print_table(("Lesson", "Status", "Seconds", "Host memory, peak"), rows)
    print(f"Report: {report.report(course.folder, course.outcomes).resolve()}")
    if course.interrupted:
        print("Stopped by Ctrl-C. Finished lessons are kept.")
        return 130
    return 0 if course.passed else 1


def _report(options: argparse.Namespace) -> int:
    from labkit.course import report
    from labkit.course.outcomes import read_outcomes

    out = None if options.out is None else Path(options.out)
    if out is not None and out.suffix.lower() != ".html":  # it could replace what somebody sent
        raise InputError(f"--out must name a file that ends in .html, not {options.out!r}")
    paths = [Path(path) for path in options.paths or [RUN_FOLDER]]
    code = 0
    if len(paths) == 1 and not paths[0].is_file() and not options.anonymous:
        path = report.report(paths[0], read_outcomes(paths[0]), out)
    else:
        classroom = report.gather(paths, anonymous=options.anonymous)
        path = report.compare(classroom, out or Path(report.REPORT_NAME))
        print(classroom)
        code = 0 if classroom.lessons else 1
    print(f"Report: {path.resolve()}")
    return code


def _record(options: argparse.Namespace) -> int:
    if options.check is not None:
        return _check([Path(folder) for folder in options.check], Path(options.out))
    from gpumem.hardware import this_machine
    from labkit.course import runner
    from labkit.lesson import notebooks
    from labkit.recording.recorder import record_lessons

    here = this_machine.machine()
    if not here.can_measure:
        raise InputError(
            f"record needs a CUDA GPU, and this machine has none that PyTorch can use "
            f"({here.name}); `labkit run` works here, and `labkit doctor` says more"
        )
    if options.accuracy:
        return _record_accuracy(options.out)
    chosen = notebooks.find(options.lessons)
    timeout_seconds = positive_int(options.timeout, "--timeout")
    key = this_machine.gpu_key(here.name, here.capacity_bytes)
    place = Path("phantom" if here.phantom else "", key)
    target, work = Path(options.out) / place, RECORD_FOLDER / place
    for folder in (target, work):
        runner.prepare_folder(folder)
    how = {"again": options.again, "timeout_seconds": timeout_seconds, "announce": announce}
    course, ran_elsewhere = record_lessons(chosen, here, target=target, work=work, **how)
    code = finish(course) if course.outcomes else 0
    print(f"Results: {target.resolve()}")
    return 1 if ran_elsewhere and code == 0 else code


def _record_accuracy(out: str) -> int:
    """Run the script of a clone that compares what this GPU gives with what was simulated."""
    script = SOURCE / "benchmarks" / "accuracy.py"
    if not script.is_file():
        raise InputError(f"--accuracy needs {script}, which is in a clone")
    parts = [[sys.executable, script, part, "--out", out] for part in ("--gpu", "--headlines")]
    return max([subprocess.run(command).returncode for command in parts])


def _check(folders: Sequence[Path], out: Path) -> int:
    from labkit.recording.recorder import problems

    if not folders:
        recorded = [path for path in (*out.iterdir(), *out.glob("phantom/*")) if path.is_dir()]
        folders = sorted(path for path in recorded if path.name != "phantom")
    found = {folder: problems(folder) for folder in folders}
    for folder, wrong in found.items():
        print(*(f"{folder}: {problem}" for problem in wrong or ["valid"]), sep="\n")
    if not folders:
        print(f"Nothing is recorded in {out}.")
    return 1 if any(found.values()) else 0


def _cheat_sheet(options: argparse.Namespace) -> int:
    from labkit.cheat_sheet import PLAIN, CommonJob, build, sections

    given = {name: getattr(options, name) for name in ("model", "gpu") if getattr(options, name)}
    job = CommonJob(**given, recipe=PLAIN.but(**recipe_fields(options)))
    sheet = build(job, report=lambda name: print(f"simulating {name} …", file=sys.stderr))
    print("# GPU Memory Lab: cheat sheet", *sections(sheet), sep="\n\n")
    return 0
