"""The cheat sheet as one printable page of HTML, as PDF, and as the table in the README.

All three are written from the same texts (`sections`), so they cannot differ. The page is complete
in itself: no script, no style sheet or font from elsewhere; every text is escaped. The PDF is set
in the DejaVu font that matplotlib carries.

Limits: A4 in landscape. What neither font nor page has room for wraps; nothing is cut off.
"""

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit import recorded_table
from labkit.cheat_sheet import NOT_RECORDED, Sheet
from labkit.claim_rules import Verdict, all_claims
from labkit.memory import InputError, format_bytes
from labkit.readable import READABLE_STYLE, scrolling
from labkit.results import write_atomic
from labkit.sheet_figures import CommonJob, Figures, Row, row
from labkit.sheet_findings import Finding
from labkit.sheet_order import Move
from labkit.sheet_questions import faq, percent
from labkit.sheet_techniques import TECHNIQUES

MARKERS = ("<!-- cheat sheet: begin -->", "<!-- cheat sheet: end -->")
TITLE = "GPU Memory Lab: cheat sheet"
NOTHING = "–"


@dataclass(frozen=True, repr=False)
class Section:
    """A table: heading, a note on where its figures come from, columns with their relative widths,
    rows of plain texts as many as columns. A notebook shows it as HTML."""

    heading: str
    note: str
    columns: tuple[tuple[str, int], ...]
    rows: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        lines = [[name for name, _ in self.columns], *self.rows]
        return "\n".join([self.heading, self.note, *(" | ".join(line) for line in lines)])

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.note)}</p>{_html_table(self)}"


def sections(sheet: Sheet) -> tuple[Section, ...]:
    """Everything that page and PDF show, in order."""
    return techniques(sheet), order(sheet), questions(sheet), trial(sheet), gpus(sheet.gpus)


# --- texts ----------------------------------------------------------------------------------------


def techniques(sheet: Sheet) -> Section:
    """One row for each technique: figures alone, what GPUs recorded, verdicts, effort."""
    columns = (("technique", 15), ("peak", 9), ("change", 7), ("what falls most", 14),
               ("bound on a step", 14), ("measured on GPUs", 12), ("verdicts here", 15),
               ("verdicts on GPUs", 13), ("to write", 14), ("when not to", 28))  # fmt: skip
    rows = [
        (f"{each.technique.lesson} {each.technique.name}", *_figures(each), _recorded(each),
         _verdicts(sheet, each, recorded=False), _verdicts(sheet, each, recorded=True),
         each.technique.effort, each.technique.not_when)
        for each in sheet.rows
    ]  # fmt: skip
    return Section(
        "Techniques, each alone", f"{_job(sheet.job, sheet.plain)} {_BOUND}", columns, tuple(rows)
    )


def alone(job: CommonJob) -> Section:
    """The same table of another job, its simulated columns only.

    Raises:
        InputError: the job cannot be simulated.
    """
    rows = [row(technique, job) for technique in TECHNIQUES if technique.change]
    columns = (("technique", 24), ("peak", 10), ("change", 10), ("what falls most", 40),
               ("bound on a step", 20))  # fmt: skip
    lines = tuple((f"{r.technique.lesson} {r.technique.name}", *_figures(r)) for r in rows)
    return Section("Techniques, each alone", f"{_job(job, rows[0].before)} {_BOUND}", columns,
                   lines)  # fmt: skip


_BOUND = (
    "A bound is the least time that the card's arithmetic, memory and link allow; it is no "
    "measured time."
)


def _job(job: CommonJob, plain: Figures) -> str:
    fits = "fits" if plain.fits else "does not fit"
    return (
        f"Peaks and bounds are simulated for {job.card.name}, on one job: {job.model}, "
        f"{job.recipe}. Plain it takes {format_bytes(plain.peak_bytes)}, which {fits} that card, "
        f"and at least {_seconds(plain.seconds)} a step."
    )


def _figures(row: Row) -> tuple[str, str, str, str]:
    if row.after is None:
        return NOTHING, NOTHING, row.refused or "no recipe", NOTHING
    part = f"{row.part[0]} −{format_bytes(row.part[1])}" if row.part else "nothing"
    bound = NOTHING
    if row.slower_share is not None:
        bound = f"{_seconds(row.after.seconds)} ({percent(row.slower_share) or 'same'})"
    return format_bytes(row.after.peak_bytes), percent(-row.saved_share), part, bound


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def _recorded(row: Row) -> str:
    return "; ".join(f"{p.where}, {p.date}: {p.says} ({p.source}; {p.versions})"
                     for p in row.recorded) or NOTHING  # fmt: skip


def _verdicts(sheet: Sheet, row: Row, *, recorded: bool) -> str:
    found = [f for id in row.technique.claims for f in sheet.findings[id] if f.recorded == recorded]
    if not row.technique.claims:
        return "no claim"
    return _counted(Counter(finding.verdict for finding in found)) or NOTHING


def _counted(counts: Counter[Verdict]) -> str:
    short = {Verdict.NOT_TESTABLE: "not testable"}
    return ", ".join(f"{counts[v]} {short.get(v, v)}" for v in Verdict if counts[v])


def order(sheet: Sheet) -> Section:
    """The order of adoption."""
    columns = (("move", 34), ("peak after it", 12), ("saved", 12), ("bound on a step", 18),
               ("saved per added second", 18), ("fits the card", 12), ("training", 16))  # fmt: skip
    rows = [("plain", format_bytes(sheet.plain.peak_bytes), NOTHING, _seconds(sheet.plain.seconds),
             NOTHING, _yes(sheet.plain.fits), "the same")]  # fmt: skip
    rows += [_move(number, move) for number, move in enumerate(sheet.order, 1)]
    note = (
        "From the plain job on, always the move that saves most bytes of the peak per second that "
        "it adds to the bound; first what trains the same, then what changes the training, "
        f"until nothing that these allow saves. {_source(sheet)} Stop at the first that fits with "
        "room to spare."
    )
    return Section("Order of adoption", note, columns, tuple(rows))


def _source(sheet: Sheet) -> str:
    return f"{sheet.source[:1].upper()}{sheet.source[1:]}, {sheet.job.model}, {sheet.job.recipe}."


def _move(number: int, move: Move) -> tuple[str, ...]:
    name = f"{number}. {move.name}"
    if move.instead_of:
        name += f" (instead of {', '.join(t.name for t in move.instead_of)})"
    worth = "free"
    if not move.is_free:
        worth = f"{format_bytes(round(move.saved_bytes / move.added_seconds))} per s"
    share = percent(move.added_seconds / move.before.seconds)
    return (name, format_bytes(move.after.peak_bytes), format_bytes(move.saved_bytes),
            f"{_seconds(move.after.seconds)} ({share})", worth, _yes(move.after.fits),
            "changed" if move.changed else "the same")  # fmt: skip


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"


def questions(sheet: Sheet) -> Section:
    """What the articles are asked."""
    rows = tuple((a.question, a.says, "; ".join(a.sources) or NOTHING) for a in faq(sheet))
    columns = (("question", 22), ("answer", 90), ("from", 28))
    return Section("Questions", "Every answer is computed from the figures named beside it.",
                   columns, rows)  # fmt: skip


def trial(sheet: Sheet) -> Section:
    """Every claim: claimed, found, verdict, on each machine."""
    rows = []
    for id, claim in all_claims().items():
        first = (f"{claim.lesson} {claim.says}", " ".join(claim.sources), claim.claimed)
        rows += [(*first, *_found(finding)) for finding in sheet.findings[id]]
        if not sheet.findings[id]:
            missing = f"nowhere yet: `labkit run {claim.lesson}`"
            rows.append((*first, NOTHING, "not judged", missing))
    columns = (("claim", 40), ("article", 8), ("claimed", 24), ("found", 44), ("verdict", 14),
               ("where", 28))  # fmt: skip
    return Section("Claims on trial", " ".join([*_tallies(sheet), *sheet.missing]), columns,
                   tuple(rows))  # fmt: skip


def _found(finding: Finding) -> tuple[str, str, str]:
    origin = [finding.mode, finding.date, finding.source]
    if finding.recorded:
        origin.insert(1, f"{finding.where}, {finding.versions}")
    return finding.found, str(finding.verdict), "; ".join(filter(None, origin))


def _tallies(sheet: Sheet) -> list[str]:
    lines = []
    for recorded, where in ((False, "On this machine"), (True, "Recorded on GPUs")):
        found = [f for each in sheet.findings.values() for f in each if f.recorded == recorded]
        names = sorted({f"{finding.where}, {finding.versions}" for finding in found})
        if found:
            counts = _counted(sheet.counts(recorded=recorded))
            lines.append(f"{where} ({'; '.join(names)}): {counts}.")
    return lines


def gpus(recorded: Sequence[recorded_table.RecordedGpu]) -> Section:
    """The GPUs that have recorded, by name, versions and date."""
    note = "Read from results/, where labkit record stores what a GPU gives."
    widths = (24, 16, 8, 28, 14, 50)
    columns = tuple(zip(recorded_table.COLUMNS, widths, strict=True))
    rows = tuple(gpu.cells for gpu in recorded)
    return Section("GPUs recorded", note if rows else recorded_table.NOBODY, columns, rows)


# --- HTML -----------------------------------------------------------------------------------------

_STYLE = """
@page { size: A4 landscape; margin: 10mm; }
:root { color-scheme: light; }
body { font: 13px/1.35 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto;
  max-width: 1400px; padding: .8rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 1.1rem 0 .2rem; break-after: avoid; }
p { margin: .2rem 0 .5rem; max-width: 120ch; }
table { border-collapse: collapse; table-layout: fixed; width: 100%; }
th, td { border-bottom: 1px solid #bbb; padding: .18rem .4rem .18rem 0; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; font-weight: normal; }
thead th, tbody th { font-weight: 600; }
thead { display: table-header-group; }
tr { break-inside: avoid; }
@media print { body { font-size: 6.8pt; line-height: 1.25; max-width: none; padding: 0; }
  p { max-width: none; } th, td { padding: .1rem .3rem .1rem 0; } }
"""


def page(sheet: Sheet) -> str:
    """The cheat sheet as a page of HTML."""
    body = "".join(_html_section(section) for section in sections(sheet))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{TITLE}</title><style>{_STYLE}{READABLE_STYLE}</style></head>"
        f"<body><main><h1>{TITLE}</h1><p>{html.escape(_made(sheet))}</p>"
        f"{body}</main></body></html>\n"
    )


def _made(sheet: Sheet) -> str:
    return f"Made {sheet.date[:10]} by labkit cheat-sheet; {sheet.versions}."


def _html_section(section: Section) -> str:
    heading, note = html.escape(section.heading), html.escape(section.note)
    return f"<h2>{heading}</h2><p>{note}</p>{_html_table(section)}"


#: Inline, because notebook viewers drop style sheets.
_CELL = "text-align:left;vertical-align:top;white-space:normal;overflow-wrap:anywhere"


def _html_table(section: Section) -> str:
    if not section.rows:
        return ""  # its note says why
    total = sum(width for _, width in section.columns)
    widths = "".join(f'<col style="width:{100 * w / total:.1f}%">' for _, w in section.columns)

    def cell(tag: str, text: str, scope: str = "") -> str:
        return f'<{tag}{scope} style="{_CELL}">{html.escape(text)}</{tag}>'

    head = "".join(cell("th", name, ' scope="col"') for name, _ in section.columns)
    body = "".join(
        "<tr>"
        + cell("th", row[0], ' scope="row"')
        + "".join(cell("td", text) for text in row[1:])
        + "</tr>"
        for row in section.rows
    )
    return scrolling(
        f'<table style="table-layout:fixed;width:100%;min-width:760px"><colgroup>{widths}'
        f"</colgroup><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
        section.heading,
    )


def write_page(sheet: Sheet, path: Path) -> Path:
    """Write the page to ``path``, atomically.

    Raises:
        OSError: it cannot be written.
    """
    write_atomic(path, page(sheet))
    return path


# --- PDF ------------------------------------------------------------------------------------------


def write_pdf(sheet: Sheet, path: Path) -> Path:
    """Write the sheet as PDF to ``path``.

    Raises:
        InputError: fpdf2 or matplotlib is not installed.
        OSError: it cannot be written.
    """
    try:
        import matplotlib
        from fpdf import FPDF
    except ImportError as error:
        raise InputError(
            f"a PDF needs {error.name}, which is not installed: pip install fpdf2 matplotlib"
        ) from error
    fonts = Path(matplotlib.get_data_path(), "fonts", "ttf")
    pdf = FPDF(orientation="landscape", format="A4")
    pdf.set_title(TITLE)
    pdf.set_margins(10, 10)
    pdf.set_auto_page_break(True, margin=10)
    pdf.add_font("DejaVu", fname=fonts / "DejaVuSans.ttf")
    pdf.add_font("DejaVu", "B", fname=fonts / "DejaVuSans-Bold.ttf")
    pdf.add_page()
    _paragraph(pdf, TITLE, 14, bold=True)
    _paragraph(pdf, _made(sheet), 7)
    for section in sections(sheet):
        _pdf_section(pdf, section)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(pdf.output()))
    return path


def _paragraph(pdf, text: str, size: float, *, bold: bool = False) -> None:
    pdf.set_font("DejaVu", "B" if bold else "", size)
    pdf.multi_cell(0, size * 0.5, text, align="L", new_x="LMARGIN", new_y="NEXT")


def _pdf_section(pdf, section: Section) -> None:
    from fpdf.enums import TableBordersLayout
    from fpdf.fonts import FontFace

    pdf.ln(2)
    if pdf.will_page_break(30):  # a heading with nothing below it helps nobody
        pdf.add_page()
    _paragraph(pdf, section.heading, 10, bold=True)
    _paragraph(pdf, section.note, 6.5)
    if not section.rows:
        return
    pdf.set_font("DejaVu", "", 6)
    pdf.set_draw_color(190)
    pdf.set_line_width(0.15)
    with pdf.table(
        col_widths=tuple(width for _, width in section.columns),
        borders_layout=TableBordersLayout.HORIZONTAL_LINES,
        headings_style=FontFace(emphasis="BOLD"),
        gutter_width=1.5,
        line_height=2.7,
        padding=0.4,
        text_align="LEFT",
        v_align="TOP",
    ) as table:
        table.row([name for name, _ in section.columns])
        for row in section.rows:
            table.row(row)


# --- Markdown -------------------------------------------------------------------------------------


def markdown(sheet: Sheet) -> str:
    """The tables of techniques and of the order, between two markers, as the README holds them.

    What this machine found is left out: the README is not this machine's.
    """
    table, moves = techniques(sheet), order(sheet)
    kept = [0, 1, 2, 3, 4, 8, 9]
    if any(row.recorded for row in sheet.rows):
        kept.insert(5, 5)
    if sheet.counts(recorded=True):
        kept.insert(-2, 7)
    lines = [MARKERS[0], f"{table.note} Simulated with {sheet.versions}.", "", *_table(table, kept),
             "", moves.note, ""]  # fmt: skip
    lines += _table(moves, list(range(len(moves.columns))))
    if not any(row.recorded for row in sheet.rows) or not sheet.counts(recorded=True):
        lines += ["", f"What no GPU has recorded yet is left out: {NOT_RECORDED}."]
    return "\n".join([*lines, MARKERS[1]])


def _table(section: Section, kept: Sequence[int]) -> list[str]:
    rows = [[name for name, _ in section.columns], *section.rows]
    head, *body = [[row[place].replace("|", "\\|") for place in kept] for row in rows]
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(kept), *body]]
