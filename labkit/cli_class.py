"""``labkit class``: what the participants of a class found, on one page.

Exit codes: 0 the page is written, with what was left out named on it; 1 it is written, and no
result could be read; 2 there is no such folder, or nothing in it; 130 Ctrl-C.

Limits: as ``labkit.classroom``.
"""

import argparse
from pathlib import Path

from labkit.memory import InputError

COMMAND = "class"
PAGE = "class.html"


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser's ``commands``."""
    parser = commands.add_parser(
        COMMAND,
        help="compare what participants sent: machines, verdicts, peaks, on one page",
        description="FOLDER holds one file, folder or zip per participant, named by participant: "
        "executed notebooks, folders of `labkit run`, or results of `labkit record`.",
        epilog="exit code: 0, 1 if no result could be read, or 2 for bad input",
    )
    parser.add_argument("folder", metavar="FOLDER", help="what participants sent")
    parser.add_argument("--out", default=PAGE, metavar="FILE.html", help="(default: %(default)s)")
    parser.add_argument("--anonymous", action="store_true", help="number participants, no names")
    parser.set_defaults(action=_class)


def _class(options: argparse.Namespace) -> int:
    from labkit.classroom import gather
    from labkit.classroom.page import summary, write_page

    out = Path(options.out)
    if out.suffix.lower() != ".html":  # else a slip could replace what somebody sent
        raise InputError(f"--out must name a file that ends in .html, not {options.out!r}")
    classroom = gather(Path(options.folder), anonymous=options.anonymous, page=out)
    write_page(classroom, out)
    print(summary(classroom))
    print(f"Page: {out.resolve()}")
    return 0 if classroom.lessons else 1
