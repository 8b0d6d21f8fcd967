"""One HTML file about a run of the course: lessons, verdicts, timings, every notebook rendered.

The file is complete in itself: nothing in it is fetched or runs. Formulas become MathML, which
browsers draw by themselves; one that the converter does not understand stays text. Widgets appear
as the last thing they showed.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from labkit.course.check import widget_models
from labkit.course.claims import format_found
from labkit.course.lessons import read_notebook
from labkit.course.outcomes import Outcome, stored_result
from labkit.course.results import RESULT_MIME, Result
from labkit.support import html_pages
from labkit.support.files import write_atomic
from labkit.support.html_access import repair
from labkit.support.html_safe import sanitise
from labkit.values import InputError

REPORT_NAME = "report.html"
VERDICT_COLUMNS = ("Lesson", "Claim", "Source", "Claimed", "Found here", "Verdict", "Where")
_VIEW = "application/vnd.jupyter.widget-view+json"
_SYMBOLS = {"passed": "✓", "failed": "✗", "interrupted": "◼", "not started": "·"}


def report(folder: Path, outcomes: Sequence[Outcome]) -> Path:
    """Write ``report.html`` about ``outcomes`` of a run into its folder; return its path."""
    from pygments.formatters import HtmlFormatter

    found = [stored_result(outcome, folder) for outcome in outcomes]
    results = [result for result in found if result]
    names = {outcome.name for outcome in outcomes}
    page = html_pages.render(
        "course/report.html.j2",
        title="GPU Memory Lab: report",
        code_style=Markup(HtmlFormatter().get_style_defs(".highlight")),
        passed=sum(outcome.passed for outcome in outcomes),
        seconds=f"{sum(outcome.seconds for outcome in outcomes):.0f}",
        machines=", ".join(sorted({r.where for r in results})) or "an unknown machine",
        lesson_table=lesson_table(outcomes),
        verdict_table=verdict_table(results),
        lessons=[(outcome, _body(outcome, folder, names)) for outcome in outcomes],
    )
    path = folder / REPORT_NAME
    write_atomic(path, page)
    return path


def lesson_table(outcomes: Sequence[Outcome]) -> Markup:
    """Return lessons with status, seconds, CPU memory and problems, as an HTML table."""
    rows = []
    for outcome in outcomes:
        title = f"{outcome.number} {outcome.title}"
        status = f"{_SYMBOLS[outcome.status]} {outcome.status}"
        if outcome.status == "failed":
            status = Markup('<span class="failed">{}</span>').format(status)
        rows.append(
            [
                Markup('<a href="#{}">{}</a>').format(outcome.name, title),
                status,
                f"{outcome.seconds:.1f}",
                outcome.host_peak,
                Markup("<br>").join(outcome.problems),
            ]
        )
    columns = ["Lesson", "Status", "Seconds", "Host memory, peak", "Problems"]
    return html_pages.table("Lessons", columns, rows, numbers=(2, 3))


def verdict_table(results: Sequence[Result]) -> Markup:
    """Return every claim that was judged, as an HTML table."""
    rows = list(verdict_rows(results))
    if not rows:
        return Markup("<p>No claim was judged.</p>")
    return html_pages.table("Claims on trial", VERDICT_COLUMNS, rows)


def verdict_rows(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the verdict table as text, one row per claim."""
    for result in results:
        for entry in result.judgements:
            yield (
                result.lesson,
                entry.get("says") or entry["id"],
                " ".join(entry.get("sources", ())),
                entry.get("claimed") or "",
                format_found(entry.get("measured"), entry.get("unit") or ""),
                str(entry["verdict"]),
                entry.get("mode") or result.where,
            )


# --- one notebook ------------------------------------------------------------------------------


def _body(outcome: Outcome, folder: Path, names: Collection[str]) -> Markup:
    if not outcome.notebook:
        return Markup('<p class="note">There is no notebook to show.</p>')
    try:
        return Markup(render(read_notebook(folder / outcome.notebook), below=2, lessons=names))
    except InputError as error:
        return Markup('<p class="note">{}</p>').format(error)


def render(notebook: Any, *, below: int = 0, lessons: Collection[str] = ()) -> str:
    """Return an executed notebook as an HTML fragment that fetches and runs nothing.

    The notebook is changed; ``below`` and ``lessons`` are those of `repair`. Raises `InputError`
    if it cannot be rendered.
    """
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic")
    exporter.register_filter("markdown2html", markdown)
    try:
        show_widget_outputs(notebook)
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                output.get("data", {}).pop(RESULT_MIME, None)  # its text stays, the data is for us
        body, _ = exporter.from_notebook_node(notebook)
    except Exception as error:  # of widgets' odd state, the schema, templates and filters
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise InputError(f"this notebook cannot be shown: {reason}") from error
    return sanitise(repair(body, below=below, lessons=lessons))


def mathml(formula: str, display: str) -> str:
    """Return a formula of TeX as MathML, inline or as a block; "" if it is not understood."""
    from latex2mathml.converter import convert

    try:
        return convert(formula, display=display)
    except Exception:  # the converter's own and Python's: the formula stays as written
        return ""


def markdown(source: str) -> str:
    """Return Markdown as HTML: nbconvert's own, but for formulas."""
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Renderer(IPythonRenderer):
        def inline_math(self, body: str) -> str:
            return mathml(body, "inline") or super().inline_math(body)

        def block_math(self, body: str) -> str:
            return mathml(body, "block") or super().block_math(body)

    renderer = Renderer(escape=False, exclude_anchor_links=True)
    return MarkdownWithMath(renderer=renderer).render(source)


def show_widget_outputs(notebook: Any) -> None:
    """Replace widgets, which need a live kernel, by what output widgets in them show."""
    from nbformat.v4 import new_output

    models = widget_models(notebook)
    note = '<p class="note">Interactive: open the notebook to use it.</p>'
    for cell in notebook.cells:
        outputs = []
        for output in cell.get("outputs", []):
            view = output.get("data", {}).get(_VIEW)
            if view is None:
                outputs.append(output)
            else:
                outputs.append(new_output("display_data", data={"text/html": note}))
                outputs += _outputs_of(view["model_id"], models, set())
        if outputs:
            cell.outputs = outputs
    notebook.metadata.pop("widgets", None)


def _outputs_of(model_id: str, models: Mapping[str, Any], seen: set[str]) -> list[Any]:
    """Return the outputs of the widget ``model_id`` and of its children."""
    if model_id in seen or model_id not in models:
        return []
    seen.add(model_id)
    state = models[model_id]["state"]
    outputs = [o for o in state.get("outputs", []) if _VIEW not in o.get("data", {})]
    for child in state.get("children", []):
        outputs += _outputs_of(child.removeprefix("IPY_MODEL_"), models, seen)
    return outputs
