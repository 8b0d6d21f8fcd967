"""The articles' claims on trial: what GPUs recorded of each, and the one verdict over all records.

A notebook shows the tables as HTML, others as Markdown.

Limits: "not testable here" is no judgement. What a record says is believed.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from gpumem.figures import html_pages
from gpumem.figures.html_pages import MISSING, Rich
from labkit.lesson.claims import Verdict, all_claims, article_names, format_found
from labkit.lesson.results import JudgementRecord, Result, all_recorded

OPEN = "open"


@dataclass(frozen=True)
class RecordedVerdict:
    """One judgement on a GPU that recorded, a phantom or not.

    ``agrees`` and ``differs`` are what was found under the conditions that support the claim, and
    under the others.
    """

    verdict: Verdict
    found: str
    machine: str
    phantom: bool = False
    agrees: str = ""
    differs: str = ""


@dataclass(frozen=True)
class Trial:
    """The judgements by claim; none where nobody could judge."""

    findings: Mapping[str, tuple[RecordedVerdict, ...]]

    def verdict(self, id: str) -> Verdict:
        """Return the claim's one verdict over all records: *depends* where these disagree."""
        found = {finding.verdict for finding in self.findings[id]}
        if len(found) > 1:
            return Verdict.DEPENDS
        return found.pop() if found else Verdict.NOT_TESTABLE

    def by_article(self) -> dict[str, Counter[Verdict]]:
        """Count the verdicts on each article's claims; a claim of two articles counts in both."""
        counted: dict[str, Counter[Verdict]] = {}
        for id, claim in all_claims().items():
            for letter in claim.sources:
                counted.setdefault(letter, Counter())[self.verdict(id)] += 1
        return dict(sorted(counted.items()))

    @property
    def machines(self) -> list[str]:
        """The machines that judged, phantoms last."""
        every = {(f.phantom, f.machine) for found in self.findings.values() for f in found}
        return [machine for _, machine in sorted(every)]


def gather() -> Trial:
    """Return every judgement that GPUs recorded; "not testable here" is none."""
    found: dict[str, list[RecordedVerdict]] = {id: [] for id in all_claims()}
    for recorded in all_recorded().values():
        for result in recorded:
            for entry in result.judgements:
                if entry["id"] in found and entry["verdict"] != Verdict.NOT_TESTABLE:
                    found[entry["id"]].append(_recorded_verdict(result, entry))
    return Trial({id: tuple(judgements) for id, judgements in found.items()})


def _recorded_verdict(result: Result, entry: JudgementRecord) -> RecordedVerdict:
    measured, unit = entry.get("measured"), all_claims()[entry["id"]].unit
    agrees, differs = {}, {}
    for name, verdict in entry.get("by_condition", {}).items():
        if verdict != Verdict.NOT_TESTABLE and isinstance(measured, Mapping):
            kept = agrees if verdict == Verdict.SUPPORTED else differs
            kept[name] = measured.get(name)
    found, *texts = (format_found(each, unit) for each in (measured, agrees, differs))
    return RecordedVerdict(entry["verdict"], found, result.where, result.phantom, *texts)


# --- tables ---------------------------------------------------------------------------------------


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


def verdict_table(trial: Trial) -> Table:
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


def claim_lists(trial: Trial) -> Rich:
    """Return every claim, in a list for each verdict that a click opens."""
    columns, lists, texts = ("lesson", "article", "claim", "found in the first record"), [], []
    claims = all_claims()
    for verdict in Verdict:
        rows = []
        for id in [id for id in claims if trial.verdict(id) == verdict]:
            found = [each.found for each in trial.findings[id]] or [MISSING]
            rows.append(
                (claims[id].lesson, ", ".join(claims[id].sources), claims[id].says, found[0])
            )
        name = OPEN if verdict is Verdict.NOT_TESTABLE else str(verdict)
        table = Table(name, "", columns, tuple(rows))
        opened = Markup("<details><summary>{} claims: {}</summary>{}</details>")
        lists.append(opened.format(len(rows), name, Markup(table._repr_html_())))
        texts.append(str(table))
    return Rich(str(Markup("").join(lists)), "\n\n".join(texts))
