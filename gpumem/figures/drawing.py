"""What all figures share: colours, hatches, and a figure with its title, legend, text and table.

A category has one colour, one hatch and one place in the stack everywhere. The colours can be
distinguished by colour-blind readers, the hatches without any colour. Outlines and hatches are
dark, so that pale areas stand out from the paper too: what is drawn has a contrast of at least 3,
what is written one of 4.5 (WCAG 2.2, success criteria 1.4.11 and 1.4.3).

Limits: static figures, 800 pixels wide. Letters that the font does not have show as boxes in the
figure (never in its table).
"""

import base64
import contextlib
import functools
import html
import io
import math
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from IPython.display import display
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator

from gpumem.figures.cards import Shown
from gpumem.figures.html_pages import Rich, folded, grid
from gpumem.trace import ROUNDING, Category
from gpumem.units import format_bytes

RESERVED = "reserved, not used"
# Okabe and Ito's palette, and two pale colours. Hatches repeat the difference for print and for
# those who see no colour. What is no category follows; the loss takes the colour of buffers, which
# no bar draws beside it.
AREAS: dict[str, tuple[str, str]] = {  # colour and hatch
    Category.WEIGHTS: ("#0072B2", ""),
    Category.BUFFERS: ("#56B4E9", "...."),
    Category.GRADIENTS: ("#E69F00", "///"),
    Category.OPTIMIZER: ("#009E73", "\\\\\\"),
    Category.ACTIVATIONS: ("#D55E00", "---"),
    Category.TEMPORARY: ("#CC79A7", "xxx"),
    Category.CACHE: ("#8FBF3F", "++"),
    Category.INPUTS: ("#F0E442", "ooo"),
    Category.WORKSPACES: ("#C9B3E6", "**"),
    Category.SCRIPT: ("#D8C7A0", "|||"),
    Category.UNATTRIBUTED: ("#8A8A8A", "+++"),
    RESERVED: ("#BDBDBD", ""),
    ROUNDING: ("#FFFFFF", ""),
    "logits and loss": ("#56B4E9", "|||"),
    "16-bit copies": ("#56B4E9", "///"),  # of lesson 04, next to temporary
    "kept by the allocator": ("#BDBDBD", ""),  # of lesson 24, whose sums count it
    "product": ("#D9D9D9", "xxx"),  # of lesson 11, the seventh part: black would hide its outline
}
COLOURS = {category: AREAS[category][0] for category in Category}
OTHER_HATCHES = ("", "///", "...", "\\\\\\", "---", "xxx")
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PALE = ("#E69F00", "#56B4E9")
"""Lines that take a dark outline: their contrast with white paper is below 3 (WCAG 2.2, 1.4.11)."""
LINE_MARKERS = "osD^vPX*"
LINE_DASHES = ("-", "--", "-.", ":")

INK, GREY, ALARM = "#222222", "#5C5C5C", "#B00020"
EDGE = {"edgecolor": INK, "linewidth": 0.6}  # of an area; hatches take its colour
LIMIT_LINE = {"color": INK, "linewidth": 1.6, "linestyle": (0, (5, 2))}
PHANTOM_MARK = "◐"  # half of it is there: PyTorch's allocator, and no GPU
PAPER = {"facecolor": "white", "alpha": 0.95, "edgecolor": "none", "pad": 1.5}  # behind a text

#: Of the longest bar, or the peak; a smaller part is no more than a line, and the table has it.
LEAST_SEEN = 0.003
ROWS_IN_ALT = 12  # of a table; a longer text would not be listened to
WIDTH = 800  # CSS pixels; the image itself has 1.6 times as many, for sharp screens
DPI, SHARPNESS = 100, 1.6
TITLE = {"size": 13, "weight": "bold"}
STYLE = mpl.rc_params_from_file(
    Path(__file__).with_name("figures.mplstyle"), use_default_template=False
)


class Picture(Shown, Figure):
    """A figure with its alternative text (``alt``) and the same numbers as a table (``table``).

    Title, source and legend stand above ``body`` pixels, in which the axes find their place by
    themselves. The figure belongs to no window and needs no closing.
    """

    def __init__(
        self,
        title: str,
        source: str,
        *,
        body: float,
        legend: Sequence[Artist] = (),
        columns: int | None = None,
    ) -> None:
        """Write the header; ``source`` says where the numbers come from, and may be empty.

        The entries of the legend, each with a label, stand in ``columns``; None: in one row of up
        to six, else in four.
        """
        self.title, self.source = title, source
        self.alt, self.table = "", Rich("", "")
        columns = columns or (6 if len(legend) <= 6 else 4)
        lines = _title_lines(title)
        below_title = 12 + 24 * len(lines)
        above = below_title + 18 if source else below_title - 2
        height = above + 24 * math.ceil(len(legend) / columns) + 8 + body
        super().__init__(figsize=(WIDTH / DPI, height / DPI), dpi=DPI)
        FigureCanvasAgg(self)
        rect = (4 / WIDTH, 0, 1 - 8 / WIDTH, body / height)
        self.set_layout_engine(ConstrainedLayoutEngine(rect=rect, w_pad=0.1, h_pad=0.06))
        with mpl.rc_context(STYLE):
            for number, line in enumerate(lines):
                self._write_line(line, 1 - (12 + 24 * number) / height, **TITLE)
            self._write_line(marked(source), 1 - below_title / height, size=10, color=GREY)
            if legend:
                self._write_legend(legend, min(columns, len(legend)), 1 - above / height)

    @contextlib.contextmanager
    def drawing(self, *shape: int, **layout: Any) -> Iterator[Any]:
        """Draw in the style of all figures, in axes that fill the body: as ``subplots`` has it."""
        with mpl.rc_context(STYLE):
            yield self.subplots(*shape, **layout)

    def _write_line(self, words: str, y: float, **style: Any) -> None:
        """Write a line of the header, shortened with an ellipsis until it fits."""
        words = one_line(words, 300)
        text = self.text(16 / WIDTH, y, words, va="top", **style)
        while words and text.get_window_extent().width > WIDTH - 32:
            words = words[: int(len(words) * 0.97) - 1].rstrip()
            text.set_text(f"{words} …")

    def _write_legend(self, entries: Sequence[Artist], columns: int, top: float) -> None:
        """Write the legend row by row; matplotlib itself fills columns."""
        for entry in entries:
            label = one_line(entry.get_label(), 46 if columns < 3 else 34)
            entry.set_label(f" {label}" if label.startswith("_") else label)  # "_x" would be hidden
        self.legend(
            handles=[entry for column in range(columns) for entry in entries[column::columns]],
            loc="upper left",
            bbox_to_anchor=(8 / WIDTH, top),
            ncols=columns,
            frameon=False,
            fontsize=9.5,
            handlelength=1.9,
            handleheight=1.0,
            columnspacing=1.4,
            labelcolor=INK,
        ).set_in_layout(False)

    def describe(
        self,
        kind: str,
        headings: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        parts: Sequence[str] = (),
        caption: str = "",
        text_columns: Collection[int] = (0,),
    ) -> None:
        """Set the alternative text and the table, whose arguments are those of ``grid``.

        Args:
            kind: what is drawn, such as ``"Lines"``.
            parts: what the alternative text says; empty: the first rows of the table.
            caption: of the table; empty: title and source.
        """
        about = "; ".join(filter(None, [self.title, self.source]))
        for row in rows[:ROWS_IN_ALT] if not parts else ():
            cells = [f"{name} {cell}" for name, cell in zip(headings, row, strict=True)]
            parts = [*parts, f"{row[0]}: {', '.join(cells[1:])}"]
        self.alt = f"{kind}. {about}. {'; '.join(parts)}. The table below holds the numbers."
        table = grid(headings, rows, caption=caption or f"{about}.", text_columns=text_columns)
        self.table = folded(table, "The numbers")

    def image(self) -> Rich:
        """Return the figure without its table."""
        buffer = io.BytesIO()
        with mpl.rc_context(STYLE):
            self.savefig(
                buffer, dpi=DPI * SHARPNESS, metadata={"Description": self.alt, "Software": None}
            )
        return _image(buffer.getvalue(), self.alt, WIDTH)

    def rich(self) -> Rich:
        """Return the figure and its table as one piece of HTML; as plain text, both texts."""
        return self.image() + self.table

    def show(self) -> "Picture":
        """Show the figure and its table now."""
        display(self.rich())
        return self


def marked(source: str) -> str:
    """Return where numbers come from, with a mark on what a phantom GPU gave."""
    return source.replace("on a phantom", f"{PHANTOM_MARK} on a phantom")


def showing(draw: Callable[..., Picture]) -> Callable[..., Picture]:
    """Return a function that shows what ``draw`` draws. Same arguments, same errors."""

    @functools.wraps(draw)
    def show(*arguments: Any, **options: Any) -> Picture:
        return draw(*arguments, **options).show()

    show.__name__ = show.__qualname__ = draw.__name__.removeprefix("draw_")
    return show


def described(figure: Figure, numbers: str) -> None:
    """Show a figure that a lesson drew itself, and close it.

    The alternative text is its titles and the names of its axes, then ``numbers``.
    """
    import matplotlib.pyplot as plt  # for figures that it keeps, and shows once more if left open

    named = [(axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes]
    words = [name for names in named for name in names if name]
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=DPI * SHARPNESS, bbox_inches="tight")
    plt.close(figure)
    alt = ". ".join([*words, numbers])
    display(_image(buffer.getvalue(), alt, round(figure.get_figwidth() * DPI)))


def _image(png: bytes, alt: str, width: int) -> Rich:
    """Return an image ``width`` CSS pixels wide where there is room, with its alternative text."""
    return Rich(
        f'<img alt="{html.escape(alt)}" width="{width}" style="max-width:100%;height:auto;'
        f'background:#fff" src="data:image/png;base64,{base64.b64encode(png).decode()}">',
        alt,
    )


# --- styles -------------------------------------------------------------------------------------


def fill(name: str, number: int = 0) -> dict[str, Any]:
    """Return the style of an area, as keywords of a matplotlib patch: that of its name in
    ``AREAS``, else that of its number."""
    colour, hatch = AREAS.get(
        name,
        (LINE_COLOURS[number % len(LINE_COLOURS)], OTHER_HATCHES[number % len(OTHER_HATCHES)]),
    )
    return {"facecolor": colour, "hatch": hatch, "zorder": 3, **EDGE}


def area_legend(names: Sequence[str]) -> list[Patch]:
    """Return the legend entry of each area, in the style of its name and its place in the list."""
    return [Patch(label=name, **fill(name, number)) for number, name in enumerate(names)]


def line_style(number: int, colour: str = "") -> dict[str, Any]:
    """Return the style of the line with this number, as keywords of matplotlib's ``plot``."""
    colour = colour or LINE_COLOURS[number % len(LINE_COLOURS)]
    return {
        "color": colour,
        "linestyle": LINE_DASHES[number % len(LINE_DASHES)],
        "linewidth": 2,
        "markeredgecolor": INK,
        "markeredgewidth": 0.6,
        "path_effects": [withStroke(linewidth=3, foreground=INK)] if colour in PALE else None,
    }


# --- texts --------------------------------------------------------------------------------------


def fits(text: str, share: float) -> bool:
    """Return whether a small text fits ``share`` of the width of the axes, by its letters."""
    return 8 * len(text) <= 640 * share


def _title_lines(title: str) -> list[str]:
    """Return a title as one line or, where that is too wide, as two."""
    words = one_line(title, 300)
    font = FontProperties(size=TITLE["size"], weight=TITLE["weight"])
    width = TextPath((0, 0), words, prop=font).get_extents().width * DPI / 72 if words else 0
    if width <= WIDTH - 32:
        return [words]
    letters = int(0.97 * len(words) * (WIDTH - 32) / width)
    return textwrap.wrap(words, letters, max_lines=2, placeholder=" …")


def one_line(text: str, most: int) -> str:
    """Return a text without line breaks and control characters, cut to ``most`` characters."""
    printable = "".join(letter if letter.isprintable() else " " for letter in str(text))
    words = " ".join(printable.split())
    return words if len(words) <= most else f"{words[: most - 2].rstrip()} …"


def against(y_label: str, x_label: str) -> str:
    """Return the title of a figure that has none: ``"Peak against batch size"``."""
    return f"{y_label[:1].upper()}{y_label[1:]} against {x_label}"


def short(text: str) -> str:
    """Return ``"2.00 GiB"`` as ``"2 GiB"``, ``"0 B"`` as ``"0"``."""
    number, _, unit = text.partition(" ")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return "0" if number == "0" else f"{number} {unit}".strip()


ABOVE, ASIDE = ("data", "axes fraction"), ("axes fraction", "data")


def note(
    axes: Axes, text: str, xy: tuple[float, float], offset: tuple[float, float], **style: Any
) -> None:
    """Write a small text this many points beside ``xy``.

    That is in the axes' own units, or as ``xycoords`` says: ``ABOVE`` for an event, say, has y as a
    share of the height, ``ASIDE`` has x as a share of the width.
    """
    style = {"size": 9.5, "annotation_clip": False, **style}
    axes.annotate(text, xy, xytext=offset, textcoords="offset points", **style)


# --- axes ---------------------------------------------------------------------------------------


class ByteLocator(Locator):
    """At most ``count`` ticks, at multiples of a power of two."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self) -> np.ndarray:
        low, high = sorted(self.axis.get_view_interval())
        step = 2.0 ** max(0, math.ceil(math.log2((high - low) / self.count)))
        return np.arange(math.ceil(low / step), math.floor(high / step) + 1) * step


class _Labels(FuncFormatter):
    """Labels of ticks; what would repeat an earlier label is left out."""

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        labels = super().format_ticks(values)
        return [label if label not in labels[:i] else "" for i, label in enumerate(labels)]


def scale(axis: Axis, write: Callable[[float], str], ticks: int = 6, *, log: bool = False) -> None:
    """Give an axis ticks at round numbers: 0.3, not 0.30000000000000004.

    About ``ticks`` of them; on a logarithmic axis, whose ends are known, as matplotlib chooses.
    """
    binary = write is format_bytes
    if log:
        low, high = axis.get_view_interval()
        few = not binary and high < 1000 * low
        locator = LogLocator(2 if binary else 10, subs=(1, 2, 5) if few else (1,))
    elif binary:
        locator = ByteLocator(ticks)
    else:
        locator = MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10])
    axis.set_major_locator(locator)
    axis.set_major_formatter(_Labels(lambda value, _: short(write(float(f"{value:.12g}")))))


def name_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Write what the axes are and draw the grid."""
    axes.set_xlabel(one_line(x_label, 90))
    axes.set_ylabel(one_line(y_label, 45))
    axes.grid()
