"""Judge a measured value by the rule of its claim, and say why it came out so.

*Overstated* means that an article has the direction right and promises more than we found,
*understated* that it promises less. Usually a smaller value than claimed is overstated; where a
claim promises little of what is measured, a larger one is (``Claim.overstated_if``).
"""

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpumem.inputs import shown
from labkit.lesson.claims import Claim, Value, Verdict, find, format_value


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
        id: a claim of ``claims.toml``.
        measured: a number or bool in the claim's unit; a mapping from a condition (``"batch 8"``)
            to such values, judged one by one; or None where it could not be measured.
        mode: where the values come from, as ``Run.label`` puts it. A claim that needs a GPU
            takes only values "measured on …".

    Raises:
        InputError: there is no such claim.
    """
    claim = find(id)
    if claim.needs == "gpu" and not (mode or "").startswith("measured"):
        origin = f" The value we have was {mode}." if mode and measured is not None else ""
        reason = f"This claim is about a GPU and must be measured on one.{origin}"
        return Judgement(claim=claim, verdict=Verdict.NOT_TESTABLE, mode=mode, reasons=(reason,))
    if not isinstance(measured, Mapping):
        value, verdict, reason = _judge_one(claim, measured)
        return Judgement(claim=claim, verdict=verdict, measured=value, mode=mode, reasons=(reason,))
    return _judge_conditions(claim, measured, mode)


def _judge_conditions(claim: Claim, measured: Mapping[Any, Any], mode: str | None) -> Judgement:
    judged = {str(name): _judge_one(claim, value) for name, value in measured.items()}
    verdicts = {name: verdict for name, (_, verdict, _) in judged.items()}
    reasons = [f"{name}: {reason}" for name, (_, _, reason) in judged.items()]
    found = {verdict for verdict in verdicts.values() if verdict != Verdict.NOT_TESTABLE}
    if not judged:
        reasons = ["No condition was given."]
    if not found:
        verdict = Verdict.NOT_TESTABLE
    elif len(found) == 1:
        verdict = found.pop()
    elif found == {Verdict.OVERSTATED, Verdict.WRONG} and _all_fall_short(claim, judged):
        verdict = Verdict.OVERSTATED
    else:
        verdict = Verdict.DEPENDS
    return Judgement(
        claim=claim,
        verdict=verdict,
        measured={name: value for name, (value, _, _) in judged.items()},
        mode=mode,
        reasons=tuple(reasons),
        by_condition=verdicts,
    )


def _all_fall_short(claim: Claim, judged: Mapping[str, tuple[Value, Verdict, str]]) -> bool:
    """Whether all conditions miss on the overstated side, so that no setting between agrees."""
    values = [value for value, _, _ in judged.values() if value is not None]
    low, high = claim.supported
    if claim.overstated_if == "more":
        return all(value > high for value in values)
    return all(value < low for value in values)


def _judge_one(claim: Claim, measured: Any) -> tuple[Value, Verdict, str]:
    value, problem = plain_value(measured)
    if not problem and isinstance(value, bool) != (claim.unit == "yes_no"):
        kind = "yes or no" if claim.unit == "yes_no" else "a number"
        value, problem = None, f"The claim asks for {kind}, and was given {value!r}."
    if problem:
        return None, Verdict.NOT_TESTABLE, problem
    shown = format_value(value, claim.unit)
    if claim.unit == "yes_no":
        verdict = Verdict.SUPPORTED if value == claim.expected else Verdict.WRONG
        return value, verdict, f"{shown}, {'as' if value == claim.expected else 'not as'} claimed."
    verdict, comparison = _compare(claim, value)
    return value, verdict, f"{shown} {comparison}"


def _compare(claim: Claim, value: float) -> tuple[Verdict, str]:
    low, high = claim.supported
    if claim.wrong_below is not None and value < claim.wrong_below:
        limit = format_value(claim.wrong_below, claim.unit)
        return Verdict.WRONG, f"is below {limit}, where we call the claim wrong."
    if claim.wrong_above is not None and value > claim.wrong_above:
        limit = format_value(claim.wrong_above, claim.unit)
        return Verdict.WRONG, f"is above {limit}, where we call the claim wrong."
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
    if isinstance(value, bool):
        return value, ""
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
