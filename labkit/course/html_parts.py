"""HTML from anywhere as a part of our pages: safe, and for all readers.

``sanitise``: nothing in it runs, and nothing in it is fetched. nh3 reads it as a browser does, and
keeps the elements and attributes that it knows as harmless and those listed here; of addresses to
load, only pictures that lie in the page itself.

``problems`` and ``repair`` are for those who hear a page, use the keyboard, or read it on a small
screen (WCAG 2.2: 1.1.1, 1.3.1, 2.1.1 and 2.4.4).

Limits: what ``repair`` returns still has to be made safe. Style sheets, forms, frames, sound,
video, and SVG outside of ``<img>`` are left out. A link may stay; a reader may follow it. Text may
claim anything, and look like anything.
"""

import re
from collections.abc import Collection
from pathlib import PurePosixPath
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
        if wide.get("role") == "presentation":
            continue
        label = "Formula" if wide.name == "math" else "Table"
        if wide.caption:
            label = wide.caption.get_text(" ", strip=True)
        if not _SCROLLS.search(wide.parent.get("style", "")):
            wide.wrap(soup.new_tag("div", style="overflow-x:auto"))
        wide.parent.attrs |= {"tabindex": "0", "role": "group", "aria-label": label}
    for picture in soup.find_all("img"):
        if not picture.get("src", "").startswith("data:"):
            picture.replace_with(picture.get("alt", ""))
    for link in soup.find_all("a", href=True):
        try:
            address = urlsplit(link["href"])
        except ValueError:  # such as "//["
            link.unwrap()
            continue
        name = PurePosixPath(address.path).stem
        if address.scheme or address.netloc or not address.path:
            continue
        if name in lessons:
            link["href"] = f"#{name}"
        else:
            link.unwrap()
    return str(soup)


# --- safe --------------------------------------------------------------------------------

_FORMULAS = """
math merror mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms mspace
msqrt mstyle msub msubsup msup mtable mtd mtext mtr munder munderover
"""
_ATTRIBUTES = """
abbr border class datetime dir headers id lang open reversed role style tabindex title type valign
width accent accentunder columnalign columnlines columnspacing depth display displaystyle fence form
height linethickness lspace mathvariant maxsize minsize rowlines rowspacing rspace scriptlevel
separator stretchy
"""
_DROPPED_WITH_CONTENT = "script style title template noscript iframe object svg textarea xmp"
#: Functions allowed in a style. Any other could be an address in one of its many spellings.
_FUNCTIONS = "calc hsl hsla linear-gradient max min minmax repeat rgb rgba rotate translate"
_PICTURE = re.compile(r"data:image/(png|jpeg|gif|webp|svg\+xml)[;,]", re.IGNORECASE)


def sanitise(fragment: str) -> str:
    """Return ``fragment`` without what runs, and what would be loaded from elsewhere."""
    import nh3

    return nh3.clean(
        fragment,
        tags=nh3.ALLOWED_TAGS | set(_FORMULAS.split()) | {"main", "section", "tfoot"},
        clean_content_tags=set(_DROPPED_WITH_CONTENT.split()),
        attributes=nh3.ALLOWED_ATTRIBUTES | {"*": set(_ATTRIBUTES.split())},
        attribute_filter=_filtered,
        generic_attribute_prefixes={"aria-"},
        url_schemes={"data", "http", "https", "mailto"},
    )


def _filtered(element: str, attribute: str, value: str) -> str | None:
    """Return the value of an allowed attribute, or None to drop it."""
    if attribute == "style":  # without escapes, which hide names, and without what may load
        called = re.findall(r"([\w-]*)\s*\(", value.lower())
        odd = re.search(r"[\\@<]|/\*", value) or set(called) - {"", *_FUNCTIONS.split()}
        return None if odd else value
    if attribute == "src":
        return value if _PICTURE.match(value) else None
    if attribute == "href" and value.strip().lower().startswith("data:"):
        return None
    return value
