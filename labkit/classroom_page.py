"""A class's findings as one page of HTML: who sent what, machines, verdicts, peaks, what was left
out.

The page is complete in itself: no script, nothing fetched, and a policy that forbids browsers both.
Every text of a participant is escaped, besides having been cleaned and shortened when it was read.
A verdict is said by a colour, a symbol and, to readers of either, by its words.

Limits: one column per participant, so a class of a hundred scrolls sideways.
"""

import base64
import hashlib
import html
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from labkit.claims import Claim, Judgement, Verdict, format_value, of_lesson
from labkit.classroom import Classroom, Participant
from labkit.classroom_files import clean
from labkit.classroom_records import VERSIONS, Computer, Peak, Record
from labkit.memory import format_bytes
from labkit.results import write_atomic
from labkit.show.cards import VERDICTS
from labkit.show.rich import MISSING

MOST_ROWS = 60
"""Runs of one lesson that are set side by side."""
MOST_SHOWN = 8
"""Conditions of one judgement."""
TITLE = "GPU Memory Lab: the class"
Members = Sequence[tuple[Participant, Record]]

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1b2430; background: #fff; margin: 0 auto;
  max-width: 1300px; padding: 1rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; }
h2 { font-size: 1.3rem; margin: 2rem 0 .3rem; }
h3 { font-size: 1.05rem; margin: 1.2rem 0 .2rem; }
p { margin: .3rem 0; max-width: 90ch; }
.wide { overflow-x: auto; }
.wide:focus-visible { outline: 2px solid #1f5a96; }
table { border-collapse: collapse; margin: .4rem 0; }
caption { text-align: left; color: #4a5663; padding: .2rem 0; }
th, td { border-bottom: 1px solid #d5dbe1; padding: .3rem .7rem .3rem 0; text-align: left;
  vertical-align: top; min-width: 5rem; max-width: 24rem; overflow-wrap: break-word; }
td small { min-width: 8rem; }
tbody th { position: sticky; left: 0; background: #fff; font-weight: 600; min-width: 11rem;
  overflow-wrap: anywhere; }
small { color: #4a5663; display: block; font-weight: normal; }
.badge { display: inline-block; min-width: 1.3em; text-align: center; border-radius: 4px;
  color: #fff; font-weight: 600; padding: 0 .25em; }
.key { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; }
@media print { .wide { overflow: visible; } body { font-size: 8pt; } }
""" + "".join(
    f".{verdict.name.lower()} {{ background: {VERDICTS[verdict].colour}; }}\n"
    for verdict in Verdict
)


def write_page(classroom: Classroom, path: Path) -> Path:
    """Write the page to ``path``, atomically.

    Raises:
        OSError: it cannot be written.
    """
    write_atomic(path, page(classroom))
    return path


def page(classroom: Classroom) -> str:
    """The page, complete."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    parts = [
        f"<h1>{TITLE}</h1><p>{html.escape(summary(classroom))}</p>",
        _section("Who sent what", _senders(classroom)),
        _section("Machines", _machines(classroom)),
        _section("Claims on trial", _claims(classroom)),
        _section("Peaks side by side", _peaks(classroom)),
        _section("Left out", _left_out(classroom)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{TITLE}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def summary(classroom: Classroom) -> str:
    """How much there is, in a sentence."""
    people = classroom.participants
    machines = {machine for person in people for machine in person.machines}
    notes = len(classroom.left_out) + sum(len(person.left_out) for person in people)
    return (
        f"{_count(len(people), 'participant')}, "
        f"{_count(sum(len(person.records) for person in people), 'result')} of "
        f"{_count(len(classroom.lessons), 'lesson')}, {_count(len(machines), 'kind')} of machine; "
        f"{_count(notes, 'remark')} on what was left out."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# --- parts of the page -------------------------------------------------------------------------


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """A table of cells that are HTML already; the first of each row is its heading."""
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    # What scrolls must be within the keyboard's reach.
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{html.escape(caption)}">'
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _name(participant: Participant) -> str:
    """A name, its direction of writing kept from what stands around it."""
    return f"<bdi>{html.escape(participant.name)}</bdi>"


def _lines(texts: Sequence[str]) -> str:
    return "<br>".join(html.escape(text) for text in texts) or MISSING


def _senders(classroom: Classroom) -> str:
    rows = []
    for person in classroom.participants:
        dates = sorted(f"{record.date:%Y-%m-%d}" for record in person.records)
        rows.append(
            [
                _name(person),
                _lines([", ".join(record.lesson for record in person.records)]) or MISSING,
                _lines(person.unfinished),
                _lines([" to ".join(dict.fromkeys(dates[:1] + dates[-1:]))] if dates else []),
                str(len(person.left_out)) if person.left_out else MISSING,
            ]
        )
    headings = ("Participant", "Lessons with a result", "Not passed", "Dates", "Remarks")
    return _table(headings, rows, "Results by participant; remarks stand at the end.")


def _machines(classroom: Classroom) -> str:
    rows = [
        [_name(person), *_machine(machine)]
        for person in classroom.participants
        for machine in person.machines
    ]
    if not rows:
        return "<p>No result says on which machine it was made.</p>"
    headings = ("Participant", "Machine", "Kind", "GPU memory", "Host memory", "Cores",
                *VERSIONS)  # fmt: skip
    return _table(headings, rows, "Machines and versions, as the results name them.")


def _machine(machine: Computer) -> list[str]:
    sizes = [
        MISSING if size is None else format_bytes(size)
        for size in (machine.capacity_bytes, machine.host_memory_bytes)
    ]
    cores = MISSING if machine.cores is None else str(machine.cores)
    texts = [machine.name, machine.kind, *sizes, cores, *(v or MISSING for v in machine.versions)]
    return [html.escape(text) for text in texts]


# --- verdicts ----------------------------------------------------------------------------------


def _badge(verdict: Verdict) -> str:
    return _symbol(verdict, f' class="badge {verdict.name.lower()}"')


def _symbol(verdict: Verdict, look: str = "") -> str:
    """The verdict's symbol, with its word for who hears the page or points at it."""
    symbol = VERDICTS[verdict].symbol
    return f'<span{look} role="img" aria-label="{verdict}" title="{verdict}">{symbol}</span>'


def _claims(classroom: Classroom) -> str:
    tables = []
    differing: list[str] = []
    for lesson, title in classroom.lessons.items():
        members = classroom.with_lesson(lesson)
        judged = [
            claim
            for claim in of_lesson(lesson)
            if any(claim.id in r.judgements for _, r in members)
        ]
        if judged:
            tables.append(_lesson_claims(f"{lesson} {title}", judged, members))
            differing += filter(None, (_difference(claim, members) for claim in judged))
    if not tables:
        return "<p>No claim was judged.</p>"
    key = "".join(f"<li>{_badge(verdict)} {verdict}</li>" for verdict in Verdict)
    listed = "".join(f"<li>{text}</li>" for text in differing)
    agree = "<p>Wherever two machines judged the same claim, they agree.</p>"
    return (
        "<p>A value is judged here by the claim’s own rule, whatever verdict came with it.</p>"
        f'<ul class="key">{key}</ul>'
        + (f"<h3>Where verdicts differ</h3><ul>{listed}</ul>" if differing else agree)
        + "".join(tables)
    )


def _tally(claim: Claim, members: Members) -> Counter[Verdict]:
    judged = (record.judgements.get(claim.id) for _, record in members)
    return Counter(judgement.verdict for judgement in judged if judgement)


def _difference(claim: Claim, members: Members) -> str:
    """A line on a claim that came out in several ways; empty if it did not."""
    tally = _tally(claim, members)
    if len([verdict for verdict in tally if verdict != Verdict.NOT_TESTABLE]) < 2:
        return ""
    return f"{claim.lesson} {html.escape(claim.says)} {_tally_text(tally)}"


def _tally_text(tally: Counter[Verdict]) -> str:
    return ", ".join(
        f"{_badge(verdict)} {tally[verdict]} {verdict}" for verdict in Verdict if tally[verdict]
    )


def _lesson_claims(title: str, judged: Sequence[Claim], members: Members) -> str:
    rows = [
        [
            f"{html.escape(claim.says)}<small>{html.escape(claim.claimed)}. "
            f"{html.escape(claim.rule)}</small>",
            _tally_text(_tally(claim, members)),
            *(_judgement(record.judgements.get(claim.id)) for _, record in members),
        ]
        for claim in judged
    ]
    headings = ["Claim", "Together", *(_name(person) for person, _ in members)]
    caption = f"Claims of lesson {title}: verdict and value of each participant."
    return f"<h3>{html.escape(title)}</h3>{_table(headings, rows, caption)}"


def _judgement(judgement: Judgement | None) -> str:
    if judgement is None:
        return MISSING
    values = list(_values(judgement))
    more = len(values) - MOST_SHOWN
    shown = [*values[:MOST_SHOWN], f"and {more} more"] if more > 0 else values
    if isinstance(judgement.measured, dict):  # of several conditions, whose own symbols follow
        shown = [str(judgement.verdict), *shown]
    where = f"<small>{html.escape(judgement.mode)}</small>" if judgement.mode else ""
    return f"{_badge(judgement.verdict)} {'<br>'.join(shown)}{where}"


def _values(judgement: Judgement) -> Iterator[str]:
    unit, measured = judgement.claim.unit, judgement.measured
    if not isinstance(measured, dict):
        yield html.escape(clean(format_value(measured, unit), 60))
        return
    for name, value in measured.items():
        found = html.escape(clean(format_value(value, unit), 60))
        yield f"{_symbol(judgement.by_condition[name])} {html.escape(name)}: {found}"


# --- peaks -------------------------------------------------------------------------------------


def _peaks(classroom: Classroom) -> str:
    tables = []
    for lesson, title in classroom.lessons.items():
        members = classroom.with_lesson(lesson)
        common = _common(members)
        settings = dict.fromkeys(peak.setting for _, peak in common)
        heading = f"{lesson} {title}"
        parts = [
            _lesson_peaks(heading, setting, [key for key, p in common if p.setting == setting],
                          members)
            for setting in settings
        ]  # fmt: skip
        if parts:
            tables.append(f"<h3>{html.escape(heading)}</h3>{''.join(parts)}")
    return "".join(tables) or (
        "<p>No two participants sent the same run: the same lesson, name and parameters.</p>"
    )


def _common(members: Members) -> list[tuple[str, Peak]]:
    """Runs that two or more have, in the order of the lesson, the most shared if there are many.

    Not only those that all have: one file without any would hide everybody's.
    """
    shared = Counter(key for _, record in members for key in record.peaks)
    kept = {key for key, count in shared.most_common(MOST_ROWS) if count > 1}
    first: dict[str, Peak] = {}
    for _, record in members:
        for key, peak in record.peaks.items():
            if key in kept:
                first.setdefault(key, peak)
    return list(first.items())


def _lesson_peaks(heading: str, setting: str, keys: Sequence[str], members: Members) -> str:
    having = [(p, record) for p, record in members if any(key in record.peaks for key in keys)]
    rows = []
    for key in keys:
        peaks = [record.peaks.get(key) for _, record in having]
        rows.append([_run(next(filter(None, peaks))), _spread(peaks), *map(_peak, peaks)])
    headings = ["Run", "Apart", *(_name(person) for person, _ in having)]
    caption = f"Peak memory of runs of lesson {heading}" + (
        f", with {setting}." if setting else "."
    )
    return _table(headings, rows, caption)


def _run(peak: Peak) -> str:
    parameters = f"<small>{html.escape(peak.parameters)}</small>" if peak.parameters else ""
    return f"{html.escape(peak.name)}{parameters}"


def _spread(peaks: Sequence[Peak | None]) -> str:
    """By how much the largest is above the smallest, of those that went through."""
    sizes = [peak.total_bytes for peak in peaks if peak and not peak.out_of_memory]
    if len(sizes) < 2 or not min(sizes):
        return MISSING
    share = max(sizes) / min(sizes) - 1
    return "equal" if not share else clean(format_value(share, "share"), 20)


def _peak(peak: Peak | None) -> str:
    if peak is None:
        return MISSING
    size = format_bytes(peak.total_bytes)
    text = f"out of memory at {size}" if peak.out_of_memory else size
    return f"{text}<small>{html.escape(peak.label)}</small>"


# --- left out ----------------------------------------------------------------------------------


def _left_out(classroom: Classroom) -> str:
    rows = [
        [f"<bdi>{html.escape(note.file)}</bdi>", name, _sentence(note.reason, note.detail)]
        for name, notes in [
            *((_name(person), person.left_out) for person in classroom.participants),
            (MISSING, classroom.left_out),
        ]
        for note in notes
    ]
    if not rows:
        return "<p>Nothing: every file was read.</p>"
    caption = "What was not taken, and why. labkit’s own logs and reports are not listed."
    return _table(["File", "Participant", "Why"], rows, caption)


def _sentence(reason: str, detail: str) -> str:
    text = f"{reason}: {detail}" if detail else reason
    return html.escape(f"{text[:1].upper()}{text[1:]}".rstrip(".") + ".")
