"""What all figures share: colours, hatches, and a figure that shows itself with its table.

A category has one colour, one hatch and one place in the stack everywhere; the colours are told
apart by colour-blind readers, the hatches without any colour. Outlines and hatches are dark, so
that pale areas stand out from the paper too: what is drawn has a contrast of 3 at least, what is
written one of 4.5 (WCAG 2.2, success criteria 1.4.11 and 1.4.3).

Limits: still pictures, 800 pixels wide. Names in a script that the font lacks show as boxes in
the picture (never in its table).
"""

import base64
import html
import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from IPython import get_ipython
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter

from labkit.memory import GIB, KIB, MIB, Category, format_bytes
from labkit.show.rich import Rich

# Okabe and Ito's palette. Hatches repeat the difference for print and for those who see no colour.
COLOURS: dict[Category, str] = {
    Category.WEIGHTS: "#0072B2",
    Category.BUFFERS: "#56B4E9",
    Category.GRADIENTS: "#E69F00",
    Category.OPTIMIZER: "#009E73",
    Category.ACTIVATIONS: "#D55E00",
    Category.TEMPORARY: "#CC79A7",
    Category.UNATTRIBUTED: "#8A8A8A",
}
HATCHES: dict[Category, str] = {
    Category.WEIGHTS: "",
    Category.BUFFERS: "....",
    Category.GRADIENTS: "///",
    Category.OPTIMIZER: "\\\\\\",
    Category.ACTIVATIONS: "---",
    Category.TEMPORARY: "xxx",
    Category.UNATTRIBUTED: "+++",
}
INK, GREY, ALARM, RESERVE = "#222222", "#5C5C5C", "#B00020", "#BDBDBD"
EDGE = {"edgecolor": INK, "linewidth": 0.6}  # of an area; hatches take its colour

WIDTH = 800  # CSS pixels; the picture itself has 1.6 times as many, for sharp screens
DPI, SHARPNESS = 100, 1.6
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "text.parse_math": False,  # a "$" in a name is a dollar sign
    "text.color": INK,
    "axes.edgecolor": "#B8B8B8",
    "axes.labelcolor": GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "grid.color": "#E4E4E4",
    "hatch.linewidth": 0.5,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


class Picture(Figure):
    """A figure with its alternative text (``alt``) and the same numbers as a table (``table``).

    It has been shown by the function that made it, so as the last line of that same cell it
    does not show again; in a later cell it does. It belongs to no window and needs no closing.
    """

    def __init__(self, height: float) -> None:
        """``height`` in CSS pixels."""
        super().__init__(figsize=(WIDTH / DPI, height / DPI), dpi=DPI)
        FigureCanvasAgg(self)
        self.alt = ""
        self.table = Rich("", "")
        self._shown_in: int | None = None

    def rich(self) -> Rich:
        """The picture and its table as one piece of HTML; as plain text, the table."""
        buffer = io.BytesIO()
        with mpl.rc_context(STYLE):
            self.savefig(
                buffer, dpi=DPI * SHARPNESS, metadata={"Description": self.alt, "Software": None}
            )
        return _image(buffer.getvalue(), self.alt, WIDTH) + self.table

    def show(self) -> "Picture":
        """Show the picture and its table now."""
        display(self.rich())
        self._shown_in = _cell_number()
        return self

    def _ipython_display_(self) -> None:
        if self._shown_in is None or self._shown_in != _cell_number():
            self.show()


def described(figure: Figure, numbers: str) -> None:
    """Show a figure that a lesson drew by itself, with an alternative text.

    Args:
        figure: of matplotlib; it is closed.
        numbers: what it shows, in words; its titles and the names of its axes are put before it.
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
    """A picture ``width`` CSS pixels wide where there is room, with its alternative text."""
    return Rich(
        f'<img alt="{html.escape(alt)}" width="{width}" style="max-width:100%;height:auto;'
        f'background:#fff" src="data:image/png;base64,{base64.b64encode(png).decode()}">',
        alt,
    )


def _cell_number() -> int | None:
    shell = get_ipython()
    return shell.execution_count if shell else None


# --- parts of a figure --------------------------------------------------------------------


def write_title(figure: Picture, title: str, subtitle: str) -> None:
    """Title and source at the top left, cut to the width of the figure."""
    height = figure.get_figheight() * DPI
    x = 16 / WIDTH
    text = figure.text(x, 1 - 12 / height, one_line(title, 300), size=13, weight="bold", va="top")
    fit(figure, text, WIDTH - 32)
    text = figure.text(x, 1 - 36 / height, subtitle, size=10, color=GREY, va="top")
    fit(figure, text, WIDTH - 32)


def place(
    figure: Picture, axes: Axes, *, left: float, right: float, top: float, bottom: float
) -> None:
    """Put the axes at these distances in pixels from the figure's edges."""
    height = figure.get_figheight() * DPI
    axes.set_position(
        (left / WIDTH, bottom / height, (WIDTH - left - right) / WIDTH, 1 - (top + bottom) / height)
    )


def fill(category: Category) -> dict[str, Any]:
    """How a category's area looks, as keywords of a matplotlib patch."""
    return {
        "facecolor": COLOURS[category],
        "hatch": HATCHES[category],
        **EDGE,
        "zorder": 3,
    }


ONE_ROW, COLUMNS = 6, 4  # so many entries fit in one row of the legend; more go in columns


def legend_rows(used: Sequence[Category], reserve: bool = False) -> int:
    """How many rows ``category_legend`` takes, 24 pixels each."""
    entries = len(used) + reserve
    return 1 if entries <= ONE_ROW else math.ceil(entries / COLUMNS)


def category_legend(figure: Picture, used: Sequence[Category], *, reserve: bool = False) -> None:
    """The categories in their order; ``reserve`` adds the grey of memory kept but not used."""
    handles = [Patch(**fill(category)) for category in used]
    names = [str(category) for category in used]
    if reserve:
        handles.append(Patch(facecolor=RESERVE, **EDGE))
        names.append("reserved, not used")
    legend(figure, handles, names, ncols=ONE_ROW if len(names) <= ONE_ROW else COLUMNS)


def legend(
    figure: Picture, handles: list[Any], names: list[str], *, ncols: int, top: int = 54
) -> None:
    """A legend ``top`` pixels down, under the title and above the data, filled row by row."""
    height = figure.get_figheight() * DPI
    order = [i for column in range(ncols) for i in range(column, len(names), ncols)]
    shown = [f" {name}" if name.startswith("_") else name for name in names]  # "_x" would be hidden
    figure.legend(
        [handles[i] for i in order],
        [shown[i] for i in order],
        loc="upper left",
        bbox_to_anchor=(8 / WIDTH, 1 - top / height),
        ncols=min(ncols, len(names)),
        frameon=False,
        fontsize=9.5,
        handlelength=1.9,
        handleheight=1.0,
        columnspacing=1.4,
        labelcolor=INK,
    )


def text_width(figure: Picture, text: Text) -> float:
    """How many pixels wide a text is drawn."""
    return text.get_window_extent(figure.canvas.get_renderer()).width


def fit(figure: Picture, text: Text, room: float) -> None:
    """Shorten a text with an ellipsis until it fits ``room`` pixels."""
    words = one_line(text.get_text(), 300)
    text.set_text(words)
    while words and text_width(figure, text) > room:
        words = words[: int(len(words) * 0.97) - 1].rstrip()
        text.set_text(f"{words} …")


def one_line(text: str, most: int) -> str:
    """A text without line breaks and control characters, cut to ``most`` characters."""
    printable = "".join(letter if letter.isprintable() else " " for letter in str(text))
    words = " ".join(printable.split())
    return words if len(words) <= most else f"{words[: most - 2].rstrip()} …"


def byte_ticks(axis: Any, most: float, count: float, least: float = 0) -> None:
    """About ``count`` ticks from ``least`` to ``most`` bytes, at round numbers of a binary unit."""
    round_steps = [
        scale * share
        for scale in (KIB, MIB, GIB, GIB << 10, GIB << 20)
        for share in (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100)
    ]
    step = next(
        (step for step in [1, 2, 5, 10, 20, 50, 100, *round_steps] if most - least <= step * count),
        most or 1,
    )
    numbers = range(math.ceil(least / step), int(most / step) + 1)
    axis.set_major_locator(FixedLocator([i * step for i in numbers]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(format_bytes(value))))


def short(text: str) -> str:
    """``"2.00 GiB"`` as ``"2 GiB"``, ``"2.50 GiB"`` as ``"2.5 GiB"``, ``"0 B"`` as ``"0"``."""
    number, _, unit = text.partition(" ")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return "0" if number == "0" else f"{number} {unit}".strip()
