"""The questions that the articles raise, answered by the figures of a cheat sheet.

Limits: an answer is put together from sentences about figures; it judges nothing by itself.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from labkit import catalogue, headlines
from labkit.candidates import changes
from labkit.cheat_sheet import Sheet
from labkit.claim_rules import Verdict, all_claims
from labkit.memory import InputError, format_bytes
from labkit.sheet_figures import Figures, simulated
from labkit.sheet_order import Move


@dataclass(frozen=True)
class Answer:
    """A question that the articles raise, what the figures say, and where these come from."""

    question: str
    says: str
    sources: tuple[str, ...]


#: A question; techniques whose rows answer it; claims; headlines.
_QUESTIONS = (
    ("Does mixed precision halve memory?", "mixed precision", "amp-halves-memory", ""),
    ("Does mixed precision cost accuracy?", "", "amp-accuracy", ""),
    ("Does BF16 need a loss scaler?", "", "bf16-no-scaler", ""),
    ("Does checkpointing slow training down?", "gradient checkpointing", "ckpt-20-30-slower", ""),
    ("Does accumulation change the result?", "", "accum-same-gradient", ""),
    ("Is accumulation free?", "accumulation of two halves",
     "accum-constant-memory accum-neutral-speed", ""),
    ("Do I have to install flash attention?", "", "sdpa-picks-flash", ""),
    ("Does emptying the cache help?", "", "empty-cache-frees", ""),
    ("Does torch.compile save memory?", "", "compile-shrinks", ""),
    ("Does an 8-bit optimizer change results?", "", "opt8-drop-in", ""),
    ("Is SGD the cheap way out?", "SGD", "sgd-two-thirds", ""),
    ("How much does LoRA save, and QLoRA?", "LoRA;QLoRA", "qlora-75", ""),
    ("How slow is offloading?", "activations on the host;optimizer on the host;weights on the host",
     "offload-80 offload-2-5x-slower", ""),
    ("Do eight GPUs need an eighth each?", "sharding over 8 GPUs", "fsdp-10x sharding-linear", ""),
    ("Does loading data eat GPU memory?", "", "loading-gpu-memory", ""),
    ("Can I train a 7B on 24 GB?", "", "7b-on-24gb", "8b-full-24gb"),
    ("Can I train a 70B on 80 GB, or on 48?", "", "70b-on-80gb", "70b-qlora-80gb 70b-qlora-48gb"),
)  # fmt: skip


def faq(sheet: Sheet) -> tuple[Answer, ...]:
    """What the articles are asked, answered by the figures of ``sheet``.

    Headlines that no GPU has recorded are simulated here, which takes seconds.
    """
    found = [_first(sheet), _all_together(sheet)]
    for question, techniques, claims, headline in _QUESTIONS:
        parts = [_alone(sheet, name) for name in techniques.split(";") if name]
        parts += [_headline(sheet, name) for name in headline.split()]
        parts += [_judged(sheet, id) for id in claims.split()]
        says, sources = zip(*parts, strict=True)
        found.append(Answer(question, " ".join(says), tuple(dict.fromkeys(filter(None, sources)))))
    return tuple(found)


def percent(share: float) -> str:
    """A signed share for people, ``"+12 %"``."""
    digits = 0 if abs(share) >= 0.0995 else 1
    text = f"{100 * abs(share):.{digits}f}"
    sign = "" if not float(text) else "+" if share > 0 else "−"
    return f"{sign}{text} %"


def _first(sheet: Sheet) -> Answer:
    question = "Which technique first?"
    if not sheet.order:
        return Answer(question, "On this job none saves anything.", (sheet.source,))
    first = sheet.order[0]
    price = "nothing" if first.is_free else percent(first.added_seconds / first.before.seconds)
    says = (
        f"{_capital(first.name)}: {format_bytes(first.saved_bytes)} less of "
        f"{format_bytes(first.before.peak_bytes)}, at {price} more on the bound of a step."
    )
    fitting = next((move for move in sheet.order if move.after.fits), None)
    if not sheet.plain.fits and fitting:
        says += f" The job fits the card from “{fitting.name}” on."
    return Answer(question, says, (sheet.source,))


def _all_together(sheet: Sheet) -> Answer:
    judged = [_judged(sheet, id) for id in ("stack-20x", "stack-50-80")]
    says = []
    for changed, name in ((False, "the same training"), (True, "a changed training")):
        moves = [move for move in sheet.order if move.changed == changed]
        if moves:
            says.append(f"In this order {name} shrinks {_shrunk(sheet, moves[-1].after)}.")
            least = None if changed else _begun_otherwise(sheet, moves)
            if least:
                says.append(f"Begun with {least[0]}, it shrinks {_shrunk(sheet, least[1])}.")
    says += [text for text, _ in judged]
    sources = dict.fromkeys([sheet.source, *(source for _, source in judged if source)])
    return Answer("How far do all of them go together?", " ".join(says), tuple(sources))


def _shrunk(sheet: Sheet, after: Figures) -> str:
    ratio = sheet.plain.peak_bytes / after.peak_bytes
    return (f"{ratio:.1f}-fold, to {format_bytes(after.peak_bytes)}, with a bound of "
            f"{after.seconds:.3g} s a step")  # fmt: skip


def _begun_otherwise(sheet: Sheet, moves: Sequence[Move]) -> tuple[str, Figures] | None:
    """The technique that, adopted before those of ``moves`` it allows, takes least of all; None if
    no other begin takes less. Greed may shut out what saves more."""
    job, found = sheet.job, []
    for row in sheet.rows:
        if row.after is None or row.after.seconds is None:
            continue
        first, recipe = row.technique, row.after.recipe
        otherwise = set(changes(recipe)) - set(changes(job.recipe))
        if otherwise or row.after.peak_bytes >= moves[-1].after.peak_bytes:
            continue
        for technique in (technique for move in moves for technique in move.techniques):
            with contextlib.suppress(InputError):  # the two exclude each other
                more = technique.change(recipe, job.card)
                if first.change(more, job.card) == more:  # it does not take the first one's place
                    recipe = more
        found.append((first.name, simulated(job.model, job.card.key, recipe)))
    return min(found, key=lambda each: each[1].peak_bytes, default=None)


def _alone(sheet: Sheet, name: str) -> tuple[str, str]:
    found = sheet.row(name)
    if found.after is None:
        return f"{_capital(name)}: not on this job ({found.refused}).", sheet.source
    text = f"{_capital(name)} alone: peak {percent(-found.saved_share)}"
    if found.slower_share is not None:
        text += f", bound on a step {percent(found.slower_share)}"
    return f"{text}.", sheet.source


def _judged(sheet: Sheet, id: str) -> tuple[str, str]:
    claim, found = all_claims()[id], sheet.findings[id]
    text = f"The articles: “{claim.claimed}”"
    if not found:
        return f"{text}; not judged yet (`labkit run {claim.lesson}`).", ""
    verdicts = [
        f"{one.verdict} ({one.found}; {one.mode or one.where}"
        + (f", {one.date})" if one.recorded else ")")
        if one.verdict != Verdict.NOT_TESTABLE
        else f"{one.verdict}, for it needs a GPU"
        for one in found
    ]
    return f"{text}: {'; '.join(verdicts)}.", ", ".join(dict.fromkeys(one.source for one in found))


def _headline(sheet: Sheet, name: str) -> tuple[str, str]:
    job = headlines.HEADLINES[name]
    label, recipe = job.recipes[0]
    for gpu, found in sheet.headlines.items():
        for one in found:
            if one.name == name:
                entry = one.entries[0]
                fits = "fits" if entry.fitted else "does not fit"
                text = (
                    f"{job.model}, {label}: {fits}, {format_bytes(entry.run.peak_bytes)}, measured "
                    f"on {one.machine['name']} within {job.within}, {one.date[:10]}."
                )
                return text, f"results/{gpu}/{job.file}"
    card = next((c for c in catalogue.gpus() if c.name == job.within), catalogue.gpu("h100"))
    figures = simulated(job.model, card.key, recipe)
    reserved_bytes = figures.run.reserved_bytes
    fits = "fits" if reserved_bytes <= job.budget_bytes else "does not fit"
    text = (f"{job.model}, {label}, {recipe.batch_size} × {recipe.seq_len}: needs "
            f"{format_bytes(reserved_bytes)}, so it {fits} {job.within}.")  # fmt: skip
    return text, f"simulated for {card.name}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
