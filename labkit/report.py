"""One HTML file about a run of the course: lessons, verdicts, timings, every notebook rendered.

The file is complete in itself: no script, no style sheet, image or font from elsewhere, so it
reads the same offline and in ten years. Values are escaped; what a notebook displayed as HTML is
kept, without scripts, frames, event handlers and anything that would be fetched.

Formulas become MathML, which browsers draw by themselves.

Limits: a formula that the converter does not understand stays text; widgets appear as the last
thing they showed.
"""

import html
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.check import widget_models
from labkit.claims import format_value
from labkit.lessons import read_notebook
from labkit.memory import InputError
from labkit.outcomes import Outcome, read_outcomes, stored_result
from labkit.readable import READABLE_STYLE, anchor, contents, mend, scrolling
from labkit.results import RESULT_MIME, Result, write_atomic
from labkit.safe_html import POLICY, sanitise

REPORT_NAME = "report.html"
_VIEW = "application/vnd.jupyter.widget-view+json"
_SYMBOLS = {"passed": "✓", "failed": "✗", "interrupted": "◼", "not started": "·"}
_HOST_MEMORY = (
    "Host memory is that of the lesson's kernel and of all processes that it started, sampled: "
    "a lower bound of the peak. The Jupyter server and the browser come on top."
)
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto;
  max-width: 1000px; padding: 1rem; overflow-wrap: break-word; }
table { border-collapse: collapse; margin: .5rem 0; }
th, td { border-bottom: 1px solid #ccc; padding: .25rem .6rem; text-align: left;
  vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; }
div.highlight { background: #fff; border: 1px solid #d5dbe1; padding: .1rem .5rem; }
.prompt { display: none; }
.output { margin-left: .7rem; border-left: 3px solid #ddd; padding-left: .7rem; }
img { max-width: 100%; height: auto; }
details { border-top: 2px solid #888; padding: .4rem 0; }
details > div { scroll-margin-top: 3rem; }
h3 { font-size: 1.35rem; } h4 { font-size: 1.15rem; } h5, h6 { font-size: 1rem; }
.input { margin: .5rem 0; }
summary { font-size: 1.2rem; cursor: pointer; }
.failed { color: #a40000; font-weight: bold; }
.note { color: #555; font-style: italic; }
@media print { body { max-width: none; font-size: 10pt; }
  details::details-content { content-visibility: visible; } img, tr { break-inside: avoid; } }
"""


def report(folder: Path, outcomes: Sequence[Outcome] | None = None) -> Path:
    """Write ``report.html`` about a run into its folder; returns its path.

    Args:
        folder: what ``notebooks.run`` wrote into.
        outcomes: of that run; if None, all that the folder holds.

    Raises:
        InputError: the folder holds no outcomes, or a damaged one.
        OSError: it cannot be written.
    """
    outcomes = read_outcomes(folder) if outcomes is None else outcomes
    results = {outcome.name: stored_result(outcome, folder) for outcome in outcomes}
    found = [result for result in results.values() if result]
    names = {outcome.name for outcome in outcomes}
    tables = {"Lessons": lesson_table(outcomes), "Claims on trial": verdict_table(found)}
    executed = "The lessons, as executed"
    parts = [
        f"<h1>GPU Memory Lab</h1><p>{_summary(outcomes, found)}</p>",
        contents([*tables, executed]),
        *(_heading(name) + scrolling(table, name) for name, table in tables.items()),
        _heading(executed),
        *(_lesson(outcome, folder, names) for outcome in outcomes),
    ]
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>GPU Memory Lab: report</title>"
        f"<style>{_STYLE}{READABLE_STYLE}{_code_style()}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )
    path = folder / REPORT_NAME
    write_atomic(path, page)
    return path


def _heading(text: str) -> str:
    return f'<h2 id="{anchor(text)}">{text}</h2>'


def _summary(outcomes: Sequence[Outcome], results: Sequence[Result]) -> str:
    passed = sum(outcome.passed for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    machines = ", ".join(sorted({result.where for result in results})) or "an unknown machine"
    return html.escape(
        f"{passed} of {len(outcomes)} lessons passed, {seconds:.0f} seconds of work, on {machines}."
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are escaped already."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    body = "".join("<tr>" + "".join(row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any, kind: str = "") -> str:
    return f'<td class="{kind}">{html.escape(str(value))}</td>' if kind else f"<td>{value}</td>"


def _text(value: Any) -> str:
    return _cell(html.escape(str(value)))


def lesson_table(outcomes: Sequence[Outcome]) -> str:
    """Lessons with status, seconds, host memory and problems, as an HTML table."""
    rows = []
    for outcome in outcomes:
        link = f'<a href="#{html.escape(outcome.name)}">{html.escape(outcome.title)}</a>'
        status = f"{_SYMBOLS[outcome.status]} {outcome.status}"
        problems = "<br>".join(html.escape(problem) for problem in outcome.problems)
        rows.append(
            [
                _text(outcome.number),
                _cell(link),
                _cell(status, "failed" if outcome.status == "failed" else "status"),
                _cell(f"{outcome.seconds:.1f}", "number"),
                _cell(outcome.host_peak, "number"),
                _cell(problems),
            ]
        )
    header = ["#", "Lesson", "Status", "Seconds", "Host memory, peak", "Problems"]
    return _table(header, rows) + f'<p class="note">{_HOST_MEMORY}</p>'


def verdict_table(results: Sequence[Result]) -> str:
    """Every claim that was judged, as an HTML table."""
    rows = [[_text(value) for value in row] for row in verdict_rows(results)]
    if not rows:
        return "<p>No claim was judged.</p>"
    return _table(VERDICT_COLUMNS, rows)


VERDICT_COLUMNS = ("Lesson", "Claim", "Source", "Claimed", "Found here", "Verdict", "Where")


def verdict_rows(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    """The cells of the verdict table, unescaped, one row per claim."""
    for result in results:
        for entry in result.judgements:
            yield (
                result.lesson,
                str(entry.get("says") or entry["id"]),
                " ".join(map(str, entry.get("sources", ()))),
                str(entry.get("claimed", "")),
                found_here(entry),
                entry["verdict"],
                str(entry.get("mode") or result.where),
            )


def found_here(entry: Mapping[str, Any]) -> str:
    """The measured value of a judgement record, with its unit."""
    measured, unit = entry.get("measured"), str(entry.get("unit", ""))
    if isinstance(measured, Mapping):
        return "; ".join(f"{name}: {_value(item, unit)}" for name, item in measured.items())
    return _value(measured, unit)


def _value(value: Any, unit: str) -> str:
    if value is None or isinstance(value, bool | int | float):
        return format_value(value, unit)
    return str(value)


# --- one notebook ------------------------------------------------------------------------------


def _lesson(outcome: Outcome, folder: Path, names: Collection[str]) -> str:
    name, title = html.escape(outcome.name), html.escape(outcome.title)
    problems = "".join(f'<p class="failed">{html.escape(p)}</p>' for p in outcome.problems)
    try:
        if not outcome.notebook:
            raise InputError("There is no notebook to show.")
        body = render(read_notebook(folder / outcome.notebook), below=2, lessons=names)
    except InputError as error:
        body = f'<p class="note">{html.escape(str(error))}</p>'
    opened = " open" if outcome.status == "failed" else ""
    return (
        f"<details{opened}><summary>{html.escape(outcome.number)} {title}</summary>"
        f'<div id="{name}">{problems}{body}</div></details>'  # a link into it opens it
    )


def render(notebook: Any, *, below: int = 0, lessons: Collection[str] = ()) -> str:
    """An executed notebook as an HTML fragment that fetches and runs nothing.

    Args:
        notebook: of nbformat 4; it is changed.
        below: the level of the page's heading that it stands under.
        lessons: names of the lessons on the page, which links between lessons lead to.
    """
    from nbconvert import HTMLExporter

    show_widget_outputs(notebook)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(RESULT_MIME, None)  # its text stays, the data is for us
    exporter = HTMLExporter(template_name="basic")
    exporter.register_filter("markdown2html", markdown)
    try:
        body, _ = exporter.from_notebook_node(notebook)
    except Exception as error:  # the schema's errors, and whatever templates and filters raise
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise InputError(f"this notebook cannot be shown: {reason}") from error
    return sanitise(mend(body, below=below, lessons=lessons))


def mathml(formula: str, display: str) -> str:
    """A formula of TeX as MathML; "" if the converter does not understand it.

    Args:
        formula: without its dollar signs.
        display: ``"inline"`` or ``"block"``.
    """
    from latex2mathml.converter import convert

    try:
        return convert(formula, display=display)
    except Exception:  # the converter's own and Python's: the formula stays as written
        return ""


def markdown(source: str) -> str:
    """Markdown as HTML: nbconvert's own, but for formulas."""
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Renderer(IPythonRenderer):
        def inline_math(self, body: str) -> str:
            return mathml(body, "inline") or super().inline_math(body)

        def block_math(self, body: str) -> str:
            return mathml(body, "block") or super().block_math(body)

    renderer = Renderer(escape=False, exclude_anchor_links=True)
    return MarkdownWithMath(renderer=renderer).render(source)


def show_widget_outputs(notebook: Any) -> None:
    """Put what output widgets held in the place of the widgets, which need a live kernel."""
    from nbformat.v4 import new_output

    models = widget_models(notebook)
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        outputs = []
        for output in cell.outputs:
            view = output.get("data", {}).get(_VIEW)
            if view is None:
                outputs.append(output)
                continue
            note = '<p class="note">Interactive: open the notebook to use it.</p>'
            outputs.append(new_output("display_data", data={"text/html": note}))
            named = view.get("model_id") if isinstance(view, Mapping) else None
            outputs += _held(str(named), models, set())
        cell.outputs = outputs
    notebook.metadata.pop("widgets", None)


def _held(model_id: str, models: Mapping[str, Any], seen: set[str]) -> list[Any]:
    """Outputs of the widget ``model_id`` and of its children."""
    if model_id in seen or model_id not in models:
        return []
    seen.add(model_id)
    state = models[model_id].get("state", {})
    held = [o for o in state.get("outputs") or [] if _VIEW not in o.get("data", {})]
    for child in state.get("children") or []:
        held += _held(str(child).removeprefix("IPY_MODEL_"), models, seen)
    return held


def _code_style() -> str:
    from pygments.formatters import HtmlFormatter

    return HtmlFormatter().get_style_defs(".highlight")
