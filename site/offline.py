"""A Sphinx extension: pages that fetch nothing, run nothing of a lesson's, link to what is there.

- Formulas become MathML, as in the report.
- Images of other hosts (badges) become their words.
- HTML that a lesson displayed is kept without scripts, as in the report.
- A link to a file of the repository that is no page leads to the repository.

Limits: HTML in the repository's own Markdown files is taken as it is.
"""

import posixpath
from typing import Any

from course_pages import LESSONS, ROOT, repository
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform

from labkit.course.html_parts import repair, sanitise
from labkit.course.report import mathml


class WordsForImages(SphinxTransform):
    """An image of another host becomes its alternative text."""

    default_priority = 500

    def apply(self, **_: Any) -> None:
        """Replace them all."""
        for image in list(self.document.findall(nodes.image)):
            if "//" not in image["uri"]:
                continue
            if isinstance(image.parent, nodes.reference):
                image.parent["classes"].append("badge")
            image.replace_self(nodes.Text(image.get("alt", "")))


class NoScripts(SphinxTransform):
    """What a lesson displayed, and HTML in its prose: without scripts and addresses to load."""

    default_priority = 900

    def apply(self, **_: Any) -> None:
        """Clean all raw HTML of a lesson's page."""
        if not self.env.docname.startswith(LESSONS):
            return
        for raw in list(self.document.findall(nodes.raw)):
            if "html" in raw["format"].split():
                raw.replace_self(nodes.raw("", sanitise(repair(raw.astext())), format="html"))


class RepositoryLinks(SphinxPostTransform):
    """A link to a file that is no page of the site leads to the repository."""

    default_priority = 5  # before MyST looks for them among the pages

    def run(self, **_: Any) -> None:
        """Replace those whose target the repository has; MyST warns of the others."""
        for link in list(self.document.findall(pending_xref)):
            if link.get("reftype") != "myst" or link.get("refdomain"):
                continue
            target, _, _ = link["reftarget"].partition("#")
            here = posixpath.dirname(link["refdoc"])
            path = posixpath.normpath(posixpath.join(here, target))
            if not target or path.startswith("..") or not (ROOT / path).exists():
                continue
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            reference = nodes.reference(refuri=f"{repository()}/{kind}/main/{path}")
            reference += [child.deepcopy() for child in link.children]
            link.replace_self(reference)


def inline_formula(translator: Any, node: nodes.Element) -> None:
    """Write one within a line."""
    translator.body.append(_formula(translator, node, "inline"))
    raise nodes.SkipNode


def block_formula(translator: Any, node: nodes.Element) -> None:
    """Write one on lines of its own."""
    formula = _formula(translator, node, "block")
    about = 'tabindex="0" role="group" aria-label="Formula" style="overflow-x:auto"'
    translator.body.append(f"<div {about}>{formula}</div>")
    raise nodes.SkipNode


def _formula(translator: Any, node: nodes.Element, display: str) -> str:
    text = node.astext()
    return mathml(text, display) or translator.encode(text)


IN_REACH = 'tabindex="0" role="group" aria-label="Table"'


def reachable(app: Sphinx, page: str, template: str, context: dict[str, Any], _: Any) -> None:
    """What axe asks of a page: code and tables that scroll are within the keyboard's reach, a
    table's empty corner is no heading, the sidebar's headings have a level."""
    for part, old, new in (
        ("body", "<pre>", '<pre tabindex="0">'),
        ("body", '<th class="head"><p></p></th>', "<td></td>"),
        ("body", '<div class="table-wrapper', f'<div {IN_REACH} class="table-wrapper'),
        ("furo_navigation_tree", 'role="heading"', 'role="heading" aria-level="2"'),
    ):
        context[part] = context.get(part, "").replace(old, new)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register all of it."""
    app.add_html_math_renderer("mathml", (inline_formula, None), (block_formula, None))
    app.add_transform(WordsForImages)
    app.add_transform(NoScripts)
    app.add_post_transform(RepositoryLinks)
    app.connect("html-page-context", reachable, priority=900)  # after the theme
    return {"parallel_read_safe": True, "parallel_write_safe": True}
