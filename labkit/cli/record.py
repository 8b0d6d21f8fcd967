"""``labkit record``: store what this machine's GPU gives, in ``results/<gpu>/``.

Without a choice it records every lesson at GPU size and the accuracy matrix. What is recorded
already is skipped, so that the same command continues an interrupted recording. ``--check``
validates recordings, as CI does.

Exit codes: 0 all that was asked for is recorded, or valid; 1 something failed, or is not valid; 2
bad input or no GPU; 130 Ctrl-C.

Limits: needs CUDA or ROCm, but for ``--check``; ``--phantom`` needs PyTorch's CUDA build. One GPU,
the current one.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpumem.cli import print_table
from gpumem.inputs import InputError, positive_int
from labkit.cli.course import announce, finish

RECORD_FOLDER = Path("build/record")


def add_command(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    parser = commands.add_parser(
        "record",
        help="store what this machine's GPU gives (CUDA only)",
        description="Without --lessons or --accuracy, both are recorded.",
    )
    option = parser.add_argument
    option("--lessons", nargs="*", metavar="LESSON", help="number, name or path (default: all)")
    option("--accuracy", action="store_true", help="accuracy matrix (benchmarks/accuracy.py)")
    phantom = "record in results/phantom/<gpu> what a GPU that is not there gives: a100-80gb"
    option("--phantom", metavar="GPU", help=phantom)
    option("--again", action="store_true", help="record also what is recorded already")
    option("--out", default="results", help="folder (default: %(default)s)")
    seconds = "for each part (default: %(default)s)"
    option("--timeout", type=int, default=1800, metavar="SECONDS", help=seconds)
    option("--check", nargs="*", metavar="FOLDER", help="only check results/<gpu> (default: all)")
    parser.set_defaults(action=_record)


def _record(options: argparse.Namespace) -> int:
    if options.check is not None:
        return _check([Path(folder) for folder in options.check], Path(options.out))
    if options.phantom is not None:
        from phantom_gpu.environment import restart_on

        restart_on(options.phantom)  # before PyTorch, which needs the libraries to be imported
    from gpumem.hardware import this_machine
    from labkit.course import runner
    from labkit.lesson import notebooks
    from labkit.recording import accuracy, recorder

    here = this_machine.machine()
    if not here.can_measure:
        raise InputError(
            f"record needs a CUDA GPU, and this machine has none that PyTorch can use "
            f"({here.name}); `labkit run` works here, and `labkit doctor` says more"
        )
    if options.lessons is None and not options.accuracy:
        options.lessons, options.accuracy = [], True
    chosen = [] if options.lessons is None else notebooks.find(options.lessons)
    if options.accuracy:
        recorder.accuracy_script()
    timeout_seconds = positive_int(options.timeout, "--timeout")
    key = this_machine.gpu_key(here.name, here.capacity_bytes)
    target, work = Path(options.out), RECORD_FOLDER
    if here.phantom:
        target, work = target / "phantom", work / "phantom"
    target, work = target / key, work / key
    for folder in (target, work):
        runner.prepare_folder(folder)
    ours = recorder.Recorder(target, work, here, options.again, timeout_seconds)
    code = 0
    if chosen:
        course = ours.lessons(chosen, announce)
        if course.outcomes:
            code = finish(course)
        if course.interrupted:
            return code
    files = (accuracy.FILE, accuracy.HEADLINES_FILE) if options.accuracy else ()
    parts = [ours.accuracy(file) for file in files]
    if parts:
        rows = [(part.name, part.status, f"{part.seconds:.1f}") for part in parts]
        print_table(("Part", "Status", "Seconds"), rows)
    print(f"Results: {target.resolve()}")
    failed = ours.ran_elsewhere or any(part.status == recorder.FAILED for part in parts)
    return 1 if failed else code


def _check(folders: Sequence[Path], out: Path) -> int:
    """Print what is wrong in each folder."""
    from labkit.recording.review import problems

    code = 0
    if not folders:
        recorded = [path for path in (*out.iterdir(), *out.glob("phantom/*")) if path.is_dir()]
        folders = sorted(path for path in recorded if path.name != "phantom")
    for folder in folders:
        found = problems(folder)
        for problem in found or ["valid"]:
            print(f"{folder}: {problem}")
        if found:
            code = 1
    if not folders:
        print(f"Nothing is recorded in {out}.")
    return code
