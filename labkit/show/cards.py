"""Cards: short framed messages for a verdict, a machine, an exercise, or a plain remark.

Each function shows its card and returns it. In a notebook that is HTML with the same in plain
text beside it; without one the plain text is printed. A card brings its own background, so that
it reads the same on a light and on a dark page, and says in words and a symbol what its colour
says. All styles are inline, because notebook viewers drop style sheets.

Limits: cards are still. They are up to 760 pixels wide, and nothing in them can be clicked.
"""

import html
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from labkit.claim_rules import Verdict, format_value
from labkit.memory import format_bytes, one_of

NO_RECORD = "No GPU has recorded this claim yet."
PAPER, INK, SOFT, LINE = "#ffffff", "#1b2430", "#4a5663", "#d5dbe1"


class Look(NamedTuple):
    """A symbol and the colour of badge and edge; white on it is readable (contrast over 4.5)."""

    symbol: str
    colour: str


GOOD, WARM, COOL = Look("✔", "#00694b"), Look("!", "#8a5300"), Look("i", "#1f5a96")
BAD, QUIET = Look("✘", "#a3200d"), Look("○", "#4f5b67")
VERDICTS: dict[str, Look] = {
    Verdict.SUPPORTED: GOOD,
    Verdict.OVERSTATED: Look("▼", WARM.colour),
    Verdict.UNDERSTATED: Look("▲", COOL.colour),
    Verdict.WRONG: BAD,
    Verdict.DEPENDS: Look("◆", "#6a3d9a"),
    Verdict.NOT_TESTABLE: QUIET,
}
OUTCOMES: dict[str, Look] = {
    "correct": GOOD,
    "not yet": Look("↻", WARM.colour),
    "not attempted": QUIET,
}
TONES: dict[str, Look] = {
    "note": COOL,
    "good": GOOD,
    "warning": WARM,
    "error": BAD,
    "hint": Look("?", "#6a3d9a"),
}


@dataclass(frozen=True)
class Card:
    """What was shown, as HTML and as plain text."""

    html: str
    text: str

    def show(self) -> "Card":
        """Show it now: in the notebook if there is one, else printed."""
        ipython = sys.modules.get("IPython")  # whoever runs in a notebook has imported it
        if ipython is None or ipython.get_ipython() is None:
            print(self.text)
        else:
            ipython.display.display(
                {"text/html": self.html, "text/plain": self.text}, raw=True, metadata={}
            )
        return self

    def _ipython_display_(self) -> None:
        """Nothing: the function that made the card has shown it."""


# --- the four cards ----------------------------------------------------------------------------


def claim_card(judgement: Any, recorded: Iterable[Any] = ()) -> Card:
    """The verdict on a claim, why, and what GPUs recorded for it.

    Args:
        judgement: a ``claims.Judgement``.
        recorded: mappings or objects with ``gpu`` (its name), ``verdict``, ``measured``,
            ``versions`` and ``date``.
    """
    claim, verdict = judgement.claim, str(judgement.verdict)
    rows = [("Claimed", claim.claimed)]
    symbols = [f"{VERDICTS[each].symbol} " for each in judgement.by_condition.values()]
    for i, reason in enumerate(judgement.reasons):
        rows.append(("" if i else "Found", f"{symbols[i] if symbols else ''}{reason}"))
    if judgement.mode and judgement.measured is not None:
        rows.append(("Where", judgement.mode))
    rows += [("Judged by", claim.measure), ("Rule", claim.rule)]
    if claim.assumptions:
        rows.append(("We assume", claim.assumptions))
    rows.append(("Said by", "; ".join(claim.cited)))
    lines = [_recorded_line(record, claim.unit) for record in recorded]
    rows += [("On GPUs" if i == 0 else "", line) for i, line in enumerate(lines or [NO_RECORD])]
    return _card(VERDICTS[verdict], verdict, claim.says, rows=rows).show()


def machine_card(machine: Any, *, simulated_for: str | None = None, for_a_gpu: str = "") -> Card:
    """This machine, what is measured on it and what is simulated.

    Args:
        machine: a ``hardware.Machine``.
        simulated_for: the GPU that the lesson simulates, where it does.
        for_a_gpu: how to get a GPU here, where one is to be had.
    """
    status = "measured" if machine.can_measure else "simulated"
    if simulated_for and not machine.can_measure:
        status = f"simulated for {simulated_for}"
    memory = []
    if machine.capacity_bytes:
        memory.append(f"{format_bytes(machine.capacity_bytes)} on the device")
    if machine.host_memory_bytes:
        memory.append(f"{format_bytes(machine.host_memory_bytes)} on the host")
    rows = [
        ("Memory", ", ".join(memory) or "not known"),
        ("CPU cores", str(machine.cores)),
        ("bfloat16", "native" if machine.bf16_native else "not native, so slow here"),
        ("Versions", _versions(machine.versions)),
    ]
    if for_a_gpu:
        rows.append(("For a GPU", for_a_gpu))
    look = GOOD if machine.can_measure else COOL
    return _card(look, status, str(machine.name), body=machine.note, rows=rows).show()


def exercise_card(outcome: Any) -> Card:
    """How an exercise went.

    Args:
        outcome: an ``exercises.Outcome``, with ``id``, ``status`` and ``message``.
    """
    status = str(outcome.status)
    return _card(OUTCOMES[status], status, f"Exercise {outcome.id}", body=outcome.message).show()


def message_card(text: str, *, title: str = "", tone: str = "note", code: str = "") -> Card:
    """A remark.

    Args:
        text: what to say; blank lines part paragraphs.
        title: the words in the badge; the tone's own name if empty.
        tone: ``note``, ``good``, ``warning``, ``error`` or ``hint``.
        code: source to show under the text.

    Raises:
        InputError: unknown tone.
    """
    tone = one_of(tone, TONES, "tone")
    return _card(TONES[tone], title or tone, "", body=text, code=code).show()


# --- the parts of a card -----------------------------------------------------------------------

# Jupyter's own styles stripe table rows, right-align cells and tint code; these override them.
_FRAME = (
    f"background:{PAPER};color:{INK};border:1px solid {LINE};border-left:6px solid {{colour}};"
    "border-radius:6px;padding:10px 14px;margin:6px 0;max-width:760px;box-sizing:border-box;"
    "font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:14px;line-height:1.45;"
    "text-align:left"
)
_BADGE = (
    "display:inline-block;background:{colour};color:#ffffff;border-radius:4px;padding:1px 9px;"
    "margin-right:8px;font-weight:600;font-size:13px"
)
_CELL = f"background:{PAPER};color:{{ink}};border:0;padding:2px 12px 2px 0;font-size:13px;" + (
    "text-align:left;vertical-align:top;white-space:normal;font-weight:{weight}"
)
_CODE = (
    f"background:#f3f5f7;color:{INK};border:1px solid {LINE};border-radius:4px;padding:8px 10px;"
    "margin:8px 0 0 0;font-size:12.5px;line-height:1.4;white-space:pre-wrap;overflow-wrap:anywhere;"
    "font-family:ui-monospace,Menlo,Consolas,monospace"
)


def _card(
    look: Look,
    badge: str,
    title: str,
    *,
    body: str = "",
    rows: Sequence[tuple[str, str]] = (),
    code: str = "",
) -> Card:
    return Card(
        _card_html(look, badge, title, body, rows, code),
        _card_text(look, badge, title, body, rows, code),
    )


def _card_html(
    look: Look, badge: str, title: str, body: str, rows: Sequence[tuple[str, str]], code: str
) -> str:
    parts = [
        f'<span style="{_BADGE.format(colour=look.colour)}">'
        f'<span aria-hidden="true">{look.symbol}</span> {html.escape(badge)}</span>'
    ]
    if title:
        parts.append(f'<strong style="color:{INK}">{html.escape(title)}</strong>')
    for paragraph in filter(None, body.split("\n\n")):
        text = _words_html(paragraph.strip()).replace("\n", "<br>")
        parts.append(f'<div style="margin-top:6px;color:{INK}">{text}</div>')
    if rows:
        cells = "".join(_row_html(*row) for row in rows)
        style = f"margin:6px 0 0 0;border:0;border-collapse:collapse;background:{PAPER}"
        parts.append(f'<table role="presentation" style="{style}"><tbody>{cells}</tbody></table>')
    if code:
        parts.append(f'<pre style="{_CODE}">{html.escape(code)}</pre>')
    return f'<div style="{_FRAME.format(colour=look.colour)}">{"".join(parts)}</div>'


def _row_html(name: str, value: str) -> str:
    left = _CELL.format(ink=SOFT, weight=600) + ";width:96px"
    right = _CELL.format(ink=INK, weight=400)
    return (
        f'<tr style="background:{PAPER}"><td style="{left}">{html.escape(name)}</td>'
        f'<td style="{right}">{_words_html(value)}</td></tr>'
    )


def _words_html(text: str) -> str:
    """Text, escaped; what stands between backticks looks like code."""
    style = f"background:#f3f5f7;color:{INK};border-radius:3px;padding:0 3px"
    return re.sub(r"`([^`]+)`", rf'<code style="{style}">\1</code>', html.escape(text))


def _card_text(
    look: Look, badge: str, title: str, body: str, rows: Sequence[tuple[str, str]], code: str
) -> str:
    lines = [f"[{look.symbol} {badge}] {title}".rstrip()]
    for paragraph in body.splitlines():
        lines += textwrap.wrap(paragraph, 96, initial_indent="  ", subsequent_indent="  ") or [""]
    width = max((len(name) for name, _ in rows), default=0) + 2
    for name, value in rows:
        first = f"  {name:<{width}}"
        lines += textwrap.wrap(
            value, 98, initial_indent=first, subsequent_indent=" " * len(first)
        ) or [first.rstrip()]
    if code:
        lines.append(textwrap.indent(code, "    "))
    return "\n".join(lines)


def _value(measured: Any, unit: str) -> str:
    if isinstance(measured, Mapping):
        return ", ".join(f"{name}: {_value(value, unit)}" for name, value in measured.items())
    if isinstance(measured, str):  # recorded data is not trusted to be a number
        return measured
    try:
        return format_value(measured, unit)
    except (TypeError, ValueError, OverflowError):
        return str(measured)


def _recorded_line(record: Any, unit: str) -> str:
    if not isinstance(record, Mapping):
        names = ("gpu", "verdict", "measured", "versions", "date")
        record = {name: getattr(record, name, None) for name in names}
    verdict = str(record.get("verdict"))
    symbol = VERDICTS[verdict].symbol if verdict in VERDICTS else "?"
    line = f"{record.get('gpu')}: {symbol} {verdict}, {_value(record.get('measured'), unit)}"
    versions = record.get("versions")
    notes = [_versions(versions, only=("torch", "cuda", "driver"))] if versions else []
    if record.get("date"):
        notes.append(str(record["date"])[:10])
    return f"{line} ({'; '.join(filter(None, notes))})" if any(notes) else line


def _versions(versions: Any, only: Sequence[str] = ()) -> str:
    if not isinstance(versions, Mapping):
        return str(versions)
    return ", ".join(
        f"{name} {version}"
        for name, version in versions.items()
        if version and (not only or name in only)
    )
