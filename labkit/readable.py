"""HTML for everybody: for those who hear a page, use the keyboard, or read it on a small screen.

``lacks`` names what a piece of HTML keeps from a reader who cannot see it. ``mend`` puts right what
notebooks show in ways that only their own pages can bear. What is asked for is in WCAG 2.2: text
for pictures (1.1.1), tables with headings (1.3.1), content that scrolls within reach of the
keyboard (2.1.1), links that lead somewhere (2.4.4).

Limits: whether a text says what its picture shows, no program can tell. ``mend`` reads HTML more
loosely than a browser does: what it returns still has to be made safe.
"""

import html
import re
from collections.abc import Collection, Iterable
from html.parser import HTMLParser
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

NO_ALT = "a picture without a text for those who cannot see it"
#: For pages: where the keyboard is can be seen, and links to parts stand in a row.
READABLE_STYLE = """
a:focus-visible, summary:focus-visible, [tabindex]:focus-visible { outline: 3px solid #1f5a96; }
.contents ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; }
@media print { .contents { display: none; } [role=group] { overflow: visible !important; } }
"""
_LOWEST = 6  # headings have no deeper level
_SCROLLS = re.compile(r"overflow(-x)?\s*:\s*auto")


def lacks(fragment: str) -> list[str]:
    """What readers who cannot see miss in a piece of HTML, one phrase each; empty if nothing."""
    reader = _Reader()
    reader.feed(fragment)
    reader.close()
    return reader.problems


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self._tables: list[bool | None] = []  # open ones: has headings; None: only for layout

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "img" and not (given.get("alt") or "").strip():
            self.problems.append(NO_ALT)
        elif tag == "table":
            self._tables.append(None if given.get("role") in ("presentation", "none") else False)
        elif tag == "th" and self._tables and self._tables[-1] is False:
            self._tables[-1] = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "table" and self._tables and self._tables.pop() is False:
            self.problems.append("a table without headings")


def scrolling(wide: str, label: str) -> str:
    """HTML, of a table say, that scrolls where it is too wide, within the keyboard's reach."""
    return (
        f'<div tabindex="0" role="group" aria-label="{html.escape(label)}" '
        f'style="overflow-x:auto">{wide}</div>'
    )


def contents(headings: Iterable[str]) -> str:
    """Links, as HTML, to the parts of a page, whose ids are ``anchor`` of their headings."""
    links = "".join(
        f'<li><a href="#{anchor(text)}">{html.escape(text)}</a></li>' for text in headings
    )
    return f'<nav class="contents" aria-label="On this page"><ul>{links}</ul></nav>'


def anchor(heading: str) -> str:
    """The id of the part of a page that stands under this heading: ``"claims-on-trial"``."""
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")


def mend(fragment: str, *, below: int = 0, lessons: Collection[str] = ()) -> str:
    """A notebook's HTML as a part of a page.

    Wide tables and formulas scroll, within the keyboard's reach; a heading without words is an
    empty cell; a picture that lies elsewhere is its alternative text; a link to another file leads
    to its lesson on the page, or is plain text where there is none.

    Args:
        fragment: as nbconvert writes it.
        below: the level of the page's heading that all of it stands under; its own begin below.
        lessons: names of the lessons on the page, which are the ids of their parts.
    """
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(fragment, "html.parser")
    for heading in soup.find_all(re.compile(r"^h[1-6]$")):
        heading.name = f"h{min(int(heading.name[1]) + below, _LOWEST)}"
    for cell in soup.find_all("th"):
        if not cell.get_text(strip=True):
            cell.name = "td"
            del cell["scope"]
    for table in soup.find_all("table"):
        if table.get("role") != "presentation":
            label = table.caption.get_text(" ", strip=True) if table.caption else "Table"
            _let_scroll(table, label)
    for formula in soup.find_all("math", display="block"):
        _let_scroll(formula, "Formula")
    for picture in soup.find_all("img"):
        if not picture.get("src", "").startswith("data:"):  # a badge, say: its words are left
            picture.replace_with(picture.get("alt", ""))
    for link in soup.find_all("a", href=True):
        _lead(link, lessons)
    return str(soup)


def _let_scroll(wide: Any, label: str) -> None:
    """Put an element into one that scrolls, or give the one that it is in its place among stops."""
    from bs4 import BeautifulSoup

    frame = BeautifulSoup(scrolling("", label), "html.parser").div.extract()
    if _SCROLLS.search(wide.parent.get("style", "")):
        wide.parent.attrs |= frame.attrs
    else:
        wide.wrap(frame)


def _lead(link: Any, lessons: Collection[str]) -> None:
    try:
        address = urlsplit(link["href"])
    except ValueError:  # no address at all
        link.unwrap()
        return
    if address.scheme or address.netloc or not address.path:
        return
    name = PurePosixPath(address.path).stem
    if name in lessons:
        link["href"] = f"#{name}"
    else:
        link.unwrap()
