"""What the participants of a class found, side by side on one page of HTML.

No verdict is taken from a file: every value is judged again by the rule of its claim.

Limits: where a value was measured is believed. Of several results of one lesson the newest counts.
There is one column per participant, so a class of a hundred scrolls sideways.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from labkit.course import verdicts
from labkit.course.check import result_of
from labkit.course.claims import Claim, Verdict, all_claims, format_value, of_lesson
from labkit.course.lesson_cards import VERDICTS
from labkit.course.lessons import read_notebook
from labkit.course.results import Result, impossible, versions_text
from labkit.course.verdicts import Judgement
from labkit.runs import Run
from labkit.show.tables import setting_text
from labkit.support import html_pages
from labkit.support.files import read_file
from labkit.support.html_table import MISSING
from labkit.values import InputError, format_bytes

TITLE = "GPU Memory Lab: the class"
#: `labkit run` writes such files beside its notebooks; they hold no result.
_NOT_READ = (".html", ".log")


@dataclass(frozen=True)
class Classroom:
    """Each participant's newest result of each lesson, and a sentence for each file left out."""

    participants: Mapping[str, Mapping[str, Result]]
    left_out: tuple[str, ...]

    @property
    def lessons(self) -> dict[str, str]:
        """The lessons that were sent, with their titles, in order."""
        sent = [result for results in self.participants.values() for result in results.values()]
        return dict(sorted((result.lesson, result.title) for result in sent))

    def __str__(self) -> str:
        results = sum(len(results) for results in self.participants.values())
        return (
            f"Participants: {len(self.participants)}; results: {results}; lessons: "
            f"{len(self.lessons)}; files left out: {len(self.left_out)}."
        )


def gather(folder: Path, *, anonymous: bool = False) -> Classroom:
    """Read what the participants sent.

    ``folder`` holds for each participant a file (a result as JSON, or an executed notebook) or a
    folder of such files, named after the participant. If ``anonymous``, participants are numbered,
    in an order that does not depend on their names.

    Raises:
        InputError: there is no such folder, or no file in it that could hold a result.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; give one with what participants sent")
    participants: dict[str, dict[str, Result]] = {}
    left_out = []
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if path.is_dir() or path.suffix in _NOT_READ or path.name.startswith("."):
            continue
        name = path.stem if path.parent == folder else path.parent.name
        newest = participants.setdefault(name, {})
        try:
            result = _read(path)
        except InputError as error:
            left_out.append(f"{path.relative_to(folder)}: {error}")
            continue
        if result is None:
            continue
        if result.lesson not in newest or result.date > newest[result.lesson].date:
            newest[result.lesson] = result
    if not participants:
        raise InputError(
            f"{folder} holds nothing to compare: it needs a .json or .ipynb file, or a folder of "
            "them, for each participant"
        )
    if anonymous:
        left_out = ["(not shown)" for _ in left_out]
        by_content = sorted(participants.values(), key=repr)
        participants = {f"Participant {n}": results for n, results in enumerate(by_content, 1)}
    return Classroom(participants, tuple(left_out))


def _read(path: Path) -> Result | None:
    """Return the result in ``path``; None for the outcome of a lesson whose notebook has it."""
    if path.is_symlink() or not path.is_file():
        raise InputError("it is not a regular file")
    if path.suffix == ".ipynb":
        result = result_of(read_notebook(path))
    elif path.suffix == ".json":
        result = read_file(path, _from_json, "a result")
    else:
        raise InputError("it ends in neither .json nor .ipynb")
    for run in result.runs if result else ():
        for problem in impossible(run):
            raise InputError(f"its run {run.name!r} cannot be: {problem}")
    return result


def _from_json(record: Any) -> Result | None:
    if isinstance(record, Mapping) and "status" in record:
        if record["status"] == "passed":
            return None
        raise InputError(f"`labkit run` says that its lesson {record['status']}")
    return Result.from_dict(record)


# --- the page -------------------------------------------------------------------------------------


def page(classroom: Classroom) -> str:
    """Return the page, complete."""
    claims, peaks = {}, {}
    for lesson, title in classroom.lessons.items():
        everybody = classroom.participants.items()
        sent = {name: results[lesson] for name, results in everybody if lesson in results}
        name = f"{lesson} {title}"
        columns, rows = ("Claim", "Together", *sent), _claim_rows(lesson, sent)
        claims[name] = _table(f"{name}: verdict and value of each participant", columns, rows)
        columns, rows = ("Run", "Apart", *sent), _peak_rows(sent)
        peaks[name] = _table(f"{name}: peak memory of equal runs", columns, rows)
    text = html_pages.render(
        "course/classroom.html.j2",
        title=TITLE,
        classroom=classroom,
        machines=_machines(classroom),
        sections={"Claims on trial": claims, "Peaks side by side": peaks},
    )
    return text.encode("utf-8", "replace").decode()  # a file's name may hold lone surrogates


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    if not rows:
        return Markup()
    return html_pages.table(caption, columns, rows, caption=caption)


def _symbol(verdict: Verdict) -> Markup:
    """Return the verdict's symbol on its colour, with its name for screen readers."""
    look = VERDICTS[verdict]
    return Markup(
        '<span class="symbol" style="background:{}" role="img" aria-label="{}">{}</span>'
    ).format(look.colour, verdict, look.symbol)


def _lines(lines: Sequence[str], note: str = "") -> Markup:
    """Return the lines of a cell, and a note in a fainter colour below them."""
    return Markup("<br>").join(lines) + Markup('<div class="note">{}</div>').format(note)


def _machines(classroom: Classroom) -> Markup:
    rows = []
    for name, results in classroom.participants.items():
        lessons_of: dict[tuple[str, ...], list[str]] = {}
        for lesson, result in sorted(results.items()):
            lessons_of.setdefault(_machine(result.machine), []).append(lesson)
        for machine, lessons in lessons_of.items():
            rows.append((name, ", ".join(lessons), *machine))
    columns = ("Participant", "Lessons", "Machine", "Kind", "GPU memory", "CPU memory", "Cores")
    return _table("Machines, as the results name them.", (*columns, "Versions"), rows)


def _machine(machine: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = [machine.get("capacity_bytes"), machine.get("host_memory_bytes")]
    sizes = [format_bytes(size) if size else MISSING for size in sizes]
    cores = str(machine.get("cores") or MISSING)
    return machine["name"], machine["kind"], *sizes, cores, versions_text(machine, None)


def _claim_rows(lesson: str, sent: Mapping[str, Result]) -> list[list[str]]:
    """Return a row for each claim of the lesson that someone's result has judged."""
    judged = [
        {
            entry["id"]: verdicts.judge(entry["id"], entry.get("measured"), entry.get("mode"))
            for entry in result.judgements
            if entry["id"] in all_claims()
        }
        for result in sent.values()
    ]
    rows = []
    for claim in of_lesson(lesson):
        found = [judgements.get(claim.id) for judgements in judged]
        counts = Counter(judgement.verdict for judgement in found if judgement)
        if counts:
            tally = [_symbol(v) + f" {counts[v]} {v}" for v in Verdict if counts[v]]
            says = _lines([claim.says], f"{claim.claimed}. {claim.rule}")
            rows.append([says, _lines(tally), *(_verdict(claim, each) for each in found)])
    return rows


def _verdict(claim: Claim, judgement: Judgement | None) -> str:
    if judgement is None:
        return MISSING
    measured, verdict = judgement.measured, judgement.verdict
    if isinstance(measured, Mapping):
        lines = [_symbol(verdict) + f" {verdict}"]
        for name, value in measured.items():
            found = format_value(value, claim.unit)
            lines.append(_symbol(judgement.by_condition[name]) + f" {name}: {found}")
    else:
        lines = [_symbol(verdict) + f" {format_value(measured, claim.unit)}"]
    return _lines(lines, judgement.mode or "")


def _peak_rows(sent: Mapping[str, Result]) -> list[list[str]]:
    """Return a row for each run that two participants or more sent with equal settings."""
    runs = [{_settings(run, result): run for run in result.runs} for result in sent.values()]
    counts = Counter(settings for found in runs for settings in found)
    rows = []
    for settings in [settings for settings, count in counts.items() if count > 1]:
        found = [each.get(settings) for each in runs]
        name, of_run, of_lesson = settings
        first = _lines([name, of_run], of_lesson and f"in a lesson with {of_lesson}")
        rows.append([first, _spread(found), *(_peak(run) for run in found)])
    return rows


def _settings(run: Run, result: Result) -> tuple[str, str, str]:
    """Return what is equal for runs that are compared: name, settings of the run and the lesson."""
    of_run, of_lesson = dict(run.parameters), result.parameters
    return run.name, setting_text(of_run, of_run), setting_text(of_lesson, of_lesson)


def _spread(runs: Sequence[Run | None]) -> str:
    """Return by how much the largest peak is above the smallest, of runs that fitted."""
    peaks = [run.peak_bytes for run in runs if run and not run.oom]
    if len(peaks) < 2 or not min(peaks):
        return MISSING
    share = max(peaks) / min(peaks) - 1
    return format_value(share, "share") if share else "equal"


def _peak(run: Run | None) -> str:
    if run is None:
        return MISSING
    size = format_bytes(run.peak_bytes)
    return _lines([f"out of memory at {size}" if run.oom else size], run.label)
