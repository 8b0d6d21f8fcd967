"""Find what makes a script fit: each remedy is tried on the script itself, on a phantom GPU.

`fix` runs the script as it is, then with each remedy that applies, alone, then with several of
them, the mildest first, until it fits with room to spare. What each takes is what PyTorch's
allocator reserved. Trials run on a GPU with ``ROOMY`` times the memory, so that each says what it
needs; the last run, with what was chosen, is on the GPU that was asked for.

Limits: a trial is as long as the script needed for its peak, or for its failure, and a step more.
What a trial saves into a folder, the next one finds there.
"""

import concurrent.futures
import itertools
import linecache
import os
import subprocess
import textwrap
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gpumem.estimation.known_techniques import Effect
from gpumem.hardware import catalogue
from gpumem.hardware.catalogue import MARGIN, Gpu
from gpumem.units import format_bytes
from phantom_gpu.report import FitReport, Section
from phantom_gpu.report_records import ARGUMENTS, OPTIMIZER, Edit, Offer
from phantom_gpu.run_script import run_program
from phantom_gpu.write_edits import missing_imports

ROOMY = 16
MUCH_SLOWER = 1.5  # than the script as it is; computing every forward pass again takes a third more
LEAST_SAVED = 0.02  # of what the script reserves; less is not worth a change
#: An optimizer has its states from the second step on; mixed precision was seen to take a last
#: segment in the fifth.
LEAST_STEPS = 6
EXPANDABLE = "expandable-segments"
NO_SPARE = f"It leaves less than {100 * MARGIN:.0f} % to spare, and no remedy leaves more."


@dataclass(frozen=True)
class Trial:
    """The script with some remedies.

    Attributes:
        remedies: which.
        reserved_bytes, allocated_bytes: the most on one GPU.
        step_seconds: a bound of a step's seconds; None where none is known.
        failure: why there is no answer; empty if there is one.
    """

    remedies: tuple[Offer, ...]
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    step_seconds: float | None = None
    failure: str = ""

    @property
    def effect(self) -> Effect:
        """What the strongest of the remedies changes in the training."""
        return max((offer.effect for offer in self.remedies), default=Effect.NOTHING)

    @property
    def names(self) -> str:
        return " + ".join(offer.what for offer in self.remedies) or "the script as it is"


@dataclass(frozen=True)
class Fix:
    """What `fix` found.

    Attributes:
        first: the script as it is, on the GPU that was asked for.
        plain: the same with enough memory: what it needs. None where it came to no answer.
        alone: trials of one remedy each, those that help the most first.
        together: trials of several, in the order in which they were made.
        chosen: the trial whose remedies make it fit with room to spare; None if none does, or none
            is needed.
        last: the script with these, on the GPU that was asked for.
        room_bytes: what it may reserve to fit with room to spare.
        interrupted: it was stopped by Ctrl-C.
    """

    first: FitReport
    plain: Trial | None = None
    alone: tuple[Trial, ...] = ()
    together: tuple[Trial, ...] = ()
    chosen: Trial | None = None
    last: FitReport | None = None
    room_bytes: int = 0
    interrupted: bool = False

    @property
    def fits(self) -> bool | None:
        """Whether the script fits, with what was chosen if something was."""
        return (self.last or self.first).fits

    @property
    def helpful(self) -> list[Trial]:
        """Trials of one remedy that save enough to be offered."""
        return [trial for trial in self.alone if _saved(self.plain, trial) >= LEAST_SAVED]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        return {
            "fits": self.fits,
            "headline": self.headline(),
            "room_bytes": self.room_bytes,
            "interrupted": self.interrupted,
            "plain": self.plain and _trial_dict(self.plain),
            "alone": [_trial_dict(trial) for trial in self.alone],
            "together": [_trial_dict(trial) for trial in self.together],
            "chosen": self.chosen and _trial_dict(self.chosen),
            "first": self.first.to_dict(),
            "last": self.last and self.last.to_dict(),
        }

    def headline(self) -> str:
        """Return the answer in a sentence or two."""
        first = self.first.headline()
        if self.plain is None:
            return first
        if self.interrupted:
            return f"{first} It was interrupted. So far:"
        if self.chosen is None and self.first.fits:
            fits = _fits_in(self.room_bytes, self.plain)
            return f"{first} {'Nothing needs to be changed.' if fits else NO_SPARE}"
        if self.chosen is None:
            smallest = min((self.plain, *self.alone, *self.together), key=_size)
            least = format_bytes(smallest.reserved_bytes)
            return (
                f"{first} No remedy makes it fit. The smallest reserves {least}: {smallest.names}."
            )
        assert self.last is not None
        with_them = self.last.headline()
        return f"{first}\nWith {self.chosen.names}: {with_them[:1].lower()}{with_them[1:]}"

    def __str__(self) -> str:
        return "\n\n".join([self.headline(), *map(str, self.sections())])

    def sections(self) -> list[Section]:
        """Return all parts but the headline."""
        if self.plain is None:
            return self.first.sections(5)
        found = self.first.mistakes_named()
        need = format_bytes(self.plain.reserved_bytes)
        if self.helpful:
            title = f"As it is, the script reserves {need}. With one remedy alone it reserves"
            found.append(_table(title, self.plain, self.helpful, self.room_bytes))
        if self.together:
            title = "With several of them"
            found.append(_table(title, self.plain, self.together, self.room_bytes))
        without = [trial for trial in self.alone if trial not in self.helpful]
        if without:
            lines = [f"{trial.names}: {_why(self.plain, trial)}" for trial in without]
            found.append(Section("Tried, and not offered", lines))
        if self.chosen is not None:
            edits = [edit for offer in self.chosen.remedies for edit in offer.edits]
            lines = [*self._imports(edits), *map(self._to_write, edits)]
            found.append(Section("What to write", lines))
            changes = [offer for offer in self.chosen.remedies if offer.changes != "nothing"]
            if changes:
                lines = [f"{offer.what}: {offer.changes}" for offer in changes]
                found.append(Section("What changes in the training", lines))
        return found

    def _imports(self, edits: Sequence[Edit]) -> list[str]:
        """Return what to write at the top of each file that the edits are in."""
        found = []
        for file in dict.fromkeys(edit.line.rpartition(":")[0] for edit in edits if edit.line):
            text = "".join(linecache.getlines(os.path.join(self.first.folder, file)))
            here = [edit for edit in edits if edit.line.startswith(f"{file}:")]
            where = self.first.line(f"{file}:1").rpartition(":")[0]
            if text and (names := ", ".join(missing_imports(text, here))):
                found.append(f"{where}, at the top: import {names}")
        return found

    def _to_write(self, edit: Edit) -> str:
        made = "optimizer" if edit.place.kind == OPTIMIZER else "model"
        where = self.first.line(edit.line) if edit.line else f"the line that makes the {made}"
        if edit.how in ("before", "after"):
            return f"{edit.how} {where} write\n{textwrap.indent(edit.code, '    ')}"
        of_trainer = edit.place.kind == ARGUMENTS
        where = {
            "arguments": f"{where}, Trainer's arguments" if of_trainer else f"{where}, in the call",
            "class": f"{where}, the class",
            "without": f"{where}, in the call leave out",
            "variable": "before the command",
        }[edit.how]
        return f"{where}: {edit.code}"


def fix(
    command: Sequence[str],
    *,
    gpu: str,
    gpus: int = 1,
    steps: int = 0,
    budget_bytes: int | None = None,
    expandable_segments: bool = False,
    record: bool = False,
    report: Callable[[str], None] = lambda sentence: None,
    **popen: Any,
) -> Fix:
    """Run ``command`` on phantom GPUs, and find what makes it fit.

    Arguments and errors are those of `run_program`. What trials print is thrown away.
    """
    card = catalogue.gpu(gpu)
    asked = {"gpus": gpus, "expandable_segments": expandable_segments, **popen}
    whole = {"gpu": card, "steps": steps, "record": record, "report": report}
    first = run_program(command, budget_bytes=budget_bytes, **whole, **asked)
    budget_bytes = first.budget_bytes
    if first.fits is None or not first.by_gpu():
        return Fix(first)
    search = _Search(command, card, asked, length_of_trials(first, steps), report)
    search.room_bytes = int((1 - MARGIN) * budget_bytes)
    try:
        search.run(first)
    except KeyboardInterrupt:
        search.interrupted = True
    last = None
    if search.chosen is not None and not search.interrupted:
        report(f"once more, on {card.name}: {search.chosen.names}")
        last = run_program(
            command,
            budget_bytes=budget_bytes,
            trials=orders(search.chosen.remedies),
            **whole,
            **(asked | search.allocator(search.chosen.remedies)),
        )
    alone = sorted(search.alone, key=lambda trial: (bool(trial.failure), trial.reserved_bytes))
    return Fix(
        first=first,
        plain=search.plain,
        alone=tuple(alone),
        together=tuple(search.together),
        chosen=search.chosen,
        last=last,
        room_bytes=search.room_bytes,
        interrupted=search.interrupted,
    )


def length_of_trials(first: FitReport, steps: int) -> int:
    """Return how many steps a trial runs; 0: it ends by itself, as the peak was after the last."""
    answer, gpu = first.worst()
    peaks = [gpu.allocated_at.step, gpu.reserved_at.step]
    if gpu.failed is not None:
        peaks.append(gpu.failed.when.step)
    needed = max(LEAST_STEPS, max(peaks) + 1)
    if first.fits and needed >= answer.steps:
        return steps
    return min(needed, steps) if steps else needed


@dataclass
class _Search:
    """Tries remedies, and keeps what came out."""

    command: Sequence[str]
    gpu: Gpu
    asked: dict[str, Any]
    steps: int
    report: Callable[[str], None]
    room_bytes: int = 0
    plain: Trial | None = None
    alone: list[Trial] = field(default_factory=list)
    together: list[Trial] = field(default_factory=list)
    chosen: Trial | None = None
    interrupted: bool = False
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run(self, first: FitReport) -> None:
        """Try each remedy alone, then several, until one choice fits with room to spare."""
        offers = first.worst()[0].remedies
        # Short of memory, PyTorch gives its cache back, and reserves less than trials with room do.
        if first.fits and not any(gpu.retries for _, gpu in first.by_gpu()):
            self.plain = _trial((), first)
        else:
            self.report(f"what it needs, on a GPU with {ROOMY} times the memory")
            needed = self._run(())
            self.plain = _trial((), needed)
            offers = needed.worst()[0].remedies if needed.by_gpu() else []
        if self.plain.failure:
            return
        self._try_each(offers)
        if not self._fits(self.plain):
            self.chosen = self._mildest()

    def _try_each(self, offers: Sequence[Offer]) -> None:
        # A launcher's processes find each other at one port: one program at a time there.
        workers = 1 if self.asked["gpus"] > 1 else min(2, os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            waiting = [pool.submit(self._try, (offer,)) for offer in offers]
            again = []
            try:
                for done in concurrent.futures.as_completed(waiting):
                    trial = done.result()
                    if trial.failure and workers > 1:
                        again.append(trial.remedies)
                    else:
                        self._tried_alone(trial, len(offers))
            except BaseException:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
                raise
        for remedies in again:  # it may have read a file that the other program was writing
            self._tried_alone(self._try(remedies), len(offers))

    def _tried_alone(self, trial: Trial, of: int) -> None:
        self.alone.append(trial)
        self._say(f"{len(self.alone)} of {of}", trial)

    def _mildest(self) -> Trial | None:
        """Return the trial to choose of those that fit: one remedy that neither trains otherwise
        nor slows a step much, else several, the mildest first and slow ones last of their kind."""
        assert self.plain is not None
        fitting = [trial for trial in self.alone if self._fits(trial)]
        mild = [t for t in fitting if t.effect < Effect.TRAINING and not self._slows(t)]
        if mild:
            return min(mild, key=_cost)
        helpful = [trial for trial in self.alone if _saved(self.plain, trial) >= LEAST_SAVED]
        best = self.plain
        for effect, slow in itertools.product(Effect, (False, True)):
            pool = [t for t in helpful if t.effect == effect and self._slows(t) is slow]
            if alone := [trial for trial in pool if trial in fitting]:
                return min(alone, key=_cost)
            for one in sorted(pool, key=_size):
                [offer] = one.remedies
                kept = [each for each in best.remedies if offer.name not in each.excludes]
                trial = one if not kept else self._try_several([*kept, offer])
                if _saved(best, trial) >= LEAST_SAVED:
                    best = trial
                if self._fits(best):
                    return self._without_needless(best)
        return None

    def _slows(self, trial: Trial) -> bool:
        """Return whether a step's bound is far above that of the script as it is."""
        assert self.plain is not None
        plain, slowed = self.plain.step_seconds, trial.step_seconds
        return bool(plain and slowed and slowed > MUCH_SLOWER * plain)

    def _without_needless(self, trial: Trial) -> Trial:
        """Return a trial that fits with fewer remedies, the strongest left out first."""
        for offer in sorted(trial.remedies, key=lambda offer: -offer.effect):
            fewer = [each for each in trial.remedies if each is not offer]
            if len(fewer) < 2:  # one alone was tried, and did not fit
                break
            smaller = self._try_several(fewer)
            if self._fits(smaller):
                trial = smaller
        return trial

    def _fits(self, trial: Trial) -> bool:
        return _fits_in(self.room_bytes, trial)

    def _try_several(self, offers: Sequence[Offer]) -> Trial:
        names = {offer.name for offer in offers}
        for trial in self.together:
            if {offer.name for offer in trial.remedies} == names:
                return trial
        trial = self._try(tuple(offers))
        self.together.append(trial)
        self._say("together", trial)
        return trial

    def _try(self, offers: tuple[Offer, ...]) -> Trial:
        if self._stopped.is_set():
            return Trial(offers, failure="it was not tried any more")
        return _trial(offers, self._run(offers))

    def _run(self, offers: tuple[Offer, ...]) -> FitReport:
        roomy = replace(self.gpu, usable_bytes=ROOMY * self.gpu.usable_bytes)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        options = self.asked | self.allocator(offers) | quiet
        return run_program(
            self.command, gpu=roomy, steps=self.steps, trials=orders(offers), **options
        )

    def _say(self, what: str, trial: Trial) -> None:
        said = trial.failure or f"{format_bytes(trial.reserved_bytes)} reserved"
        self.report(f"{what}: {trial.names}: {said}")

    @staticmethod
    def allocator(offers: Iterable[Offer]) -> dict[str, Any]:
        names = [offer.name for offer in offers]
        return {"expandable_segments": True} if EXPANDABLE in names else {}


def orders(offers: Iterable[Offer]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the ``trials`` of `run_program` that are these remedies."""
    return [
        (offer.name, [tuple(place) for place in dict.fromkeys(e.place for e in offer.edits)])
        for offer in offers
    ]


def _trial(offers: tuple[Offer, ...], report: FitReport) -> Trial:
    if not report.fits:
        return Trial(offers, failure=report.headline())
    answer, gpu = report.worst()
    seconds = report.least_seconds(answer)
    return Trial(offers, report.peak_reserved_bytes, gpu.peak_allocated_bytes, seconds)


def _fits_in(room_bytes: int, trial: Trial) -> bool:
    return not trial.failure and trial.reserved_bytes <= room_bytes


def _size(trial: Trial) -> float:
    return float("inf") if trial.failure else trial.reserved_bytes


def _cost(trial: Trial) -> tuple[float, ...]:
    """Sort key: what changes the training least first, then the fastest, then the smallest."""
    seconds = float("inf") if trial.step_seconds is None else trial.step_seconds
    return trial.effect, seconds, trial.reserved_bytes


def _saved(plain: Trial | None, trial: Trial) -> float:
    """Return the share of the reserved bytes that a trial saves; negative for one that failed."""
    if plain is None or trial.failure:
        return -1.0
    return 1 - trial.reserved_bytes / plain.reserved_bytes


def _why(plain: Trial, trial: Trial) -> str:
    if trial.failure:
        return trial.failure
    saved = round(_saved(plain, trial), 3)
    if not saved:
        return "it saves nothing"
    return f"it saves {saved:.1%}" if saved > 0 else f"it takes {-saved:.1%} more"


def _table(title: str, plain: Trial, trials: Sequence[Trial], room_bytes: int) -> Section:
    rows = []
    for trial in trials:
        if trial.failure:
            rows.append(("-", "-", "-", "-", f"{trial.names}: {trial.failure}"))
            continue
        rows.append(
            (
                format_bytes(trial.reserved_bytes),
                f"{_saved(plain, trial):.0%}",
                "yes" if trial.reserved_bytes <= room_bytes else "no",
                _slower(plain, trial),
                trial.names,
            )
        )
    headings = ("reserved", "saves", "fits", "step's bound", "remedy")
    return Section(title, headings=headings, rows=rows)


def _slower(plain: Trial, trial: Trial) -> str:
    if not plain.step_seconds or not trial.step_seconds:
        return "-"
    return f"{trial.step_seconds / plain.step_seconds - 1:+.0%}"


def _trial_dict(trial: Trial) -> dict[str, Any]:
    return asdict(trial) | {"effect": str(trial.effect)}
