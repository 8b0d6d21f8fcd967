"""A class's findings as one page of HTML: who sent what, machines, verdicts, peaks, what was left
out.

The page is complete in itself: no script, nothing fetched, and a policy that forbids browsers both.
Every text of a participant is escaped, besides having been cleaned and shortened when it was read.
A verdict is said by a colour, a symbol and, to readers of either, by its words.

Limits: one column per participant where they differ, so a class of a hundred scrolls sideways.
"""

import base64
import hashlib
import html
from pathlib import Path

from labkit.claims import Verdict
from labkit.classroom import Classroom
from labkit.classroom.compared import claims_section, peaks_section
from labkit.classroom.html import lines, named, table
from labkit.classroom.records import VERSIONS, Computer
from labkit.memory import format_bytes
from labkit.results import write_atomic
from labkit.show.cards import VERDICTS
from labkit.show.rich import MISSING

TITLE = "GPU Memory Lab: the class"

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
        _section("Claims on trial", claims_section(classroom)),
        _section("Peaks side by side", peaks_section(classroom)),
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


def _senders(classroom: Classroom) -> str:
    rows = []
    for person in classroom.participants:
        dates = sorted(f"{record.date:%Y-%m-%d}" for record in person.records)
        rows.append(
            [
                named(person),
                lines([", ".join(record.lesson for record in person.records)]) or MISSING,
                lines(person.unfinished),
                lines([" to ".join(dict.fromkeys(dates[:1] + dates[-1:]))] if dates else []),
                str(len(person.left_out)) if person.left_out else MISSING,
            ]
        )
    headings = ("Participant", "Lessons with a result", "Not passed", "Dates", "Remarks")
    return table(headings, rows, "Results by participant; remarks stand at the end.")


def _machines(classroom: Classroom) -> str:
    owners: dict[Computer, list[str]] = {}
    for person in classroom.participants:
        for machine in person.machines:
            owners.setdefault(machine, []).append(named(person))
    if not owners:
        return "<p>No result says on which machine it was made.</p>"
    rows = [[", ".join(names), *_machine(machine)] for machine, names in owners.items()]
    headings = ("Participants", "Machine", "Kind", "GPU memory", "Host memory", "Cores",
                *VERSIONS)  # fmt: skip
    return table(headings, rows, "Machines and versions, as the results name them.")


def _machine(machine: Computer) -> list[str]:
    sizes = [
        MISSING if size is None else format_bytes(size)
        for size in (machine.capacity_bytes, machine.host_memory_bytes)
    ]
    cores = MISSING if machine.cores is None else str(machine.cores)
    texts = [machine.name, machine.kind, *sizes, cores, *(v or MISSING for v in machine.versions)]
    return [html.escape(text) for text in texts]


# --- left out ----------------------------------------------------------------------------------


def _left_out(classroom: Classroom) -> str:
    rows = [
        [f"<bdi>{html.escape(note.file)}</bdi>", name, _sentence(note.reason, note.detail)]
        for name, notes in [
            *((named(person), person.left_out) for person in classroom.participants),
            (MISSING, classroom.left_out),
        ]
        for note in notes
    ]
    if not rows:
        return "<p>Nothing: every file was read.</p>"
    caption = "What was not taken, and why. Logs, and reports beside results, are not listed."
    return table(["File", "Participant", "Why"], rows, caption)


def _sentence(reason: str, detail: str) -> str:
    text = f"{reason}: {detail}" if detail else reason
    return html.escape(f"{text[:1].upper()}{text[1:]}".rstrip(".") + ".")
