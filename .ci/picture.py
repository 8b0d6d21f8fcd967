"""Draw README's picture: what each move of the order of adoption leaves of one job's peak.

Simulates (a minute on two cores), writes docs/adoption.png and puts its description into README.md.

Usage: `make picture`.
"""

import re
from pathlib import Path

import matplotlib as mpl

from gpumem.figures.bars import draw_bars
from gpumem.figures.drawing import DPI, STYLE, Picture
from gpumem.files import write_atomic
from gpumem.runs import Run
from labkit.cheat_sheet.figures import CommonJob, order_of_adoption, simulated

ROOT = Path(__file__).resolve().parent.parent
IMAGE = "docs/adoption.png"


def runs(job: CommonJob) -> dict[str, Run]:
    """The plain job, and it with each move on top of the earlier ones, by what to call them."""
    plain = simulated(job, job.recipe)
    named = {"plain training": plain.run}
    for move in order_of_adoption(job):
        named["+ " + move.name.replace(" + ", ", ")] = move.after.run
    return named


def draw(job: CommonJob) -> Picture:
    """The bars, with the GPU's budget as a line."""
    named = runs(job)
    title = f"{job.model}, one training step: what each technique leaves of the peak"
    return draw_bars(named.values(), labels=list(named), title=title)


def main() -> None:
    picture = draw(CommonJob())
    with mpl.rc_context(STYLE):
        picture.savefig(ROOT / IMAGE, dpi=DPI * 2, metadata={"Software": None})
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    line = f"![{picture.alt}]({IMAGE})"
    write_atomic(readme, re.sub(rf"!\[[^\]]*\]\({re.escape(IMAGE)}\)", lambda _: line, text))


if __name__ == "__main__":
    main()
