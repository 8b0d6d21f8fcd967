"""The cheat sheet's figures: verdicts by article, and what each technique saves and costs alone."""

import textwrap
from collections import Counter
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from labkit.cheat_sheet.export import OPEN, percent
from labkit.cheat_sheet.figures import Row
from labkit.cheat_sheet.findings import Trial
from labkit.course.claims import Verdict, all_claims, article_names
from labkit.show.bars import HEIGHT, write_total
from labkit.show.picture import EDGE, INK, Picture, note, showing

#: Each verdict's colour and hatch, in the order of the bars.
STYLES = {
    Verdict.SUPPORTED: ("#009E73", ""),
    Verdict.UNDERSTATED: ("#A6DCC8", "///"),
    Verdict.DEPENDS: ("#F0C75E", ""),
    Verdict.OVERSTATED: ("#E8A087", "\\\\\\"),
    Verdict.WRONG: ("#D55E00", "xxx"),
    Verdict.NOT_TESTABLE: ("#FFFFFF", ""),
}
NAMES = {verdict: OPEN if verdict is Verdict.NOT_TESTABLE else str(verdict) for verdict in STYLES}
CHANGED, SAME = ("#CC79A7", "xxx"), ("#0072B2", "")  # the training
#: Where the numbers of neighbours stand beneath, apart even where both are narrow; in points.
SIDES = {Verdict.OVERSTATED: ("right", 1), Verdict.WRONG: ("left", 0)}
EACH_ONCE = "all, each once"
MOST = 1.2  # of a change that is drawn; a longer bar is cut


def _fill(style: tuple[str, str]) -> dict[str, object]:
    return {"facecolor": style[0], "hatch": style[1], "zorder": 3, **EDGE}


def draw_verdict_bars(trial: Trial, *, title: str) -> Picture:
    """Draw how each article's claims came out, a bar for each article and one for all claims."""
    names = {letter: f"{letter}: {name}" for letter, name in article_names().items()}
    counted = trial.by_article()
    counted[EACH_ONCE] = Counter(map(trial.verdict, all_claims()))
    phantoms = sum(machine.startswith("a phantom") for machine in trial.machines)
    others = len(trial.machines) - phantoms
    source = f"one verdict for each claim, over all records: {phantoms} phantom GPUs"
    figure = Picture(
        title,
        source + (f" and {others} other machine{'s' * (others > 1)}" if others else ""),
        body=40 + 56 * len(counted),
        legend=[Patch(label=NAMES[verdict], **_fill(style)) for verdict, style in STYLES.items()],
    )
    most = max(sum(counts.values()) for counts in counted.values())
    labels, rows = [], []
    with figure.drawing() as axes:
        for y, (letter, counts) in enumerate(counted.items()):
            start = 0
            for verdict, style in STYLES.items():
                number = counts[verdict]
                axes.barh(y, number, left=start, height=HEIGHT, **_fill(style))
                if number and style[1]:  # a hatch leaves nothing legible
                    below = (start + number / 2, y + HEIGHT / 2)
                    side, shift = SIDES.get(verdict, ("center", 0))
                    note(axes, str(number), below, (shift, -2), size=10, ha=side, va="top")
                elif number:
                    middle = (start + number / 2, y)
                    place = {"ha": "center", "va": "center", "zorder": 6}
                    note(axes, str(number), middle, (0, 0), size=10, **place)
                start += number
            write_total(axes, f"{start} claims", start, y)
            labels.append(textwrap.fill(names.get(letter, letter), 30))
            rows.append([letter, *(str(counts[verdict]) for verdict in STYLES), str(start)])
        _name_bars(axes, labels)
        axes.set_xlim(0, 1.004 * most)  # with the outline of the longest
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
    figure.describe("Stacked bars", ["article", *NAMES.values(), "together"], rows)
    return figure


def draw_alone(rows: Sequence[Row], source: str) -> Picture:
    """Draw how each technique alone changes the plain job's peak and the bound on its step."""
    shown = [row for row in rows if row.after]
    kinds = {"the training stays the same": SAME, "the training changes": CHANGED}
    figure = Picture(
        "Each technique alone, against the plain job",
        source,
        body=60 + 34 * len(shown),
        legend=[Patch(label=name, **_fill(style)) for name, style in kinds.items()],
    )
    table = []
    with figure.drawing(1, 2, sharey=True) as (left, right):
        for y, row in enumerate(shown):
            style = _fill(CHANGED if row.changes_training else SAME)
            values = (-row.saved_share, row.slower_share)
            for axes, value in zip((left, right), values, strict=True):
                drawn = max(-MOST, min(MOST, value))
                axes.barh(y, drawn, height=HEIGHT, **style)
                side = {"ha": "left" if value > 0 else "right", "va": "center"}
                note(axes, percent(value), (drawn, y), (4 if value > 0 else -4, 0), **side)
            table.append([row.technique.name, *map(percent, values)])
        _name_bars(left, [row.technique.name for row in shown])
        for axes, label in ((left, "peak of a step"), (right, "bound on its time")):
            low, high = axes.get_xlim()
            axes.set_xlim(min(low, -0.1) * 1.35, max(high, 0.1) * 1.35)  # room for the numbers
            axes.axvline(0, color=INK, linewidth=1, zorder=5)
            axes.set_xticks([])
            axes.set_title(label, size=10.5, color=INK)
            axes.spines[["left", "bottom"]].set_visible(False)
    figure.describe("Bars", ["technique", "peak", "bound on a step"], table)
    return figure


def _name_bars(axes: Axes, names: Sequence[str]) -> None:
    """Name the bars, the first at the top."""
    axes.set_yticks(range(len(names)), names, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)


verdict_bars = showing(draw_verdict_bars)
alone = showing(draw_alone)
