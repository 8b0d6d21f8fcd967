"""HTML for all readers: for those who hear a page, use the keyboard, or read it on a small screen.

What is asked for is in WCAG 2.2: alternative texts for pictures (1.1.1), tables with headings
(1.3.1), content that scrolls within the keyboard's reach (2.1.1), links with a target (2.4.4).
Limits: what ``repair`` returns still has to be made safe.
"""

import re
from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

NO_ALT = "a picture without alternative text"
_SCROLLS = re.compile(r"overflow(-x)?\s*:\s*auto")


def problems(fragment: str) -> list[str]:
    """Return what readers who cannot see miss in a piece of HTML, one phrase each."""
    from bs4 import BeautifulSoup

    found = []
    for element in BeautifulSoup(fragment, "html.parser").find_all(["img", "table"]):
        if element.name == "img":
            if not element.get("alt", "").strip():
                found.append(NO_ALT)
        elif element.get("role") not in ("presentation", "none") and not element.find("th"):
            found.append("a table without headings")
    return found


def repair(fragment: str, *, below: int = 0, lessons: Collection[str] = ()) -> str:
    """Return a notebook's HTML as a part of a page.

    Wide tables and formulas scroll; an empty heading of a column becomes a cell; a picture that is
    not in the page becomes its alternative text; a link to another file leads to its lesson on the
    page, or becomes text where there is none.

    Its headings begin one level lower than ``below``. ``lessons`` are the names of those on the
    page, which are the ids of their parts.
    """
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(fragment, "html.parser")
    for heading in soup.find_all(re.compile(r"^h[1-6]$")):
        heading.name = f"h{min(int(heading.name[1]) + below, 6)}"
    for cell in soup.find_all("th"):
        if not cell.get_text(strip=True):
            cell.name = "td"
            del cell["scope"]
    for wide in [*soup.find_all("table"), *soup.find_all("math", display="block")]:
        if wide.get("role") != "presentation":
            _let_scroll(soup, wide)
    for picture in soup.find_all("img"):
        if not picture.get("src", "").startswith("data:"):
            picture.replace_with(picture.get("alt", ""))
    for link in soup.find_all("a", href=True):
        _redirect(link, lessons)
    return str(soup)


def _let_scroll(soup: Any, wide: Any) -> None:
    label = "Formula" if wide.name == "math" else "Table"
    if wide.caption:
        label = wide.caption.get_text(" ", strip=True)
    frame = soup.new_tag("div", style="overflow-x:auto")
    if _SCROLLS.search(wide.parent.get("style", "")):
        frame = wide.parent
    else:
        wide.wrap(frame)
    frame.attrs |= {"tabindex": "0", "role": "group", "aria-label": label}


def _redirect(link: Any, lessons: Collection[str]) -> None:
    try:
        address = urlsplit(link["href"])
    except ValueError:  # such as "//["
        link.unwrap()
        return
    if address.scheme or address.netloc or not address.path:
        return
    name = PurePosixPath(address.path).stem
    if name in lessons:
        link["href"] = f"#{name}"
    else:
        link.unwrap()
