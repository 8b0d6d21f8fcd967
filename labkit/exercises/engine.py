"""Exercises: a check that explains, and a solution.

A lesson's exercises are in ``labkit/exercises/lesson_NN.py``: solutions, checks decorated with
``check_of``, and what they compare with, as the notebook shows it. The notebook asks the question,
and has hints in boxes below it.

A check answers *correct*, *not yet* with a reason, or *not attempted*; it never raises because of
what the learner gave. The learner's code runs in this process, without a time limit.
"""

import importlib
import inspect
import symtable
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

from gpumem.figures.cards import GOOD, QUIET, WARM, Card, Look, Shown, build_card, message_card
from gpumem.hardware.cuda import clear_exception
from gpumem.inputs import InputError, one_of, shown
from labkit.exercises.checks import Correct, NotAttempted

Check = Callable[[Any], str | Correct | None]


class Status(StrEnum):
    CORRECT = "correct"
    NOT_YET = "not yet"
    NOT_ATTEMPTED = "not attempted"


@dataclass(frozen=True)
class Feedback(Shown):
    """The status of an answer, and a message for the learner."""

    id: str
    status: Status
    message: str


class Exercise:
    """One exercise.

    The solution says which kind of answer is asked for: a function without parameters returns
    the right value; any other function, generator function or class is itself a right answer.
    The check is given the answer; it returns None or a ``Correct`` if the answer is right, else a
    sentence saying why not yet.
    """

    def __init__(self, id: str, solution: Callable[..., Any], check: Check) -> None:
        self.id = id
        self._solution = solution
        self.asks_for_function = bool(inspect.signature(solution).parameters)
        self._check = check

    @property
    def right_answer(self) -> Any:
        return self._solution if self.asks_for_function else self._solution()

    def check(self, answer: Any = ...) -> Feedback:
        """Check an answer and show the feedback. Raises nothing but KeyboardInterrupt."""
        feedback = self._feedback(answer)
        exercise_card(feedback)
        return feedback

    def solution(self) -> None:
        """Show one way to do it, as source, with the imports that the notebook still lacks."""
        source = textwrap.dedent(inspect.getsource(self._solution)).strip()
        lines = "\n".join(_imports(source, sys.modules[self._solution.__module__]))
        code = f"{lines}\n\n\n{source}" if lines else source
        message_card("One way to do it:", title="solution", look=GOOD, code=code)

    def _feedback(self, answer: Any) -> Feedback:
        try:
            self._expect_an_attempt(answer)
            result = self._check(answer)
        except NotAttempted as stub:
            return Feedback(self.id, Status.NOT_ATTEMPTED, str(stub))
        # Whatever the learner's code does is an answer, not an error; `sys.exit()`, too.
        except (Exception, SystemExit) as error:
            result = _because(error, answer)
            clear_exception(error)  # its frames would keep the learner's tensors alive
        if isinstance(result, str):
            return Feedback(self.id, Status.NOT_YET, result)
        message = result.message if result else "That is right."
        return Feedback(self.id, Status.CORRECT, message)

    def _expect_an_attempt(self, answer: Any) -> None:
        parts = answer.values() if isinstance(answer, dict) else [answer]
        if all(part is None or part is ... for part in parts):
            raise NotAttempted("Put your answer in place of the `...`, then check again.")
        if not self.asks_for_function:
            return
        if inspect.isgenerator(answer) or not callable(answer):
            raise InputError(f"give the function itself, without calling it, not {shown(answer)}")
        yields = inspect.isgeneratorfunction
        if yields(self._solution) and not yields(answer):
            name = getattr(answer, "__name__", "your function")
            raise NotAttempted(
                f"`{name}` has no `yield` yet: an experiment yields the loss once per step."
            )


_EXERCISES: dict[str, Exercise] = {}


def check_of(id: str, solution: Callable[..., Any]) -> Callable[[Check], Check]:
    """Make the decorated function the check of the exercise ``id``; see ``Exercise``."""

    def register(check: Check) -> Check:
        _EXERCISES[id] = Exercise(id, solution, check)
        return check

    return register


def exercise(id: str) -> Exercise:
    """Return the exercise called ``id``; an `InputError` names the nearest."""
    modules = Path(__file__).parent.glob("lesson_*.py")
    lessons = sorted(module.stem.removeprefix("lesson_") for module in modules)
    lesson = one_of(str(id).partition("-")[0], lessons, "lesson")
    return _EXERCISES[one_of(id, of_lesson(lesson), "exercise")]


def of_lesson(lesson: str) -> list[str]:
    """Return the ids of all exercises of lesson ``"06"``."""
    importlib.import_module(f"{__package__}.lesson_{lesson}")
    return sorted(id for id in _EXERCISES if id.startswith(lesson))


# --- what a solution needs ---------------------------------------------------------------------


def _imports(source: str, module: ModuleType) -> Iterator[str]:
    """Yield an import for each name of its module that the source needs and the notebook lacks."""
    from IPython import get_ipython

    there = getattr(get_ipython(), "user_ns", {})
    tables = [symtable.symtable(source, "solution", "exec")]
    own = set(tables[0].get_identifiers())
    names = set()
    while tables:
        table = tables.pop()
        names.update(each.get_name() for each in table.get_symbols() if each.is_global())
        tables += table.get_children()
    for name in sorted(names & vars(module).keys() - own - there.keys()):
        value = vars(module)[name]
        if inspect.ismodule(value):
            yield f"import {value.__name__} as {name}".removesuffix(f" as {value.__name__}")
        else:
            home = sys.modules.get(getattr(value, "__module__", None), module)
            yield f"from {(home if hasattr(home, name) else module).__name__} import {name}"


# --- what to say when the learner's code raises ------------------------------------------------


def _because(error: BaseException, answer: Any) -> str:
    what = traceback.format_exception_only(error)[-1].strip()[:400]
    if isinstance(error, InputError):
        return f"Your answer cannot be used: {error}"
    if not callable(answer):
        return f"Your answer could not be checked: {shown(answer)} led to {what}"
    code = answer.__code__ if inspect.isfunction(answer) else None
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code and frame.filename == code.co_filename]
    if not own:
        return f"Your function raised {what}"
    line = f": `{own[-1].line}`" if own[-1].line else ""
    return f"Your function raised {what}\n\nIt happened in line {own[-1].lineno}{line}"


LOOKS = {"correct": GOOD, "not yet": Look("↻", WARM.colour), "not attempted": QUIET}


def exercise_card(feedback: Feedback) -> Card:
    """Show what a check found."""
    title, look = f"Exercise {feedback.id}", LOOKS[feedback.status]
    return build_card(look, feedback.status, title, body=feedback.message).show()
