"""How nbconvert makes slides of a lesson; see slides.md for the command.

A lesson says nowhere what a slide is: its cells carry one tag and nothing else, and without more
nbconvert puts a whole notebook on one slide. So it is decided here, from tags and headings. Every
`##` begins a slide. What follows, until the next `##`, hangs below it: texts, code and figures, one
each. What an audience cannot use (setup, parameters, widgets, exercises, the result) is left out,
and so is the code that draws figures and judges claims: their outputs stay, if the lesson was run.

Limits: headings are found by their `#` outside fenced code. A long text is not shortened, its slide
scrolls. Widgets of an executed lesson are not shown.
"""

from nbconvert.preprocessors import Preprocessor

LEFT_OUT = {"setup", "parameters", "explore", "exercise", "result"}
OUTPUT_ONLY = {"plot", "claim"}


def pieces(source):
    """The parts of a Markdown text, each from one heading up to the next."""
    parts, fenced = [[]], False
    for line in source.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if line.startswith("#") and not fenced and any(parts[-1]):
            parts.append([])
        parts[-1].append(line)
    return ["\n".join(part).strip() for part in parts]


class Slides(Preprocessor):
    """Cut Markdown cells at their headings, and say for each cell where it stands."""

    def preprocess(self, nb, resources):
        cells = []
        for cell in nb.cells:
            code = cell.cell_type == "code"
            drawn = code and not OUTPUT_ONLY.isdisjoint(cell.metadata.get("tags", ()))
            if drawn and not cell.outputs:
                continue
            for number, text in enumerate([cell.source] if code else pieces(cell.source)):
                part = cell.copy()
                part.source = text
                part.id = f"{cell.id}-{number}" if number else cell.id
                begins = not code and text.startswith(("# ", "## "))
                kind = "slide" if begins else "subslide"
                part.metadata = cell.metadata.copy()
                part.metadata["slideshow"] = {"slide_type": kind}
                part.metadata["transient"] = {"remove_source": drawn}
                cells.append(part)
        nb.cells = cells
        return nb, resources


c = get_config()  # noqa: F821  (traitlets provides it)
c.TagRemovePreprocessor.enabled = True
c.TagRemovePreprocessor.remove_cell_tags = LEFT_OUT
c.SlidesExporter.preprocessors = [Slides]
c.SlidesExporter.reveal_scroll = True
