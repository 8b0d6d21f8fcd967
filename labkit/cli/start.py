"""``labkit start``: the lessons in a folder of one's own, opened in JupyterLab.

Limits: JupyterLab takes this process's place, for this machine only, with a token.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from labkit.values import InputError

FOLDER, FIRST = "gpu-memory-lab", "00_start_here.ipynb"


def add_command(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    parser = commands.add_parser(
        "start",
        help="copy the lessons into a folder and open the first in JupyterLab",
        description="Lessons that are there already are brought up to date, unless you changed "
        "them: those are kept, and named where the course has newer ones.",
        epilog="exit code: 0, or 2 for bad input",
    )
    option = parser.add_argument
    option("folder", nargs="?", default=FOLDER, metavar="DIR", help="(default: %(default)s)")
    option("--no-open", action="store_true", help="only copy")
    parser.set_defaults(action=_start)


def _start(options: argparse.Namespace) -> int:
    from labkit.course.copies import copy_lessons
    from labkit.course.lessons import INSTALL

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
