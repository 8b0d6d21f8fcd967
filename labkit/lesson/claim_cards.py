"""Cards of a lesson: this machine, the verdict on a claim; and several verdicts in one table."""

from collections.abc import Sequence

from markupsafe import Markup

from gpumem.figures import html_pages
from gpumem.figures.cards import BAD, COOL, GOOD, QUIET, WARM, Card, Look, build_card
from gpumem.figures.html_pages import MISSING, Rich, grid
from gpumem.figures.tables import run_labels, seconds_text, sources
from gpumem.hardware.catalogue import GPUS
from gpumem.hardware.least_seconds import least_seconds
from gpumem.hardware.this_machine import Machine
from gpumem.runs import Run
from gpumem.units import format_bytes
from labkit.lesson.claims import Judgement, Verdict, format_value
from labkit.lesson.results import Result, versions_text

NO_RECORD = "No GPU has recorded this claim yet."
PHANTOM = "A phantom runs PyTorch's CUDA code and its allocator, without the GPU."
VERDICTS: dict[str, Look] = {
    Verdict.SUPPORTED: GOOD,
    Verdict.OVERSTATED: Look("▼", WARM.colour),
    Verdict.UNDERSTATED: Look("▲", COOL.colour),
    Verdict.WRONG: BAD,
    Verdict.DEPENDS: Look("◆", "#6a3d9a"),
    Verdict.NOT_TESTABLE: QUIET,
}


def claim_card(
    judgement: Judgement,
    recorded: Sequence[str] = (),
    counted: Sequence[tuple[str, str]] = (),
) -> Card:
    """Show the verdict on a claim, why, and what GPUs ``recorded`` for it.

    ``counted`` are rows for where there is no verdict: what is known without a GPU.
    """
    claim, verdict = judgement.claim, str(judgement.verdict)
    rows = [("Claimed", claim.claimed)]
    symbols = [f"{VERDICTS[each].symbol} " for each in judgement.by_condition.values()]
    for i, reason in enumerate(judgement.reasons):
        rows.append(("" if i else "Found", f"{symbols[i] if symbols else ''}{reason}"))
    if judgement.mode and judgement.measured is not None:
        rows.append(("Where", judgement.mode))
    if verdict == Verdict.NOT_TESTABLE:
        rows += counted
    more = [("Judged by", claim.measure), ("Rule", claim.rule)]
    if claim.assumptions:
        more.append(("We assume", claim.assumptions))
    articles = zip(claim.sources, claim.cited, strict=True)  # lessons call them by their letters
    more.append(("Said by", "; ".join(f"{letter}, {title}" for letter, title in articles)))
    on_gpus = [*(recorded or [NO_RECORD])]
    if any("phantom" in line for line in on_gpus):
        on_gpus.append(PHANTOM)
    more += [("" if i else "On GPUs", line) for i, line in enumerate(on_gpus)]
    details = {"more": more, "more_title": "How it was judged, who said it, what GPUs recorded"}
    return build_card(VERDICTS[verdict], verdict, claim.says, rows=rows, **details).show()


def verdict_table(judgements: Sequence[Judgement]) -> Rich:
    """Return a table of verdicts, a row for each claim; in plain text, a paragraph for each."""
    articles: dict[str, str] = {}
    rows, paragraphs = [], []
    for judgement in judgements:
        claim, look = judgement.claim, VERDICTS[judgement.verdict]
        articles |= zip(claim.sources, claim.cited, strict=True)
        claimed = f"{', '.join(claim.sources)}: {claim.claimed}"
        found, where = found_lines(judgement), judgement.mode or ""
        lines = Markup('<div style="min-width:36ch">{}</div>').format(Markup("<br>").join(found))
        verdict = Markup("{}&nbsp;{}<br>{}").format(look.symbol, judgement.verdict, where)
        rows.append((claim.says, claimed, lines, verdict))
        parts = [("Claimed", claimed), ("Found", "; ".join(found)), ("Where", where)]
        paragraphs.append(build_card(look, judgement.verdict, claim.says, rows=parts).text)
    said_by = "; ".join(f"{letter}, {title}" for letter, title in sorted(articles.items()))
    caption = f"Verdicts on what these articles claim: {said_by}."
    columns = ("claim", "claimed", "found", "verdict, and where")
    html = html_pages.table("Verdicts", columns, rows, caption=caption)
    return Rich(str(html), "\n".join([caption, *paragraphs]))


def found_lines(judgement: Judgement) -> list[str]:
    """Return what was found, briefly: a line for each condition, or why there is nothing."""
    unit = judgement.claim.unit
    if judgement.by_condition:
        return [
            f"{VERDICTS[verdict].symbol} {name}: {format_value(judgement.measured[name], unit)}"
            for name, verdict in judgement.by_condition.items()
        ]
    if judgement.measured is None:
        return list(judgement.reasons)
    return [format_value(judgement.measured, unit)]


def counted_rows(run: Run, than: Run) -> list[tuple[str, str]]:
    """Return what is known of two runs' speed without timing them; no rows if nothing is."""
    if not (run.flops and than.flops and run.moved_bytes and than.moved_bytes):
        return []
    work, moved = run.flops / than.flops, run.moved_bytes / than.moved_bytes
    names = f"{run.name}, over {than.name}"
    rows = [("Counted", f"work {work:.2f} ×, bytes moved {moved:.2f} × ({names})")]
    for gpu in GPUS.values():
        if gpu.name != run.device or run.device != than.device:
            continue
        bounds, precisions = [], []
        for each in (run, than):
            precisions.append(str(each.parameters.get("precision", "bf16")))
            flops, sent = {precisions[-1]: each.flops}, {"sent_bytes": each.sent_bytes}
            bound = least_seconds(gpu, flops, each.moved_bytes, **sent)
            longest = "arithmetic"
            if bound > least_seconds(gpu, flops, 0):
                longest = "sending" if bound > least_seconds(gpu, {}, each.moved_bytes) else "bytes"
            bounds.append(f"{seconds_text(bound)} ({longest})")
        text = f"at {gpu.name}'s published rates at least {' against '.join(bounds)} a step"
        if "fp32" in precisions:
            text += " (FP32 without TF32, PyTorch's default)"
        rows.append(("Bound", f"{text}; two lower bounds do not decide which is faster"))
    return rows


def recorded_peaks(found: Sequence[Result]) -> Rich:
    """Return a table of what several GPUs recorded: a row for each run, a column for each GPU."""
    peaks: dict[str, dict[str, str]] = {}
    for result in found:
        for name in dict.fromkeys(run.name for run in result.runs):
            alike = [run for run in result.runs if run.name == name]
            for label, run in zip(run_labels(alike), alike, strict=True):
                text = "out of memory" if run.oom else format_bytes(run.peak_bytes)
                if run.mode == "measured" and run.step_seconds:
                    text += f", {seconds_text(run.seconds_per_step)} a step"
                row = label if label.startswith(name) else f"{name}, {label}"
                peaks.setdefault(row, {})[run.label] = text
    alike: dict[tuple[str, ...], list[str]] = {}  # GPUs of which all cells are equal: one column
    for place in sources(run for result in found for run in result.runs):
        cells = tuple(row.get(place, MISSING) for row in peaks.values())
        alike.setdefault(cells, []).append(place)
    columns = [" and ".join(places) for places in alike.values()]
    rows = [[name, *cells] for name, *cells in zip(peaks, *alike, strict=True)]
    return grid(["run", *columns], rows, caption="Peak memory.")


def machine_card(machine: Machine, *, for_a_gpu: str = "") -> Card:
    """Show this machine, whether lessons are measured on it, and how to get a GPU here."""
    sizes = {"device": machine.capacity_bytes, "host": machine.host_memory_bytes}
    memory = [f"{format_bytes(size)} on the {place}" for place, size in sizes.items() if size]
    rows = [
        ("Memory", ", ".join(memory) or "not known"),
        ("CPU cores", str(machine.cores)),
        ("bfloat16", "native" if machine.bf16_native else "not native, so slow here"),
        ("Versions", versions_text(machine, None)),
    ]
    if for_a_gpu:
        rows.append(("For a GPU", for_a_gpu))
    look, status = (GOOD, "measured") if machine.can_measure else (COOL, "simulated")
    if machine.phantom:
        look, status = COOL, "phantom"
    return build_card(look, status, machine.name, body=machine.note, rows=rows).show()
