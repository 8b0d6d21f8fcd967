"""One HTML file about a run of the course, or about what several participants found.

``report`` shows lessons, verdicts, timings and every notebook of one run; ``compare`` shows what
each participant found in each lesson. The file is complete in itself: nothing in it is fetched or
runs. Formulas become MathML, which browsers draw by themselves; one that the converter does not
understand stays text. Widgets appear as the last thing they showed.

Limits: where a participant measured a value is believed. There is one column per participant, so a
class of a hundred scrolls sideways.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from gpumem.figures import html_pages
from gpumem.figures.html_pages import MISSING
from gpumem.figures.tables import setting_text
from gpumem.files import read_file, write_atomic
from gpumem.inputs import InputError
from gpumem.runs import Run
from gpumem.units import format_bytes
from labkit.course.check import result_of, widget_models
from labkit.course.html_parts import repair, sanitise
from labkit.course.outcomes import Outcome, stored_result
from labkit.lesson.claim_cards import VERDICTS, found_lines
from labkit.lesson.claims import (
    Claim,
    Judgement,
    all_claims,
    format_found,
    format_value,
    judge,
    of_lesson,
)
from labkit.lesson.notebooks import read_notebook
from labkit.lesson.results import RESULT_MIME, Result, versions_text

REPORT_NAME = "report.html"
VERDICT_COLUMNS = ("Lesson", "Claim", "Source", "Claimed", "Found here", "Verdict", "Where")
_VIEW = "application/vnd.jupyter.widget-view+json"


def report(folder: Path, outcomes: Sequence[Outcome], path: Path | None = None) -> Path:
    """Write the report about ``outcomes`` of a run, by default into its folder; return its path."""
    from pygments.formatters import HtmlFormatter

    found = [stored_result(outcome, folder) for outcome in outcomes]
    results = [result for result in found if result]
    names = {outcome.name for outcome in outcomes}
    passed = len([outcome for outcome in outcomes if outcome.passed])
    seconds = sum(outcome.seconds for outcome in outcomes)
    machines = ", ".join(sorted({r.where for r in results})) or "an unknown machine"
    summary = f"{passed} of {len(outcomes)} lessons passed, {seconds:.0f} seconds of work"
    text = page(
        f"{summary}, on {machines}.",
        {"claims": ("Claims on trial", verdict_table(results))},
        [(outcome, _body(outcome, folder, names)) for outcome in outcomes],
        Markup(HtmlFormatter().get_style_defs(".highlight")),
    )
    path = path or folder / REPORT_NAME
    write_atomic(path, text)
    return path


def page(
    summary: str,
    sections: Mapping[str, tuple[str, str]],
    lessons: Sequence[tuple[Outcome, str]] = (),
    code_style: str = "",
) -> str:
    """Return a page of ``sections``, headings and bodies by id, and of executed lessons."""
    headings = {id: heading for id, (heading, _) in sections.items()}
    if lessons:
        headings = {"lessons": "Lessons", **headings, "executed": "The lessons, as executed"}
    text = html_pages.render(
        "labkit/course/report.html.j2",
        title="GPU Memory Lab: report",
        summary=summary,
        headings=headings,
        sections={id: body for id, (_, body) in sections.items()},
        lessons=lessons,
        code_style=code_style,
    )
    return text.encode("utf-8", "replace").decode()  # names may hold lone surrogates


def verdict_table(results: Sequence[Result]) -> Markup:
    """Return every claim that was judged, as an HTML table."""
    rows = verdict_rows(results)
    if not rows:
        return Markup("<p>No claim was judged.</p>")
    return html_pages.table("Claims on trial", VERDICT_COLUMNS, rows)


def verdict_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return the cells of the verdict table as text, one row per claim that is known."""
    rows = []
    for result in results:
        for entry in result.judgements:
            claim = all_claims().get(entry["id"])
            if claim is None:
                continue
            said = result.lesson, claim.says, " ".join(claim.sources), claim.claimed
            found = format_found(entry.get("measured"), claim.unit)
            rows.append((*said, found, str(entry["verdict"]), entry.get("mode") or result.where))
    return rows


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

    with suppress(Exception):  # the converter's own and Python's: the formula stays as written
        return convert(formula, display=display)
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
    if model_id in seen or model_id not in models:
        return []
    seen.add(model_id)
    state = models[model_id]["state"]
    outputs = [o for o in state.get("outputs", []) if _VIEW not in o.get("data", {})]
    for child in state.get("children", []):
        outputs += _outputs_of(child.removeprefix("IPY_MODEL_"), models, seen)
    return outputs


# --- several participants ----------------------------------------------------------------------

#: `labkit run` writes such files beside its notebooks; they hold no result.
_NOT_READ = (".html", ".log")
_EXERCISE = re.compile(r"\[\S+ (correct|not yet|not attempted)\] Exercise (\d\d-\w+)")


class Sent(NamedTuple):
    """What a participant sent for a lesson; the status of each exercise is in a notebook only."""

    result: Result
    exercises: Mapping[str, str]


class Classroom(NamedTuple):
    """Each participant's newest result of each lesson, and a sentence for each file left out."""

    participants: Mapping[str, Mapping[str, Sent]]
    left_out: Sequence[str]

    @property
    def lessons(self) -> dict[str, str]:
        """The lessons that were sent, with their titles, in order."""
        sent = [sent.result for lessons in self.participants.values() for sent in lessons.values()]
        return dict(sorted((result.lesson, result.title) for result in sent))

    def __str__(self) -> str:
        results = sum(len(lessons) for lessons in self.participants.values())
        return (
            f"Participants: {len(self.participants)}; results: {results}; lessons: "
            f"{len(self.lessons)}; files left out: {len(self.left_out)}."
        )


def gather(paths: Sequence[Path], *, anonymous: bool = False) -> Classroom:
    """Read what participants sent.

    Each path is named after a participant: a file (a result as JSON, or an executed notebook) or a
    folder of such files. If ``anonymous``, participants are numbered, in an order that does not
    depend on their names. An `InputError` says that a path is missing, or that two have one name.
    """
    participants: dict[str, dict[str, Sent]] = {}
    left_out = []
    for path in paths:
        if not path.exists():
            raise InputError(f"there is no file or folder {path}")
        if path.suffix in _NOT_READ:
            continue
        name = path.absolute().name if path.is_dir() else path.stem
        if name in participants:
            raise InputError(f"two participants are called {name}; put one's files in one folder")
        newest = participants[name] = {}
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.suffix in _NOT_READ or file.name.startswith("."):
                continue
            try:
                sent = _read(file)
            except InputError as error:
                left_out.append(f"{file}: {error}")
                continue
            if sent is None:
                continue
            lesson = sent.result.lesson
            if lesson not in newest or sent.result.date > newest[lesson].result.date:
                newest[lesson] = sent
    if anonymous:
        left_out = ["(not shown)" for _ in left_out]
        by_content = sorted(participants.values(), key=repr)
        participants = {f"Participant {n}": sent for n, sent in enumerate(by_content, 1)}
    return Classroom(participants, left_out)


def _read(path: Path) -> Sent | None:
    """Return the result in ``path``; None for the outcome of a lesson whose notebook has it."""
    if path.is_symlink() or not path.is_file():
        raise InputError("it is not a regular file")
    if path.suffix == ".json":
        return read_file(path, _from_json, "a result")
    if path.suffix != ".ipynb":
        raise InputError("it ends in neither .json nor .ipynb")
    notebook, exercises = read_notebook(path), {}
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        if shown := _EXERCISE.match(output.get("data", {}).get("text/plain", "")):
            exercises[shown[2]] = shown[1]
    return Sent(result_of(notebook), exercises)


def _from_json(record: Any) -> Sent | None:
    if isinstance(record, Mapping) and "status" in record:
        if record["status"] == "passed":
            return None
        raise InputError(f"`labkit run` says that its lesson {record['status']}")
    return Sent(Result.from_dict(record), {})


def compare(classroom: Classroom, path: Path) -> Path:
    """Write what each participant found in each lesson, side by side; return ``path``.

    No verdict is taken from a file: every value is judged again by the rule of its claim.
    """
    sections = {}
    for lesson, title in classroom.lessons.items():
        everybody = classroom.participants.items()
        sent = {name: lessons[lesson] for name, lessons in everybody if lesson in lessons}
        rows = _lesson_rows(lesson, list(sent.values()))
        table = html_pages.table(f"Lesson {lesson}", ("What was found", *sent), rows)
        sections[f"lesson-{lesson}"] = f"{lesson} {title}", table
    sections["left-out"] = "Left out", _lines(classroom.left_out)
    write_atomic(path, page(str(classroom), sections))
    return path


def _lines(lines: Iterable[str]) -> Markup:
    return Markup("<br>").join(filter(None, lines))


def _lesson_rows(lesson: str, sent: Sequence[Sent]) -> Iterator[list[str]]:
    """Yield machines, exercises, each claim that was judged and each run, a cell for each."""
    results = [each.result for each in sent]
    where = [(r.where, versions_text(r.machine), r.date[:10]) for r in results]
    yield ["Machine", *map(_lines, where)]
    if any(each.exercises for each in sent):
        done = [[f"{id}: {status}" for id, status in each.exercises.items()] for each in sent]
        yield ["Exercises", *(_lines(lines) or MISSING for lines in done)]
    for claim in of_lesson(lesson):
        found = [_judged(claim, result) for result in results]
        counts = Counter(judgement.verdict for judgement in found if judgement)
        if counts:
            tally = ", ".join(f"{counts[each]} {each}" for each in VERDICTS if counts[each])
            says = _lines([claim.says, f"{claim.claimed}. {claim.rule}", tally])
            yield [says, *map(_found, found)]
    runs = [{_settings(run, result): run for run in result.runs} for result in results]
    for settings in dict.fromkeys(settings for each in runs for settings in each):
        found = [each.get(settings) for each in runs]
        yield [_lines([*settings, _spread(found)]), *map(_peak, found)]


def _judged(claim: Claim, result: Result) -> Judgement | None:
    for entry in result.judgements:
        if entry["id"] == claim.id:
            return judge(claim.id, entry.get("measured"), entry.get("mode"))
    return None


def _found(judgement: Judgement | None) -> str:
    if judgement is None:
        return MISSING
    verdict = f"{VERDICTS[judgement.verdict].symbol} {judgement.verdict}"
    return _lines([verdict, *found_lines(judgement), judgement.mode or ""])


def _settings(run: Run, result: Result) -> tuple[str, str, str]:
    """Return what is equal for runs that are compared: name, settings of the run and the lesson."""
    of_run, of_lesson = dict(run.parameters), result.parameters
    of_lesson = setting_text(of_lesson, of_lesson)
    return run.name, setting_text(of_run, of_run), of_lesson and f"in a lesson with {of_lesson}"


def _spread(runs: Sequence[Run | None]) -> str:
    """Return by how much the largest peak is above the smallest, of runs that fitted."""
    peaks = [run.peak_bytes for run in runs if run and not run.oom]
    if len(peaks) < 2 or not min(peaks):
        return ""
    share = max(peaks) / min(peaks) - 1
    return f"{format_value(share, 'share')} apart" if share else "equal"


def _peak(run: Run | None) -> str:
    if run is None:
        return MISSING
    size = format_bytes(run.peak_bytes)
    return _lines([f"out of memory at {size}" if run.oom else size, run.label])
