"""Write docs/CHEAT_SHEET.md's tables and draw its picture, which the README shows, too.

Simulates (two minutes on two cores) what `labkit cheat-sheet` prints. The picture shows what each
move of its order of adoption leaves of the peak: a sentence in the README and the page says so, and
the page describes it in full.

Usage: `make picture`.
"""

import re
from pathlib import Path

import matplotlib as mpl

from gpumem.figures.bars import draw_bars
from gpumem.figures.drawing import DPI, STYLE, Picture
from gpumem.files import write_atomic
from gpumem.units import format_bytes
from labkit.cheat_sheet import Sheet, build, sections

DOCS = Path(__file__).resolve().parent.parent / "docs"


def draw(sheet: Sheet) -> Picture:
    """Bars: the plain job, and it with each move on top of the earlier ones."""
    named = {"plain training": sheet.plain.run}
    for move in sheet.order:
        named["+ " + move.name.replace(" + ", ", ")] = move.after.run
    title = f"{sheet.job.model}, one training step: what each technique leaves of the peak"
    return draw_bars(named.values(), labels=list(named), title=title)


def finding(sheet: Sheet) -> str:
    """What the picture shows, in a sentence."""
    first, last = sheet.plain.run, sheet.order[-1].after.run
    return (
        f"One training step of {sheet.job.model} peaks at {format_bytes(first.peak_bytes)}; "
        f"{len(sheet.order)} moves, one on top of the other, leave {format_bytes(last.peak_bytes)}."
    )


def between(text: str, mark: str, made: str) -> str:
    """``text`` with ``made`` between the two comments that ``mark`` names."""
    begin, end = f"<!-- {mark}: begin -->\n", f"<!-- {mark}: end -->"
    before, _, rest = text.partition(begin)
    return before + begin + made + "\n" + end + rest.partition(end)[2]


def main() -> None:
    sheet = build()
    picture = draw(sheet)
    with mpl.rc_context(STYLE):
        picture.savefig(DOCS / "adoption.png", dpi=DPI * 2, metadata={"Software": None})
    for path in (DOCS.parent / "README.md", DOCS / "CHEAT_SHEET.md"):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"!\[[^\]]*\](?=\((docs/)?adoption\.png\))", f"![{finding(sheet)}]", text)
        if path.parent == DOCS:
            text = between(text, "picture", picture.alt)
            text = between(text, "cheat sheet", "\n\n".join(map(str, sections(sheet))))
        write_atomic(path, text)


if __name__ == "__main__":
    main()
