"""How nbconvert makes slides of a lesson; see slides.md for the command.

A lesson says nowhere what a slide is: its cells carry one tag and nothing else, and without more
nbconvert puts a whole notebook on one slide. So it is decided here, from tags and headings. A slide
shows a heading with its lists, tables and formulas, a question, the code, a figure, or verdicts.
What a teacher says is not on it: paragraphs become speaker notes of the slide before. What an
audience cannot use (setup, parameters, widgets, exercises, the result) is left out, and so is the
code that draws figures and judges claims: their outputs stay, if the lesson was run.

Limits: headings, lists and questions are found by their marks outside fenced code, paragraphs by
blank lines. What is still too long for a slide scrolls. Formulas that the converter does not
understand stay as they are typed. Widgets are not shown.
"""

import ast
import re
from pathlib import Path

from nbconvert.preprocessors import Preprocessor
from nbformat.v4 import new_code_cell, new_markdown_cell

from labkit.course.report import markdown

LEFT_OUT = {"setup", "parameters", "explore", "exercise", "result"}
OUTPUT_ONLY = {"plot", "claim"}
TOLD = {"reading"}
"""Said while the figure before them stands."""
SHOWN = re.compile(r"[-*] |\d+\. |\||\$\$|```")
"""How a block begins that is shown as it is: a list, a table, a formula, code."""
LEAD_IN = re.compile(r"(?:^|[.!?)]\s+)([^.!?]+[^.!?\s])$")
"""The end of a paragraph that leads over to what follows it."""
BADGE = re.compile(r"\[!\[[^\]]*\]\([^)]*\)\]\([^)]*\)\s*(·\s*)?")


def pieces(source):
    """The parts of a Markdown text, each from one heading up to the next."""
    parts, fenced = [[]], False
    for line in source.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if line.startswith("#") and not fenced and any(parts[-1]):
            parts.append([])
        parts[-1].append(line)
    return ["\n".join(part).strip() for part in parts]


def blocks(text):
    """What blank lines part; a heading and fenced code each in one piece."""
    found, fenced = [[]], False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if line.strip() or fenced:
            found[-1].append(line)
        if not fenced and (not line.strip() or line.startswith("#")):
            found.append([])
    return ["\n".join(block) for block in found if block]


def shown(text, tag):
    """What of a piece of Markdown stands on the slide itself."""
    kept, before = [], ""
    for block in blocks(text):
        heading = block.startswith("#")
        if tag == "title" or (tag not in TOLD and (heading or SHOWN.match(block))):
            lead = LEAD_IN.search(before)
            kept += [lead[1], block] if lead else [block]
            before = ""
        else:
            before = block
    return "\n\n".join(kept)


def slide(cell, kind, **metadata):
    """A cell at its place: ``slide`` to the right, ``subslide`` below, ``-`` with the one before,
    ``notes`` for the speaker."""
    cell.metadata["slideshow"] = {"slide_type": kind}
    cell.metadata.update(metadata)
    return cell


def of_text(cell, tag):
    """The slides of a Markdown cell, each with its paragraphs as notes."""
    for text in pieces(BADGE.sub("", cell.source)):
        kept = shown(text, tag)
        if kept:
            begins = kept.startswith(("# ", "## "))
            yield slide(new_markdown_cell(kept), "slide" if begins else "subslide")
        if kept != text:
            yield slide(new_markdown_cell(text), "notes")


def questions(source):
    """What the calls of ``lab.predict`` in a cell ask; "…" for what only a run knows."""
    tree = ast.parse(source)
    named = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lab.predict":
            asked = node.args[0]
            asked = named[asked.id] if isinstance(asked, ast.Name) else asked
            parts = asked.values if isinstance(asked, ast.JoinedStr) else [asked]
            text = "".join(p.value if isinstance(p, ast.Constant) else "…" for p in parts)
            yield text if text.endswith("?") else f"{text}?"


def of_prediction(cell, *, below):
    """The slides on which everybody's number is waited for, with what is known by then."""
    for output in filter(is_picture, cell.outputs):
        yield output_only(cell, [output], "subslide")
        below = False
    for asked in questions(cell.source):
        kind = "-" if below else "subslide"
        yield slide(new_markdown_cell(f"### {asked}"), kind, asks=True)
        below = False
    known = [output for output in cell.outputs if output.output_type == "stream"]
    if known:
        yield output_only(cell, known, "-")


def is_picture(output):
    return "<img" in output.get("data", {}).get("text/html", "")


def can_be_shown(output):
    """Not a widget, and not the card of a prediction that nobody made."""
    data = output.get("data", {})
    unguessed = "no prediction made" in data.get("text/plain", "")
    return not unguessed and "application/vnd.jupyter.widget-view+json" not in data


def of_code(cell, tag, *, below):
    """The slides of a code cell: what it says and printed, then each of its pictures.

    Args:
        below: whether it can stand under the heading before it.
    """
    pictures = [output for output in cell.outputs if is_picture(output)]
    rest = [o for o in cell.outputs if not is_picture(o) and can_be_shown(o)]
    if tag == "claim":  # a slide for each verdict
        for output in rest:
            yield output_only(cell, [output], "subslide")
    elif tag not in OUTPUT_ONLY:
        code = new_code_cell(cell.source, outputs=rest)
        yield slide(code, "-" if below else "subslide")
    for output in pictures:
        yield output_only(cell, [output], "subslide")
    if tag == "plot" and rest:
        yield output_only(cell, rest, "-" if pictures else "subslide")


def output_only(cell, outputs, kind):
    part = new_code_cell(cell.source, outputs=outputs, metadata={"tags": cell.metadata.tags})
    return slide(part, kind, transient={"remove_source": True})


class Slides(Preprocessor):
    """Make of a lesson's cells those that an audience sees, and say for each where it stands."""

    def preprocess(self, nb, resources):
        cells = []
        for cell in nb.cells:
            tag = next(iter(cell.metadata.get("tags", ())), "")
            if tag in LEFT_OUT:
                continue
            below = only_a_heading(cells)
            if cell.cell_type != "code":
                cells += of_text(cell, tag)
            elif tag == "predict":
                cells += of_prediction(cell, below=below)
            else:
                cells += of_code(cell, tag, below=below)
        nb.cells = cells
        nb.metadata.pop("widgets", None)  # their scripts would be fetched
        return nb, resources


def only_a_heading(cells):
    """Whether the slide so far is a heading, with nothing below it but notes; a question is more:
    what follows it is the answer."""
    here = [cell for cell in cells if cell.metadata.slideshow.slide_type != "notes"]
    if not here or here[-1].metadata.get("asks"):
        return False
    return here[-1].source.startswith("#") and "\n" not in here[-1].source


c = get_config()  # noqa: F821  (traitlets provides it)
c.SlidesExporter.preprocessors = [Slides]
c.SlidesExporter.filters = {"markdown2html": markdown}
c.SlidesExporter.template_file = str(Path(__file__).with_name("slides.html.j2"))
c.SlidesExporter.reveal_url_prefix = "reveal.js"
c.SlidesExporter.reveal_theme = "white"
c.SlidesExporter.reveal_number = "c/t"
