"""HTML from anywhere, made safe: nothing in it runs, and nothing in it is fetched.

nh3 reads it as a browser does, and keeps the elements and attributes that it knows as harmless and
those listed here; of addresses to load, only pictures that lie in the page itself.
`gpumem.figures.html_pages.POLICY` tells a browser the same for a whole page.

Limits: style sheets, forms, frames, sound, video, and SVG outside of ``<img>`` are left out. A link
may stay; a reader may follow it. Text may claim anything, and look like anything.
"""

import re

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
_DROPPED_WITH_CONTENT = """
script style title template noscript iframe object svg textarea xmp
"""
#: Functions allowed in a style. Any other could be an address in one of its many spellings.
_FUNCTIONS = """
calc hsl hsla linear-gradient max min minmax repeat rgb rgba rotate translate
"""
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
    if attribute == "style":
        return value if _is_safe(value) else None
    if attribute == "src":
        return value if _PICTURE.match(value) else None
    if attribute == "href" and value.strip().lower().startswith("data:"):
        return None
    return value


def _is_safe(style: str) -> bool:
    """Whether a style loads nothing: no escapes, which hide names, and no function that could."""
    called = re.findall(r"([\w-]*)\s*\(", style.lower())
    return not re.search(r"[\\@<]|/\*", style) and set(called) <= {"", *_FUNCTIONS.split()}
