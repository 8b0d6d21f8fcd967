"""What a class found, side by side: verdicts of each claim, and peaks of runs that several have.

Two participants' runs are the same if lesson, name and parameters are.

Limits: as ``labkit.classroom.page``, whose sections these are.
"""

import html
from collections import Counter
from collections.abc import Iterator, Sequence

from labkit.claims import Claim, Judgement, Verdict, format_value, of_lesson
from labkit.classroom import Classroom, Participant
from labkit.classroom.files import clean
from labkit.classroom.html import badge, columns, symbol, table
from labkit.classroom.records import Peak, Record
from labkit.memory import format_bytes
from labkit.show.rich import MISSING

MOST_ROWS = 60
"""Runs of one lesson that are set side by side."""
MOST_SHOWN = 8
"""Conditions of one judgement."""
Members = Sequence[tuple[Participant, Record]]


def claims_section(classroom: Classroom) -> str:
    """A table of verdicts for each lesson, after the claims that came out in several ways."""
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
    key = "".join(f"<li>{badge(verdict)} {verdict}</li>" for verdict in Verdict)
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
        f"{badge(verdict)} {tally[verdict]} {verdict}" for verdict in Verdict if tally[verdict]
    )


def _lesson_claims(title: str, judged: Sequence[Claim], members: Members) -> str:
    found = []
    for claim in judged:
        says = (
            f"{html.escape(claim.says)}<small>{html.escape(claim.claimed)}. "
            f"{html.escape(claim.rule)}</small>"
        )
        cells = [_judgement(record.judgements.get(claim.id)) for _, record in members]
        found.append(([says, _tally_text(_tally(claim, members))], cells))
    people, rows = columns([person for person, _ in members], found)
    headings = ["Claim", "Together", *people]
    caption = f"Claims of lesson {title}: verdict and value of each participant."
    return f"<h3>{html.escape(title)}</h3>{table(headings, rows, caption)}"


def _judgement(judgement: Judgement | None) -> str:
    if judgement is None:
        return MISSING
    values = list(_values(judgement))
    more = len(values) - MOST_SHOWN
    shown = [*values[:MOST_SHOWN], f"and {more} more"] if more > 0 else values
    if isinstance(judgement.measured, dict):  # of several conditions, whose own symbols follow
        shown = [str(judgement.verdict), *shown]
    where = f"<small>{html.escape(judgement.mode)}</small>" if judgement.mode else ""
    return f"{badge(judgement.verdict)} {'<br>'.join(shown)}{where}"


def _values(judgement: Judgement) -> Iterator[str]:
    unit, measured = judgement.claim.unit, judgement.measured
    if not isinstance(measured, dict):
        yield html.escape(clean(format_value(measured, unit), 60))
        return
    for name, value in measured.items():
        found = html.escape(clean(format_value(value, unit), 60))
        yield f"{symbol(judgement.by_condition[name])} {html.escape(name)}: {found}"


# --- peaks -------------------------------------------------------------------------------------


def peaks_section(classroom: Classroom) -> str:
    """For each lesson a table of the runs that two or more participants have."""
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
    found = []
    for key in keys:
        peaks = [record.peaks.get(key) for _, record in having]
        found.append(([_run(next(filter(None, peaks))), _spread(peaks)], [*map(_peak, peaks)]))
    people, rows = columns([person for person, _ in having], found)
    headings = ["Run", "Apart", *people]
    caption = f"Peak memory of runs of lesson {heading}" + (
        f", with {setting}." if setting else "."
    )
    return table(headings, rows, caption)


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
