"""What the participants of a class found, side by side on one page of HTML.

No verdict is taken from a file: every value is judged again by the rule of its claim.

Limits: where a value was measured is believed. Of several results of one lesson the newest counts.
There is one column per participant where they differ, so a class of a hundred scrolls sideways.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from labkit.course import verdicts
from labkit.course.check import result_of
from labkit.course.claims import Claim, Verdict, all_claims, format_value, of_lesson
from labkit.course.lesson_cards import VERDICTS
from labkit.course.lessons import read_notebook
from labkit.course.results import Result, impossible
from labkit.course.verdicts import Judgement
from labkit.runs import Run
from labkit.show.tables import setting_text
from labkit.support.files import read_file
from labkit.support.html_pages import render
from labkit.support.html_table import MISSING
from labkit.values import InputError, format_bytes

TITLE = "GPU Memory Lab: the class"
VERSIONS = ("python", "torch", "cuda", "driver", "transformers", "peft", "bitsandbytes")
#: `labkit run` writes such files beside its notebooks; they hold no result.
_NOT_READ = (".html", ".log")


@dataclass(frozen=True)
class Classroom:
    """What was sent.

    Attributes:
        participants: each participant's newest result of each lesson.
        left_out: a sentence for each file that was not taken.
    """

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

    Args:
        folder: holds for each participant a file (a result as JSON, or an executed notebook) or a
            folder of such files, named after the participant.
        anonymous: number the participants, in an order that does not depend on their names.

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


def _read(path: Path) -> Result:
    if path.is_symlink() or not path.is_file():
        raise InputError("it is not a regular file")
    if path.suffix == ".ipynb":
        result = result_of(read_notebook(path))
    elif path.suffix == ".json":
        result = read_file(path, _from_json, "a result")
    else:
        raise InputError("it ends in neither .json nor .ipynb")
    for run in result.runs:
        for problem in impossible(run):
            raise InputError(f"its run {run.name!r} cannot be: {problem}")
    return result


def _from_json(record: Any) -> Result:
    if isinstance(record, Mapping) and "fingerprint" in record:
        raise InputError(f"`labkit run` says that its lesson {record.get('status')}")
    return Result.from_dict(record)


# --- the page -------------------------------------------------------------------------------------


class Table(NamedTuple):
    """A table of the page, whose cells are text or HTML; the first of each row is its heading."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def page(classroom: Classroom) -> str:
    """Return the page, complete."""
    claims, peaks = {}, {}
    for lesson, title in classroom.lessons.items():
        everybody = classroom.participants.items()
        sent = {name: results[lesson] for name, results in everybody if lesson in results}
        claims[f"{lesson} {title}"] = _claims(lesson, sent)
        peaks[f"{lesson} {title}"] = _peaks(sent)
    text = render(
        "course/classroom.html.j2",
        title=TITLE,
        classroom=classroom,
        machines=_machines(classroom),
        sections={"Claims on trial": claims, "Peaks side by side": peaks},
    )
    return text.encode("utf-8", "replace").decode()  # a file's name may hold lone surrogates


def _symbol(verdict: Verdict) -> Markup:
    """Return the verdict's symbol on its colour, with its name for screen readers."""
    look = VERDICTS[verdict]
    return Markup(
        '<span class="symbol" style="background:{}" role="img" aria-label="{}">{}</span>'
    ).format(look.colour, verdict, look.symbol)


def _lines(lines: Sequence[str], note: str = "") -> Markup:
    """Return the lines of a cell, and a note in a fainter colour below them."""
    return Markup("<br>").join(lines) + Markup('<div class="note">{}</div>').format(note)


def _machines(classroom: Classroom) -> Table:
    rows = []
    for name, results in classroom.participants.items():
        lessons_of: dict[tuple[str, ...], list[str]] = {}
        for lesson, result in sorted(results.items()):
            lessons_of.setdefault(_machine(result.machine), []).append(lesson)
        for machine, lessons in lessons_of.items():
            rows.append([name, ", ".join(lessons), *machine])
    columns = ("Participant", "Lessons", "Machine", "Kind", "GPU memory", "CPU memory", "Cores")
    return Table("Machines and versions, as the results name them.", (*columns, *VERSIONS), rows)


def _machine(machine: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = [machine.get("capacity_bytes"), machine.get("host_memory_bytes")]
    sizes = [format_bytes(size) if isinstance(size, int) else MISSING for size in sizes]
    found = machine.get("versions", {})
    versions = [found.get(name) or MISSING for name in VERSIONS]
    cores = str(machine.get("cores") or MISSING)
    return machine["name"], machine["kind"], *sizes, cores, *versions


def _side_by_side(
    caption: str, columns: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[str]]
) -> Table:
    """Return a table with a column per participant, or one for all if their cells are equal.

    Each row has a cell for each of ``columns``, then one for each of ``names``.
    """
    first = len(columns)
    if len(names) > 1 and all(len(set(row[first:])) == 1 for row in rows):
        names, rows = [f"All {len(names)}"], [row[: first + 1] for row in rows]
    return Table(caption, [*columns, *names], rows)


def _claims(lesson: str, sent: Mapping[str, Result]) -> Table:
    """Return a table of the lesson's claims that someone's result has judged."""
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
    caption = "Verdict and value of each participant."
    return _side_by_side(caption, ("Claim", "Together"), list(sent), rows)


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


class RunKey(NamedTuple):
    """Equal for runs that are compared: those of one name with equal settings."""

    name: str
    parameters: str
    lesson: str


def _peaks(sent: Mapping[str, Result]) -> Table:
    """Return a table of the runs that two participants or more sent."""
    runs = {name: {_key(run, result): run for run in result.runs} for name, result in sent.items()}
    counts = Counter(key for found in runs.values() for key in found)
    rows = []
    for key in [key for key, count in counts.items() if count > 1]:
        found = [each.get(key) for each in runs.values()]
        name = _lines([key.name, key.parameters], key.lesson and f"in a lesson with {key.lesson}")
        rows.append([name, _spread(found), *(_peak(run) for run in found)])
    return _side_by_side("Peak memory of equal runs.", ("Run", "Apart"), list(runs), rows)


def _key(run: Run, result: Result) -> RunKey:
    of_run = setting_text(dict(run.parameters), run.parameters)
    return RunKey(run.name, of_run, setting_text(dict(result.parameters), result.parameters))


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
