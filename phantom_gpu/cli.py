"""``labkit phantom``: any training script, unmodified, on GPUs that are not there.

Exit codes: 0 it fits, 1 it does not, 2 the program or the command could not be run to an answer,
130 Ctrl-C, 143 SIGTERM.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpumem import cli
from gpumem.files import write_atomic
from gpumem.inputs import InputError, positive_int
from phantom_gpu.command_line import command_line, processes_of

DEFAULT_GPU = "a100-80gb"


def add_command(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    parser = commands.add_parser(
        "phantom",
        help="run a training script on a GPU that is not there: does it fit, what holds the memory",
        usage="labkit phantom [options] SCRIPT | -m MODULE | -- COMMAND [ARGUMENTS]",
        epilog="exit code: 0 if it fits, 1 if it does not, 2 for bad input or a script that fails",
    )
    option = parser.add_argument
    text = f"{cli.GPU_HELP} (default: %(default)s)"
    option("--gpu", default=DEFAULT_GPU, metavar="NAME", help=text)
    several = "how many (default: as many as the command starts processes, else 1)"
    option("--gpus", type=int, metavar="N", help=several)
    option("--steps", type=int, default=0, metavar="N", help="end after so many optimizer steps")
    option(
        "--budget", type=cli.size, metavar="SIZE", help="what it may reserve of each GPU, as 22GiB"
    )
    option("--expandable-segments", action="store_true", help="have PyTorch's allocator use them")
    help = "try on the script what would make it fit, and say what to write"
    option("--fix", action="store_true", help=help)
    help = "find the largest value of the script's own ARGUMENT that fits, as batch-size"
    option("--largest", metavar="ARGUMENT[,...]", help=help)
    write = {"metavar": "FILE", "type": _new_file}
    option("--html", help="write a page: timeline, segments, who holds the memory", **write)
    option("--snapshot", help="write PyTorch's memory snapshot, for memory_viz", **write)
    option("--json", action="store_true", help="print everything found as JSON")
    kernel = "add such a GPU to Jupyter's kernels, and run nothing"
    option("--install-kernel", action="store_true", help=kernel)
    option("command", nargs="*", help=argparse.SUPPRESS)
    parser.set_defaults(action=_phantom)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our own options, and the command that follows them.

    An option with a value of its own takes the word after it, unless it has ``=``.
    """
    own: list[str] = []
    words = list(arguments)
    flags = ("--expandable-segments", "--fix", "--install-kernel", "--json", "-h", "--help")
    while words:
        word = words[0]
        if word in ("-m", "--") or not word.startswith("-"):
            break
        own.append(words.pop(0))
        if word not in flags and "=" not in word and words:
            own.append(words.pop(0))
    return own, words


def _new_file(text: str) -> Path:
    """Return the path that ``text`` names, if a file can be written there."""
    path = Path(text).resolve()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no file can be written at {text!r}")
    return path


def _phantom(options: argparse.Namespace) -> int:
    from phantom_gpu.fix import fix
    from phantom_gpu.largest import largest
    from phantom_gpu.run_script import run_program

    if options.install_kernel:
        return _install_kernel(options)
    command = command_line(options.command)
    if options.largest and (options.fix or options.html):
        raise InputError("--largest goes with neither --fix nor --html")
    if options.snapshot and (options.largest or options.fix):
        raise InputError("--snapshot is of one run: leave --fix and --largest out")
    steps = positive_int(options.steps, "--steps") if options.steps else 0
    asked = {
        "gpu": options.gpu,
        "gpus": options.gpus or processes_of(command),
        "steps": steps,
        "budget_bytes": options.budget,
        "expandable_segments": options.expandable_segments,
        "report": lambda sentence: print(f"labkit: {sentence}", file=sys.stderr),
    }
    if options.json:
        asked["stdout"] = sys.stderr
    if options.html is not None:
        try:
            from phantom_gpu.report_page import page
        except ModuleNotFoundError as error:
            missing = f"--html needs {error.name}, which is missing: pip install {error.name}"
            raise InputError(missing) from None
    if options.largest:
        report = largest(command, options.largest.split(","), **asked)
    elif options.fix:
        report = fix(command, record=options.html is not None, **asked)
    else:
        record, snapshot = options.html is not None, options.snapshot or ""
        report = run_program(command, record=record, snapshot=snapshot, **asked)
    print(json.dumps(report.to_dict(), indent=2) if options.json else f"\n{report}")
    if options.html is not None:
        write_atomic(options.html, page(report, command=options.typed))
        print(f"Page: {options.html}", file=sys.stderr)
    if report.interrupted:
        return 130
    return {True: 0, False: 1, None: 2}[report.fits]


def _install_kernel(options: argparse.Namespace) -> int:
    from phantom_gpu.jupyter_kernel import install_kernel

    if options.command:
        raise InputError("--install-kernel runs nothing: leave the script out")
    name, folder = install_kernel(options.gpu, options.gpus or 1)
    print(f"Jupyter has the kernel “{name}” now, in {folder}. A page that is open needs a reload.")
    return 0
