"""``labkit cheat-sheet``: every technique's figures, verdicts and the order to adopt them in.

Exits with 0; 2 for bad input.

Limits: simulating all techniques takes about a minute.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.cli_text import whole
from labkit.memory import InputError

if TYPE_CHECKING:
    from labkit.sheet_figures import CommonJob

COMMAND = "cheat-sheet"
PAGE = "cheat-sheet.html"
_NUMBERS = {"--batch-size": "sequences in a step", "--seq-len": "tokens per sequence"}
_WORDS = {
    "--model": "a model of the table",
    "--gpu": "the card that is simulated",
    "--precision": "fp32, amp-fp16, amp-bf16 or bf16",
    "--attention": "eager or sdpa",
}


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser's ``commands``."""
    parser = commands.add_parser(
        COMMAND,
        help="put all techniques and verdicts on one page",
        epilog="exit code: 0, or 2 for bad input",
    )
    parser.add_argument("--out", metavar="FILE.html", help=f"the page (default: {PAGE})")
    parser.add_argument("--pdf", metavar="FILE.pdf", help="write the sheet as PDF too")
    parser.add_argument(
        "--markdown", action="store_true", help="print the README's table; a page only with --out"
    )
    parser.add_argument(
        "--run", metavar="FOLDER", help="of a `labkit run`, for this machine's verdicts"
    )
    for flag, text in _WORDS.items():
        parser.add_argument(flag, metavar="NAME", help=text)
    for flag, text in _NUMBERS.items():
        parser.add_argument(flag, metavar="N", help=text)
    parser.set_defaults(action=_sheet)


def _sheet(options: argparse.Namespace) -> int:
    from labkit import sheet_export
    from labkit.cheat_sheet import build

    run = Path(options.run) if options.run is not None else None
    if run is not None and not run.is_dir():
        raise InputError(f"there is no folder {run}; `labkit run --out {run}` makes it")
    with_page = options.out is not None or not options.markdown
    sheet = build(_job(options), run=run, own=with_page or options.pdf is not None, tell=_tell)
    if options.markdown:
        print(sheet_export.markdown(sheet))
    if with_page:
        path = sheet_export.write_page(sheet, Path(options.out or PAGE))
        print(f"Page: {path.resolve()}", file=sys.stderr)
    if options.pdf is not None:
        path = sheet_export.write_pdf(sheet, Path(options.pdf))
        print(f"PDF: {path.resolve()}", file=sys.stderr)
    for sentence in sheet.missing:
        print(sentence, file=sys.stderr)
    return 0


def _job(options: argparse.Namespace) -> "CommonJob":
    from labkit.sheet_figures import CommonJob

    given = {}
    for flag in (*_WORDS, *_NUMBERS):
        name = flag[2:].replace("-", "_")
        if (value := getattr(options, name)) is not None:
            given[name] = whole(value, flag) if flag in _NUMBERS else value
    return CommonJob(**given)


def _tell(name: str) -> None:
    print(f"simulating {name} …", file=sys.stderr)
