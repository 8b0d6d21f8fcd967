"""The lesson that this kernel is running: ``lab.start`` begins it, ``lab.result`` ends it."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from IPython import get_ipython
from IPython.display import display

from gpumem.figures import cards
from gpumem.files import TemporaryFolder
from gpumem.hardware import this_machine
from gpumem.inputs import InputError
from gpumem.runs import Run
from labkit.lesson import claim_cards, colab, results, shell_commands
from labkit.lesson.claims import Claim, Judgement, Verdict, find, format_found, judge
from labkit.lesson.notebooks import default_folder
from labkit.lesson.results import RESULT_MIME, Result, lesson_number, plain


class ExpectationFailed(AssertionError):  # noqa: N818 (a sentence, not a category)
    """Something that must hold on any machine does not. The message says what."""


@dataclass
class _Session:
    lesson: str | None = None
    title: str = ""
    machine: Any = None
    started: float = 0.0
    temporary_folder: TemporaryFolder | None = None


current = _Session()
#: The judgements of this lesson, the latest of each claim.
judgements: list[Judgement] = []
#: Their claims that have no card and wait for `claim_table`, by id.
without_card: set[str] = set()


def claim(
    id: str,
    measured: Any,
    mode: str | None = None,
    *,
    card: bool = True,
    counted: Sequence[tuple[str, str]] = (),
) -> Judgement:
    """Judge a claim, show its card with the verdicts recorded on GPUs, and remember it.

    Takes ``id``, ``measured`` and ``mode`` as `judge` does. Where a claim needs a GPU and ``mode``
    is not given, a value counts as measured on this machine's GPU if it has one. Without ``card``
    nothing is shown until `claim_table` lists all such claims. ``counted`` are rows that the card
    shows where there is no verdict (`claim_seconds`).
    """
    if mode is None and measured is not None and find(id).needs == "gpu":
        mode = this_machine.machine().label
    judgement = judge(id, measured, mode)
    judgements[:] = [old for old in judgements if old.claim.id != judgement.claim.id]
    judgements.append(judgement)
    if card:
        without_card.discard(id)
        claim_cards.claim_card(judgement, recorded_lines(judgement.claim), counted)
    else:
        without_card.add(id)
    return judgement


def claim_table() -> None:
    """Show the claims judged with ``card=False`` in one table: claimed, found, verdict and where.

    Rules, assumptions and what GPUs recorded are on cards only.
    """
    listed = [judgement for judgement in judgements if judgement.claim.id in without_card]
    if not listed:
        raise InputError("no claim to list: judge some with lab.claim(..., card=False) before")
    display(claim_cards.verdict_table(listed))


def claim_seconds(id: str, run: Run, than: Run, *, card: bool = True) -> Judgement:
    """Judge the claim ``id`` by the seconds that a step of ``run`` takes, over those of ``than``.

    A claim in shares takes the ratio minus one: 0.3 where ``run`` is 30 % slower. Where no GPU has
    timed both, the card shows what was counted instead: work, bytes moved, and the bound of each.
    ``card`` is that of `claim`.
    """
    unit = find(id).unit
    if unit not in ("ratio", "share"):
        raise InputError(f"Claim {id!r} is judged in {unit}; seconds give a ratio or a share.")
    ratio = None
    if run.seconds_per_step and than.seconds_per_step and run.fits and than.fits:
        ratio = run.seconds_per_step / than.seconds_per_step
        if unit == "share":
            ratio -= 1
    return claim(id, ratio, run.label, card=card, counted=claim_cards.counted_rows(run, than))


def recorded_lines(claim: Claim) -> list[str]:
    """Return what the GPUs that tested the claim recorded, as text: a line for each finding.

    What is simulated was not tested on a GPU, whichever was there; a phantom GPU tests what its
    bytes decide, and not what a CPU computed beside it.
    """
    places: dict[str, list[str]] = {}
    for result in results.results_of(claim.lesson):
        for entry in result.judgements:
            mode = entry.get("mode") or ""
            if mode.startswith("simulated") or (result.phantom and "CPU" in mode):
                continue
            if entry["id"] == claim.id and (verdict := entry["verdict"]) != Verdict.NOT_TESTABLE:
                value = format_found(entry.get("measured"), claim.unit)
                versions = results.versions_text(result.machine, ("torch", "cuda", "driver"))
                notes = "; ".join(filter(None, [versions, result.date[:10]]))
                found = f"{claim_cards.VERDICTS[verdict].symbol} {verdict}, {value} ({notes})"
                places.setdefault(found, []).append(result.where)
    return [f"{', '.join(where)}: {found}" for found, where in places.items()]


def expect(condition: Any, message: str) -> None:
    """Check ``condition``, which any machine meets, or raise `ExpectationFailed`: ``message``."""
    if not condition:
        raise ExpectationFailed(message)
    print(f"✓ {message}")


def start(lesson: str | int) -> this_machine.Machine:
    """Begin ``lesson`` (``"06"`` or ``6``): forget earlier judgements, show this machine's card.

    Returns this machine. From here on a cell fails where its shell command does. On Colab and
    Kaggle the card says how to get a GPU if there is none, and torchao is removed. Unless
    OMP_NUM_THREADS is set, PyTorch gets one thread fewer than there are cores.
    """
    current.lesson = lesson_number(lesson)
    names = sorted(file.stem[3:] for file in default_folder().glob(f"{current.lesson}_*.ipynb"))
    current.title = [*names, f"lesson_{current.lesson}"][0].replace("_", " ").capitalize()
    current.machine = this_machine.machine()
    current.started = time.monotonic()
    shell_commands.let_them_fail(get_ipython())
    judgements.clear()
    without_card.clear()
    if not current.machine.can_measure:  # or DeepSpeed warns of a missing GPU when it is imported
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on a CPU it recommends a package
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # PEFT asks for an old name
    if "OMP_NUM_THREADS" not in os.environ:
        # Threads that wait for each other spin: where a browser takes the core of one, small steps
        # become many times slower. `labkit run` sets OMP_WAIT_POLICY, which must be set earlier.
        torch.set_num_threads(max(1, current.machine.cores - 1))
    claim_cards.machine_card(current.machine, for_a_gpu=colab.for_a_gpu(current.machine))
    if done := colab.prepare(current.machine):
        cards.message_card(done, title="torchao")
    return current.machine


def folder() -> Path:
    """Return a folder for what a lesson writes, such as a program for other processes.

    It is created at the first call and removed with this process; modules in it can be imported.
    """
    if current.temporary_folder is None:
        current.temporary_folder = TemporaryFolder()
        sys.path.append(str(current.temporary_folder.path))
    return current.temporary_folder.path


def recorded(lesson: str | int) -> None:
    """Show what GPUs recorded for a lesson: real ones, or that none has yet, then phantoms.

    A phantom is left out where it ran nothing itself: all of its record is simulated or of the CPU.
    """
    found = [
        each
        for each in results.results_of(lesson)
        if not each.phantom or any(run.mode == "phantom" for run in each.runs)
    ]
    if all(each.phantom for each in found):
        text = "No real GPU has run this lesson yet."
        cards.message_card(text, title="Recorded on real GPUs")
    for phantom, kind in ((False, "real"), (True, "phantom")):
        if chosen := [each for each in found if each.phantom is phantom]:
            lines = [
                f"{each.machine.name}, {each.date[:10]}, {results.versions_text(each.machine)}."
                for each in chosen
            ]
            if phantom:
                lines.append(claim_cards.PHANTOM)
            cards.message_card("\n".join(lines), title=f"Recorded on {kind} GPUs")
            display(claim_cards.recorded_peaks(chosen))


def build(runs: Run | Iterable[Run], **parameters: Any) -> Result:
    """Return what ``result`` shows: these runs, and the claims judged so far."""
    if current.lesson is None:
        raise InputError("call lab.start('06') (with the lesson's number) before lab.result")
    runs = [runs] if isinstance(runs, Run) else list(runs)
    for run in runs:
        if not isinstance(run, Run):
            raise InputError(f"runs must hold what lab.run gave, not {type(run).__name__}")
    found = Result(
        lesson=current.lesson,
        title=current.title,
        machine=current.machine,
        parameters=parameters,
        runs=tuple(runs),
        judgements=tuple(judgement_record(judgement) for judgement in judgements),
        seconds=round(time.monotonic() - current.started, 3),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return Result.from_dict(found.to_dict())  # checked


def judgement_record(judgement: Judgement) -> dict[str, Any]:
    """Return a judgement as a JSON-ready object."""
    record = {"id": judgement.claim.id, **vars(judgement)}
    del record["claim"], record["reasons"]
    return plain(record)


def result(runs: Run | Iterable[Run], **parameters: Any) -> None:
    """Show the lesson's result as data: ``lab.result(runs, batch_size=batch_size, ...)``.

    ``runs`` are those that the figures show, ``parameters`` what the lesson ran with. An
    `InputError` says that `start` was not called, or that one is not a run or a plain value.
    """
    found = build(runs, **parameters)
    if get_ipython() is None:
        print(found)
    else:
        display({RESULT_MIME: found.to_dict(), "text/plain": str(found)}, raw=True)
