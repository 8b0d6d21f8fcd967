"""The cheat sheet as tables: in a notebook as HTML, elsewhere as Markdown."""

from collections import Counter
from dataclasses import dataclass

from markupsafe import Markup

from gpumem.figures import html_pages
from gpumem.units import format_bytes
from labkit.cheat_sheet.figures import CommonJob, Figures, Move, Sheet, TechniqueRow
from labkit.cheat_sheet.findings import Trial
from labkit.lesson.claims import Verdict, all_claims, article_names

NOTHING, OPEN = "–", "open"


@dataclass(frozen=True, repr=False)
class Table:
    """A table of texts, with a note on where its figures come from. A notebook shows it as HTML."""

    heading: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        return f"## {self.heading}\n\n{self.markdown()}"

    def markdown(self) -> str:
        """Return the note and the table as Markdown, without the heading."""
        lines = [self.note, ""]
        for line in (self.columns, ["---"] * len(self.columns), *self.rows):
            cells = [cell.replace("|", "\\|") for cell in line]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        note = Markup("<p>{}</p>").format(self.note)
        return note + html_pages.table(self.heading, self.columns, self.rows)


def sections(sheet: Sheet) -> tuple[Table, ...]:
    """Return everything that the sheet says, in order."""
    return techniques(sheet), order(sheet), verdicts(sheet.trial)


# --- techniques -----------------------------------------------------------------------------------


def techniques(sheet: Sheet) -> Table:
    """Return a row for each technique: figures alone, effort, when not to."""
    columns = ("technique", "peak", "change", "what falls most", "bound on a step", "to write")
    columns += ("when not to",)
    rows = tuple(
        (*_figures(each), each.technique.effort, each.technique.not_when) for each in sheet.rows
    )
    note = f"{_job(sheet.job, sheet.plain)} Simulated with {sheet.versions}."
    return Table("Techniques, each alone", note, columns, rows)


def _job(job: CommonJob, plain: Figures) -> str:
    fits = "fits" if plain.fits else "does not fit"
    return (
        f"Peaks and bounds are simulated for {job.simulated_gpu.name}, on one job: {job.model}, "
        f"{job.recipe}. Without any of them it takes {format_bytes(plain.run.peak_bytes)}, which "
        f"{fits} that GPU, and at least {_seconds(plain.seconds)} a step. A bound is the least "
        "time that the GPU's arithmetic, memory and links allow; it is not a measured time."
    )


def _figures(row: TechniqueRow) -> tuple[str, ...]:
    name = f"{row.technique.lesson} {row.technique.name}"
    if row.after is None:
        return name, NOTHING, NOTHING, row.refused or "no recipe", NOTHING
    part = "nothing"
    if row.part:
        category, fallen_bytes = row.part
        part = f"{category} −{format_bytes(fallen_bytes)}"
    before_bytes, after_bytes = row.before.run.peak_bytes, row.after.run.peak_bytes
    slower = percent(row.after.seconds / row.before.seconds - 1)
    bound = f"{_seconds(row.after.seconds)} ({slower})"
    return name, format_bytes(after_bytes), percent(after_bytes / before_bytes - 1), part, bound


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


def percent(share: float) -> str:
    """Write a signed fraction as ``"+12 %"``."""
    digits = 0 if abs(share) >= 0.0995 else 1
    text = f"{100 * abs(share):.{digits}f}"
    sign = "+" if share > 0 else "−"
    return f"{sign if float(text) else ''}{text} %"


# --- the order of adoption ------------------------------------------------------------------------


def order(sheet: Sheet) -> Table:
    """Return the order of adoption."""
    columns = ("move", "peak after it", "saved", "bound on a step", "saved per added second")
    columns += ("fits the GPU", "training")
    plain = sheet.plain
    peak, seconds = format_bytes(plain.run.peak_bytes), _seconds(plain.seconds)
    first = ("plain", peak, NOTHING, seconds, NOTHING, _yes(plain.fits), "the same")
    rows = [_move(number, move) for number, move in enumerate(sheet.order, 1)]
    note = (
        "From the plain job on, always the move that saves most bytes of the peak per second that "
        "it adds to the bound; first what trains the same, then what changes the training, "
        f"until nothing that these allow saves. Simulated for {sheet.job.simulated_gpu.name}, "
        f"{sheet.job.model}, {sheet.job.recipe}. Stop at the first that fits with room to spare."
    )
    return Table("Order of adoption", note, columns, (first, *rows))


def _move(number: int, move: Move) -> tuple[str, ...]:
    worth = "free"
    if not move.is_free:
        worth = f"{format_bytes(round(move.saved_bytes / move.added_seconds))} per s"
    share = percent(move.added_seconds / move.before.seconds)
    return (
        f"{number}. {move.name}",
        format_bytes(move.after.run.peak_bytes),
        format_bytes(move.saved_bytes),
        f"{_seconds(move.after.seconds)} ({share})",
        worth,
        _yes(move.after.fits),
        "changed" if move.changed else "the same",
    )


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"


# --- claims ---------------------------------------------------------------------------------------


def verdicts(trial: Trial) -> Table:
    """Return how many claims of each article came out how."""
    names = [f"{letter} {name}" for letter, name in article_names().items()]
    counted = dict(zip(names, trial.by_article().values(), strict=True))
    counted["all, each once"] = Counter(trial.verdict(id) for id in all_claims())
    rows = tuple((name, *(str(counts[v]) for v in Verdict)) for name, counts in counted.items())
    columns = ("claims of", *(OPEN if v is Verdict.NOT_TESTABLE else str(v) for v in Verdict))
    note = (
        "A claim has one verdict over all records: where these disagree, it depends. Open is what "
        "no record could judge. A phantom GPU is PyTorch's CUDA build without the GPU: bytes are "
        "judged there, seconds are not. Judged on: " + ("; ".join(trial.machines) or "nothing yet")
    )
    return Table("Claims on trial", f"{note}.", columns, rows)
