"""Cards: short framed messages for a verdict, a machine, an exercise, or a plain remark.

In a notebook a card is HTML with the same in plain text beside it; without one the plain text is
printed. A card has its own background, so that it reads the same on a light and on a dark page, and
its symbol and words say what its colour says. All styles are inline, because notebook viewers drop
style sheets.

Limits: cards are up to 760 pixels wide. Only a box of details in them opens and closes.
"""

import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from gpumem.figures.html_pages import Rich, render


class Look(NamedTuple):
    """A symbol and the colour of badge and edge; white on it is readable (contrast over 4.5)."""

    symbol: str
    colour: str


GOOD, WARM, COOL = Look("✔", "#00694b"), Look("!", "#8a5300"), Look("i", "#1f5a96")
BAD, QUIET = Look("✘", "#a3200d"), Look("○", "#4f5b67")


class Shown:
    """Shown by the function that made it: a cell that ends with it does not show it again."""

    def _ipython_display_(self) -> None:
        pass


class Card(Shown, Rich):
    """A card as HTML and as plain text."""

    def show(self) -> "Card":
        """Show it now: in the notebook if there is one, else printed."""
        from IPython.display import display  # scripts may make cards and never show them

        display(Rich(self.html, self.text))
        return self


def message_card(text: str, *, title: str, look: Look = COOL, code: str = "") -> Card:
    """Show a remark: ``title`` in the badge, paragraphs of ``text``, source ``code`` under them."""
    return build_card(look, title, "", body=text, code=code).show()


def notice(text: str, look: Look | None = None) -> str:
    """Return what a widget says as HTML; with a look, the first line stands out."""
    head, *lines = escape(text).splitlines()
    if look is not None:
        head = Markup('<b style="color:{1}">{0} {2}</b>').format(*look, head)
    body = Markup("<br>").join([head, *lines])
    edge = f"border-left:5px solid {look.colour};" if look else ""
    box = Markup(
        '<div role="status" style="background:#f3f5f7;color:#1b2430;padding:6px 12px;{}'
        'border-radius:4px;line-height:1.5;white-space:normal">{}</div>'
    ).format(edge, body)
    return str(box)  # Markup would escape the HTML that is added to it


def _words(text: str) -> Markup:
    """Return text as HTML; what stands between backticks looks like code."""
    style = "background:#f3f5f7;color:#1b2430;border-radius:3px;padding:0 3px"
    lines = str(escape(text)).replace("\n", "<br>")
    return Markup(re.sub(r"`([^`]+)`", rf'<code style="{style}">\1</code>', lines))  # escaped above


def build_card(
    look: Look,
    badge: str,
    title: str,
    *,
    body: str = "",
    rows: Sequence[tuple[str, str]] = (),
    more: Sequence[tuple[str, str]] = (),
    more_title: str = "",
    code: str = "",
) -> Card:
    """Return a card without showing it: a badge, a title, and what stands below.

    The badge says what the look's symbol means. In the body blank lines separate paragraphs, and
    backticks mark code; below it stand rows of names and values, ``more`` of them in a box that
    opens with a click on ``more_title``, and source code.
    """
    html = render(
        "gpumem/figures/templates/card.html.j2",
        look=look,
        badge=badge,
        title=title,
        paragraphs=[_words(paragraph.strip()) for paragraph in body.split("\n\n") if paragraph],
        rows=[(name, _words(value)) for name, value in rows],
        more=[(name, _words(value)) for name, value in more],
        more_title=more_title,
        code=code,
    )
    lines = [f"[{look.symbol} {badge}] {title}".rstrip()]
    for paragraph in body.splitlines():
        lines += textwrap.wrap(paragraph, 96, initial_indent="  ", subsequent_indent="  ") or [""]
    named = [*rows, *more]
    width = max((len(name) for name, _ in named), default=0) + 2
    for name, value in named:
        first = f"  {name:<{width}}"
        lines += textwrap.wrap(
            value, 98, initial_indent=first, subsequent_indent=" " * len(first)
        ) or [first.rstrip()]
    if code:
        lines.append(textwrap.indent(code, "    "))
    return Card(html, "\n".join(lines))
