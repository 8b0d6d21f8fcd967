"""The lesson that this kernel is running: ``lab.start`` begins it, ``lab.result`` ends it.

``start`` notes lesson, machine and time; ``result`` shows the result as data that `labkit run`
reads from the executed notebook. Limits: one lesson at a time per process.
"""

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit import claims, hardware, hosted, results
from labkit.memory import InputError, Run
from labkit.results import RESULT_MIME, Result, lesson_number, plain
from labkit.show import cards, tables

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


@dataclass
class _Session:
    lesson: str | None = None
    title: str = ""
    machine: Any = None
    started: float = 0.0
    scratch: Any = None  # where `folder` lies


current = _Session()


def start(lesson: str | int, *, title: str | None = None) -> hardware.Machine:
    """Begin ``lesson`` (``"06"`` or ``6``): forget earlier judgements, show this machine's card.

    On Colab and Kaggle the card says how to get a GPU if there is none, and what peft could not
    work with is removed.

    Args:
        lesson: its number.
        title: for people; the notebook's file name gives one if None.

    Returns:
        This machine.

    Raises:
        InputError: the lesson is not a number.
    """
    current.lesson = lesson_number(lesson)
    current.title = title or _title_from_file(current.lesson)
    current.machine = hardware.machine()
    current.started = time.monotonic()
    claims.session.clear()
    cards.machine_card(current.machine, for_a_gpu=hosted.for_a_gpu(current.machine))
    if done := hosted.prepare(current.machine):
        cards.message_card(done, title="torchao")
    return current.machine


def folder() -> Path:
    """A folder for what a lesson writes, such as the program that other processes run.

    Made at the first call, removed when this process ends, however it ends; modules in it can be
    imported.
    """
    if current.scratch is None:
        from labkit.disk import Scratch

        current.scratch = Scratch()
        sys.path.append(str(current.scratch.path))
    return current.scratch.path


def recorded(lesson: str | int | None = None) -> None:
    """Show what real GPUs recorded for a lesson, or that none has yet.

    Args:
        lesson: its number; the lesson that is running if None.

    Raises:
        InputError: the lesson is not a number, or none is running.
    """
    number = lesson_number(lesson if lesson is not None else current.lesson or "")
    found = results.recorded(number)
    if not found:
        cards.message_card(
            "No GPU has recorded this lesson yet. `labkit record` on a CUDA machine does it.",
            title="Recorded on real GPUs",
        )
    for result in found:
        versions = result.machine.get("versions", {})
        torch_version = versions.get("torch") if isinstance(versions, dict) else None
        cards.message_card(
            f"Recorded on {result.where}, {result.date[:10]}, PyTorch {torch_version}.",
            title="Recorded on real GPUs",
        )
        tables.table(list(result.runs))


def _title_from_file(lesson: str) -> str:
    for path in sorted(NOTEBOOKS.glob(f"{lesson}_*.ipynb")):
        return path.stem[3:].replace("_", " ").capitalize()
    return f"Lesson {lesson}"


def build(runs: Run | Iterable[Run], **parameters: Any) -> Result:
    """The result of the lesson that is running: these runs, and the claims judged so far.

    Args:
        runs: one run, or the runs that the lesson's figures show.
        parameters: the lesson's parameters by name: ``batch_size=batch_size``.

    Raises:
        InputError: ``lab.start`` was not called, or something is not a run or a plain value.
    """
    if current.lesson is None:
        raise InputError("call lab.start('06') (with the lesson's number) before lab.result")
    runs = [runs] if isinstance(runs, Run) else list(runs)
    for run in runs:
        if not isinstance(run, Run):
            raise InputError(f"runs must hold what lab.run gave, not {type(run).__name__}")
    machine = asdict(current.machine) if is_dataclass(current.machine) else current.machine
    result = Result(
        lesson=current.lesson,
        title=current.title,
        machine=machine,
        parameters=parameters,
        runs=tuple(runs),
        judgements=tuple(judgement_record(judgement) for judgement in claims.session),
        seconds=round(time.monotonic() - current.started, 3),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return Result.from_dict(result.to_dict())


def judgement_record(judgement: claims.Judgement) -> dict[str, Any]:
    """A ``claims.Judgement`` as a JSON-ready object."""
    claim = judgement.claim
    return {
        "id": claim.id,
        "says": claim.says,
        "claimed": claim.claimed,
        "unit": claim.unit,
        "sources": list(claim.sources),
        "verdict": str(judgement.verdict),
        "measured": plain(judgement.measured),
        "by_condition": {name: str(v) for name, v in judgement.by_condition.items()},
        "mode": judgement.mode,
        "reasons": list(judgement.reasons),
    }


def result(runs: Run | Iterable[Run], **parameters: Any) -> None:
    """``lab.result(runs, batch_size=batch_size, ...)``: show the lesson's result as data.

    Args:
        runs: one run, or those that the figures show.
        **parameters: what the lesson ran with, by name; as for ``build``.

    Raises:
        InputError: as ``build``.
    """
    found = build(runs, **parameters)
    bundle = {RESULT_MIME: found.to_dict(), "text/plain": str(found)}
    if _in_notebook():
        from IPython.display import display

        display(bundle, raw=True)
    else:
        print(found)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")  # a notebook has imported it; nobody else should
    return ipython is not None and ipython.get_ipython() is not None
