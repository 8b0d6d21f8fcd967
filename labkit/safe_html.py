"""HTML from anywhere, made still: nothing in it runs, and nothing in it is fetched.

What a notebook shows may come from somebody else's file. nh3 reads it as a browser does (by
HTML5's rules, with all that they make of unclosed tags, comments and foreign elements), and keeps
only the elements and attributes that are listed here; of addresses to load only pictures that lie
in the page itself. ``POLICY`` tells a browser the same once more, for a whole page.

Limits: style sheets, forms, frames, sound, video, and SVG outside of ``<img>`` are left out, with
what they show. A link may stay; it is followed when somebody clicks it. Text may claim anything,
and look like anything.
"""

import re

from labkit.memory import InputError, format_bytes

#: For ``<meta http-equiv="Content-Security-Policy">``: a page that shows what is in it, no more.
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)
#: Bytes of HTML that are looked at; a lesson with all its pictures has some megabytes.
MOST_BYTES = 64 << 20

_TEXT = {
    "a", "abbr", "article", "aside", "b", "bdi", "bdo", "blockquote", "br", "caption", "cite",
    "code", "col", "colgroup", "dd", "del", "details", "dfn", "div", "dl", "dt", "em",
    "figcaption", "figure", "footer", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "i",
    "img", "ins", "kbd", "li", "main", "mark", "nav", "ol", "p", "pre", "q", "rp", "rt", "ruby",
    "s", "samp", "section", "small", "span", "strong", "sub", "summary", "sup", "table",
    "tbody", "td", "tfoot", "th", "thead", "time", "tr", "u", "ul", "var", "wbr",
}  # fmt: skip
_FORMULAS = {
    "math", "merror", "mfrac", "mi", "mmultiscripts", "mn", "mo", "mover", "mpadded",
    "mphantom", "mprescripts", "mroot", "mrow", "ms", "mspace", "msqrt", "mstyle", "msub",
    "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover",
}  # fmt: skip
_OF_FORMULAS = {
    "accent", "accentunder", "columnalign", "columnlines", "columnspacing", "depth", "display",
    "displaystyle", "fence", "form", "height", "linethickness", "lspace", "mathvariant",
    "maxsize", "minsize", "rowlines", "rowspacing", "rspace", "scriptlevel", "separator",
    "stretchy", "width",
}  # fmt: skip
_ATTRIBUTES = {
    "*": {"class", "dir", "id", "lang", "role", "style", "tabindex", "title"},
    "a": {"href"},
    "col": {"span", "width"},
    "colgroup": {"span"},
    "details": {"open"},
    "img": {"alt", "height", "src", "width"},
    "ol": {"reversed", "start", "type"},
    "table": {"border"},
    "td": {"align", "colspan", "headers", "rowspan", "valign"},
    "th": {"abbr", "align", "colspan", "headers", "rowspan", "scope", "valign"},
    "time": {"datetime"},
    **dict.fromkeys(_FORMULAS, _OF_FORMULAS),
}
_WITH_CONTENT = {
    "script", "style", "title", "template", "noscript", "iframe", "object", "svg", "textarea",
    "xmp",
}  # fmt: skip
_PICTURE = re.compile(r"data:image/(png|jpeg|gif|webp|svg\+xml)[;,]", re.IGNORECASE)
# What may be called in a style. Anything else could be an address in one of its many spellings.
_CALLED = {"", "calc", "hsl", "hsla", "linear-gradient", "max", "min", "minmax", "repeat",
           "rgb", "rgba", "rotate", "translate"}  # fmt: skip


def sanitise(fragment: str) -> str:
    """``fragment`` without all that runs, and all that would be loaded from elsewhere.

    Raises:
        InputError: it is longer than ``MOST_BYTES``.
    """
    import nh3

    if len(fragment) > MOST_BYTES:
        raise InputError(f"what is shown has more than {format_bytes(MOST_BYTES)}")
    return nh3.clean(
        fragment,
        tags=_TEXT | _FORMULAS,
        clean_content_tags=_WITH_CONTENT,
        attributes=_ATTRIBUTES,
        attribute_filter=_kept,
        generic_attribute_prefixes={"aria-"},
        url_schemes={"data", "http", "https", "mailto"},
    )


def _kept(element: str, attribute: str, value: str) -> str | None:
    """The value that an allowed attribute keeps; None to leave it out."""
    if attribute == "style":
        return value if _is_still(value) else None
    if attribute == "src":
        return value if _PICTURE.match(value) else None
    if attribute == "href" and value.strip().lower().startswith("data:"):
        return None
    return value


def _is_still(style: str) -> bool:
    """Whether a style loads nothing: no escapes, which hide names, and no function that could."""
    called = re.findall(r"([\w-]*)\s*\(", style.lower())
    return not re.search(r"[\\@<]|/\*", style) and set(called) <= _CALLED
