"""Exercises: a question, a check that explains, hints one at a time, and a solution.

A lesson's exercises are in ``labkit/exercises/lesson_NN.py``, which defines ``EXERCISES``, a
sequence of ``Exercise``. In the notebook:

    exercise = lab.exercise("06-1")
    answer = ...
    exercise.check(answer)

A check answers *correct*, *not yet* with a reason, or *not attempted*. It never raises because
of what the learner gave, not even where the learner's own function raises.

Three kinds of answer: a value; a function, which the check calls through ``call``; and an
experiment (a generator function), which the check runs through ``run_experiment``.

Limits: the learner's code runs in this process, without a time limit.
"""

import copy
import importlib
import inspect
import pkgutil
import re
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from labkit.exercises.checks import (
    Feedback,
    NotAttempted,
    call,
    expect_choice,
    expect_number,
    memory_target,
    quote,
    run_experiment,
    same_losses,
)
from labkit.hardware import clear_exception
from labkit.memory import InputError, one_of

__all__ = [
    "Exercise",
    "Feedback",
    "Outcome",
    "Status",
    "call",
    "exercise",
    "expect_choice",
    "expect_number",
    "memory_target",
    "quote",
    "run_experiment",
    "same_losses",
]

KINDS = ("value", "function", "experiment")
UNTOUCHED = "Put your answer in place of the `...`, then check again."


class Status(StrEnum):
    """How an exercise stands."""

    CORRECT = "correct"
    NOT_YET = "not yet"
    NOT_ATTEMPTED = "not attempted"


@dataclass(frozen=True)
class Outcome:
    """What a check found, and a message for the learner."""

    id: str
    status: Status
    message: str

    def _ipython_display_(self) -> None:
        """Nothing: ``check`` has shown the card, and a cell may end with that call."""


class Exercise:
    """One exercise.

    Args:
        id: lesson and number, ``"06-1"``.
        question: what to do, as the notebook words it.
        hints: shown one at a time, from a nudge to nearly the answer.
        solution: for a value, a function without arguments that returns it; otherwise the very
            function that would be correct. Its source is what ``.solution()`` shows, so it must
            be a ``def``.
        check: given the answer; returns None if it is correct, a sentence saying why not yet, or
            a ``Feedback``.
        kind: ``"value"``, ``"function"`` or ``"experiment"``. If None, an experiment where the
            solution is a generator function, else a value.

    Raises:
        InputError: a malformed id, or an unknown kind.
    """

    def __init__(
        self,
        id: str,
        *,
        question: str,
        hints: Sequence[str],
        solution: Callable[..., Any],
        check: Callable[[Any], "str | Feedback | None"],
        kind: str | None = None,
    ) -> None:
        if not re.fullmatch(r"\d\d-[1-9]", id, re.ASCII):
            raise InputError(f"an exercise is called like '06-1', not {id!r}")
        default = "experiment" if inspect.isgeneratorfunction(solution) else "value"
        self.id = id
        self.question = question
        self.hints = tuple(hints)
        self.solve = solution
        self.kind = one_of(kind or default, KINDS, "kind of exercise")
        self._check = check
        self._hints_shown = 0

    def __repr__(self) -> str:
        return f"Exercise {self.id}: {self.question}"

    @property
    def right_answer(self) -> Any:
        """An answer that is correct, made by the solution."""
        return self.solve() if self.kind == "value" else self.solve

    def check(self, answer: Any = ...) -> Outcome:
        """Check an answer and show how it went. Raises nothing but KeyboardInterrupt."""
        from labkit.show import cards

        outcome = self._outcome(answer)
        cards.exercise_card(outcome)
        return outcome

    def hint(self) -> None:
        """Show the next hint."""
        from labkit.show import cards

        if self._hints_shown == len(self.hints):
            text = "There are no more hints. `.solution()` shows one way to do it."
            cards.message_card(text, title="no more hints")
            return
        self._hints_shown += 1
        title = f"hint {self._hints_shown} of {len(self.hints)}"
        cards.message_card(self.hints[self._hints_shown - 1], title=title, tone="hint")

    def solution(self) -> None:
        """Show one way to do it, as source."""
        from labkit.show import cards

        source = textwrap.dedent(inspect.getsource(self.solve)).strip()
        cards.message_card("One way to do it:", title="solution", tone="good", code=source)

    def _outcome(self, answer: Any) -> Outcome:
        try:
            return self._misplaced(answer) or self._read(self._check(answer))
        except NotAttempted as stub:
            return Outcome(self.id, Status.NOT_ATTEMPTED, str(stub))
        # Whatever the learner's code does is an answer, not an error; `sys.exit()`, too.
        except (Exception, SystemExit) as error:
            message = _because(error, answer)
            clear_exception(error)  # its frames would keep the learner's tensors alive
            return Outcome(self.id, Status.NOT_YET, message)

    def _misplaced(self, answer: Any) -> Outcome | None:
        """The outcome where the answer is no attempt, or not the kind of thing asked for."""
        if answer is None or answer is ...:
            return Outcome(self.id, Status.NOT_ATTEMPTED, UNTOUCHED)
        if self.kind == "value":
            return None
        if inspect.isgenerator(answer) or not callable(answer):
            text = f"Give the function itself, without calling it; you gave {quote(answer)}."
            return Outcome(self.id, Status.NOT_YET, text)
        if self.kind == "experiment" and not inspect.isgeneratorfunction(answer):
            name = getattr(answer, "__name__", "your function")
            text = f"`{name}` has no `yield` yet: an experiment yields the loss once per step."
            return Outcome(self.id, Status.NOT_ATTEMPTED, text)
        return None

    def _read(self, result: "str | Feedback | None") -> Outcome:
        if result is None:
            result = Feedback(True, "That is right.")
        elif isinstance(result, str):
            result = Feedback(False, result)
        status = Status.CORRECT if result.correct else Status.NOT_YET
        return Outcome(self.id, status, result.message)


def exercise(id: str) -> Exercise:
    """The exercise called ``id``, with all its hints still to come.

    Raises:
        InputError: there is no such exercise; the message names the nearest.
    """
    lesson = str(id).partition("-")[0]
    lessons = lessons_with_exercises()
    if lesson not in lessons:
        known = ", ".join(lessons) or "none"
        raise InputError(f"no exercise {id!r}: the lessons with exercises are {known}")
    found = {each.id: each for each in of_lesson(lesson)}
    return copy.copy(found[one_of(id, found, "exercise")])


def lessons_with_exercises() -> list[str]:
    """The numbers of the lessons that have exercises, ``["00", "01", ...]``."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(n.removeprefix("lesson_") for n in names if re.fullmatch(r"lesson_\d\d", n))


def of_lesson(lesson: str) -> tuple[Exercise, ...]:
    """All exercises of lesson ``"06"``, which must have some."""
    return tuple(importlib.import_module(f"{__name__}.lesson_{lesson}").EXERCISES)


# --- what to say when the learner's code raises ------------------------------------------------


def _because(error: BaseException, answer: Any) -> str:
    lines = traceback.format_exception_only(error)  # copes with errors that cannot print
    what = next((line for line in lines if not line.startswith(" ")), lines[-1]).strip()
    if len(what) > 400:
        what = f"{what[:400]} …"
    if isinstance(error, InputError):
        return f"Your answer cannot be used: {error}"
    if not callable(answer):
        return f"Your answer could not be checked: {quote(answer)} led to {what}"
    plain = inspect.isfunction(answer) or inspect.ismethod(answer)
    file = answer.__code__.co_filename if plain else None
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    if not frames:
        return f"Your function raised {what}"
    line = f": `{frames[-1].line}`" if frames[-1].line else ""
    return f"Your function raised {what}\n\nIt happened in line {frames[-1].lineno}{line}"
