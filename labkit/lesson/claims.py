"""What the articles claim, and the verdict on a measured value by the rule of its claim.

The claims and their rules are in ``claims.toml``, fixed before anything was measured. *Overstated*
means that an article has the direction right and promises more than we found, *understated* that it
promises less. Usually a smaller value than claimed is overstated; where a claim promises little of
what is measured, a larger one is (``Claim.overstated_if``).
"""

import functools
import math
import numbers
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from gpumem.inputs import one_of, read_record, shown
from gpumem.units import format_bytes

CLAIMS_FILE = Path(__file__).with_name("claims.toml")
#: A measured value: a number, yes or no, or nothing.
Value = float | bool | None
Unit = Literal[
    "share",  # 0.4 is shown as 40 %
    "ratio",  # 2.0 is shown as 2.00 ×
    "bytes",
    "bytes_per_parameter",
    "GB",  # 1000 ** 3 bytes, because the articles' figures are
    "GB/s",
    "exponent",  # slope of log(bytes) over log(size): 1 is linear, 2 quadratic
    "relative_error",
    "yes_no",
]


class Verdict(StrEnum):
    """How a claim came out. (What a lesson hands in is its `Result`.)"""

    SUPPORTED = "supported"
    OVERSTATED = "overstated"
    UNDERSTATED = "understated"
    WRONG = "wrong"
    DEPENDS = "depends"
    NOT_TESTABLE = "not testable here"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim and the rule it is judged by.

    ``says`` paraphrases the article, ``claimed`` is its figure as text, ``measure`` says which
    value to pass to ``judge`` and ``unit`` what that value counts. A figure is judged by the
    interval ``supported`` and the limits ``wrong_below`` and ``wrong_above``; a yes-or-no claim
    by ``expected``. ``overstated_if`` says on which side of the interval the article promised too
    much: "more" where it promises little of what is measured, as in "constant memory".
    ``assumptions`` is what we had to add to make the claim testable. ``sources`` are the letters of
    the articles, ``cited`` their titles.
    """

    id: str
    lesson: Annotated[str, Meta(pattern=r"^[0-9]{2}\Z")]
    sources: tuple[str, ...]
    cited: tuple[str, ...]
    says: str
    claimed: str
    measure: str
    unit: Unit
    supported: tuple[float, float] | None = None
    wrong_below: float | None = None
    wrong_above: float | None = None
    expected: bool | None = None
    overstated_if: Literal["less", "more"] = "less"
    assumptions: str = ""
    needs: Literal["any", "gpu"] = "any"

    @property
    def rule(self) -> str:
        """The rule as a sentence."""
        if self.supported is None:
            return f"Supported if the answer is {format_value(self.expected, self.unit)}."
        low, high = self.supported
        upper = "upwards" if math.isinf(high) else f"to {format_value(high, self.unit)}"
        text = f"Supported from {format_value(low, self.unit)} {upper}"
        limits = {"below": self.wrong_below, "above": self.wrong_above}
        wrong = [f"{k} {format_value(v, self.unit)}" for k, v in limits.items() if v is not None]
        text = f"{text}; wrong {' or '.join(wrong)}." if wrong else f"{text}."
        return f"{text} More is overstated." if self.overstated_if == "more" else text


@functools.cache
def all_claims() -> Mapping[str, Claim]:
    """Return every claim of the course by its id, in the order of the lessons."""
    document = tomllib.loads(CLAIMS_FILE.read_text(encoding="utf-8"))
    claims = {}
    for id, entry in document["claims"].items():
        entry |= {"id": id, "cited": [document["sources"][letter] for letter in entry["sources"]]}
        claims[id] = read_record(Claim, entry, f"claim {id!r}")
    return claims


def article_names() -> dict[str, str]:
    """Return a short name of each article by its letter."""
    titles = tomllib.loads(CLAIMS_FILE.read_text(encoding="utf-8"))["sources"]
    return {letter: re.split(", “| \\(", title)[0].strip("“”") for letter, title in titles.items()}


def find(id: str) -> Claim:
    """Return the claim called ``id``; an `InputError` names the nearest if there is none."""
    return all_claims()[one_of(id, all_claims(), "claim")]


def of_lesson(lesson: str) -> list[Claim]:
    """Return the claims that lesson ``"06"`` judges."""
    return [entry for entry in all_claims().values() if entry.lesson == lesson]


def format_value(value: Value, unit: str) -> str:
    """Return a value with its unit: ``"12.9 %"``, ``"3.40 ×"``, ``"yes"``."""
    if value is None:
        return "–"
    if unit == "yes_no":
        return "yes" if value else "no"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "share":
        percent = value * 100
        text = f"{percent:.1f}".removesuffix(".0") if abs(percent) >= 0.1 else f"{percent:.2g}"
        return f"{text} %"
    if unit == "relative_error":
        return f"{value:.2g}"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2
    text = f"{value:.{digits}f}" if size >= 0.01 or value == 0 else f"{value:.2g}"
    suffix = {"ratio": " ×", "bytes_per_parameter": " bytes per parameter", "exponent": ""}
    return text + suffix.get(unit, f" {unit}")


def format_found(measured: Any, unit: str) -> str:
    """Return the measured value of a judgement record: a text, a value, or one per condition."""
    if isinstance(measured, Mapping):
        return "; ".join(f"{name}: {format_found(value, unit)}" for name, value in measured.items())
    return measured if isinstance(measured, str) else format_value(measured, unit)


# --- judging -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A claim, what was found, and the verdict.

    ``measured`` is a number, a bool, a mapping from a condition to one of these, or None where
    there was nothing to judge. ``by_condition`` gives each condition's verdict, ``mode`` where
    the values come from (as ``Run.label`` puts it), ``reasons`` why the verdict is what it is.
    """

    claim: Claim
    verdict: Verdict
    measured: Value | Mapping[str, Value] = None
    mode: str | None = None
    reasons: tuple[str, ...] = ()
    by_condition: Mapping[str, Verdict] = field(default_factory=dict)

    def _ipython_display_(self) -> None:
        """Show nothing: ``lab.claim`` has shown the card, and a cell may end with that call."""


def judge(id: str, measured: Any, mode: str | None = None) -> Judgement:
    """Judge the claim called ``id``. A value that cannot be judged is a verdict, not an error.

    Args:
        id: a claim of ``claims.toml``, or an `InputError` names the nearest.
        measured: a number or bool in the claim's unit; a mapping from a condition (``"batch 8"``)
            to such values, judged one by one; or None where it could not be measured.
        mode: where the values come from, as ``Run.label`` puts it. A claim that needs a GPU
            takes only values "measured on …".
    """
    claim = find(id)
    if claim.needs == "gpu" and not (mode or "").startswith("measured"):
        origin = f" The value we have was {mode}." if mode and measured is not None else ""
        reason = f"This claim is about a GPU and must be measured on one.{origin}"
        return Judgement(claim=claim, verdict=Verdict.NOT_TESTABLE, mode=mode, reasons=(reason,))
    if not isinstance(measured, Mapping):
        value, verdict, reason = _judge_one(claim, measured)
        return Judgement(claim=claim, verdict=verdict, measured=value, mode=mode, reasons=(reason,))
    judged = {str(name): _judge_one(claim, value) for name, value in measured.items()}
    reasons = [f"{name}: {reason}" for name, (_, _, reason) in judged.items()]
    values = {name: value for name, (value, _, _) in judged.items()}
    verdicts = {name: verdict for name, (_, verdict, _) in judged.items()}
    return Judgement(
        claim=claim,
        verdict=_verdict_of_all(claim, values, set(verdicts.values())),
        measured=values,
        mode=mode,
        reasons=tuple(reasons or ["No condition was given."]),
        by_condition=verdicts,
    )


def _verdict_of_all(claim: Claim, values: Mapping[str, Value], found: set[Verdict]) -> Verdict:
    found.discard(Verdict.NOT_TESTABLE)
    if len(found) < 2:
        return found.pop() if found else Verdict.NOT_TESTABLE
    if found == {Verdict.OVERSTATED, Verdict.WRONG}:
        # All may miss on the overstated side, so that no setting between agrees.
        low, high = claim.supported
        known = [value for value in values.values() if value is not None]
        if min(known) > high if claim.overstated_if == "more" else max(known) < low:
            return Verdict.OVERSTATED
    return Verdict.DEPENDS


def _judge_one(claim: Claim, measured: Any) -> tuple[Value, Verdict, str]:
    value, problem = plain_value(measured)
    if not problem and isinstance(value, bool) != (claim.unit == "yes_no"):
        kind = "yes or no" if claim.unit == "yes_no" else "a number"
        value, problem = None, f"The claim asks for {kind}, and was given {value!r}."
    if problem:
        return None, Verdict.NOT_TESTABLE, problem
    text = format_value(value, claim.unit)
    if claim.unit == "yes_no":
        verdict = Verdict.SUPPORTED if value == claim.expected else Verdict.WRONG
        return value, verdict, f"{text}, {'as' if value == claim.expected else 'not as'} claimed."
    verdict, comparison = _compare(claim, value)
    return value, verdict, f"{text} {comparison}"


def _compare(claim: Claim, value: float) -> tuple[Verdict, str]:
    low, high = claim.supported
    for side, limit in (("below", claim.wrong_below), ("above", claim.wrong_above)):
        if limit is not None and (value < limit if side == "below" else value > limit):
            text = f"is {side} {format_value(limit, claim.unit)}, where we call the claim wrong."
            return Verdict.WRONG, text
    if low <= value <= high:
        return Verdict.SUPPORTED, "agrees with the claim."
    side = "less" if value < low else "more"
    verdict = Verdict.OVERSTATED if side == claim.overstated_if else Verdict.UNDERSTATED
    return verdict, f"is {side} than claimed."


def plain_value(value: Any) -> tuple[Value, str]:
    """Return ``value`` as a finite float or a bool, and a sentence where it is neither.

    One-element tensors and arrays count as the number they hold. Never raises.
    """
    if value is None:
        return None, "It was not measured here."
    try:
        number = value if isinstance(value, numbers.Real) else value.item()
        if isinstance(number, numbers.Real) and not isinstance(number, bool):
            number = float(number)
    except Exception as error:  # anything at all may be handed in; the sentence says what
        kind = type(error).__name__
        return None, f"{shown(value)} is not a number or yes or no ({kind})."
    if isinstance(number, bool):
        return number, ""
    if not isinstance(number, float) or not math.isfinite(number):
        return None, f"{shown(number)} is not a finite number."
    return number, ""
