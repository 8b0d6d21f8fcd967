"""Claims on trial: judging what was measured, and remembering the verdicts.

- ``judge`` compares a measured value with the claim's rule and says why it came out so.
- ``claim`` does that in a notebook: it shows a card and remembers the verdict in ``session``.
- ``expect`` is the other kind of check: for what must hold on any machine. It raises.

Words: a verdict is about the figure the article names. *Overstated* means that the article's
figure is larger than ours, *understated* that it is smaller; both have the direction right.

Limits: nothing here knows how a value was measured; ``mode`` is believed.
"""

import math
import numbers
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.claim_rules import Claim, Value, Verdict, all_claims, find, format_value, of_lesson

__all__ = [
    "Claim",
    "ExpectationFailed",
    "Judgement",
    "Verdict",
    "all_claims",
    "claim",
    "expect",
    "find",
    "format_value",
    "judge",
    "of_lesson",
    "plain_value",
    "recorded",
    "session",
]


class ExpectationFailed(AssertionError):  # noqa: N818 (a sentence, not a category)
    """Something that must hold on any machine does not. The message says what."""


# --- judging -----------------------------------------------------------------------------------


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
        """Nothing: ``claim`` has shown the card, and a cell may end with that call."""


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
    verdict = found.pop() if len(found) == 1 else Verdict.DEPENDS if found else None
    return Judgement(
        claim=claim,
        verdict=verdict or Verdict.NOT_TESTABLE,
        measured={name: value for name, (value, _, _) in judged.items()},
        mode=mode,
        reasons=tuple(reasons),
        by_condition=verdicts,
    )


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
    if value < low:
        return Verdict.OVERSTATED, "is less than claimed."
    if value > high:
        return Verdict.UNDERSTATED, "is more than claimed."
    return Verdict.SUPPORTED, "agrees with the claim."


def plain_value(value: Any) -> tuple[Value, str]:
    """``value`` as a finite float or a bool, and a sentence where it is neither.

    One-element tensors and arrays count as the number they hold. Never raises.
    """
    if value is None:
        return None, "It was not measured here."
    if isinstance(value, bool):
        return value, ""
    try:
        held = value if isinstance(value, numbers.Real) else value.item()
        counts = isinstance(held, numbers.Real) and not isinstance(held, bool)
        number = float(held) if counts else held
    except Exception as error:  # anything at all may be handed in; the sentence says what
        kind = type(error).__name__
        return None, f"{_quoted(value)} is not a number or yes or no ({kind})."
    if isinstance(number, bool):
        return number, ""
    if not isinstance(number, float) or not math.isfinite(number):
        return None, f"{_quoted(number)} is not a finite number."
    return number, ""


def _quoted(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # a number too long for Python to write, or an object that cannot be shown
        return f"A {type(value).__name__} that cannot be written out"


# --- in a notebook -----------------------------------------------------------------------------

session: list[Judgement] = []
"""The judgements of this session, the latest of each claim. ``lab.start`` clears it."""


def claim(id: str, measured: Any, mode: str | None = None) -> Judgement:
    """Judge a claim, show its card with the verdicts recorded on GPUs, and remember it.

    Takes ``id``, ``measured`` and ``mode`` as ``judge`` does. Where a claim needs a GPU and
    ``mode`` is not given, a value counts as measured on this machine's GPU if it has one.

    Raises:
        InputError: there is no such claim.
    """
    from labkit.show import cards

    if mode is None and measured is not None and find(id).needs == "gpu":
        mode = _mode_here()
    judgement = judge(id, measured, mode)
    session[:] = [old for old in session if old.claim.id != judgement.claim.id]
    session.append(judgement)
    cards.claim_card(judgement, recorded(judgement.claim))
    return judgement


def _mode_here() -> str | None:
    from labkit.hardware import machine

    here = machine()
    return f"measured on {here.name}" if here.can_measure else None


def recorded(claim: Claim) -> list[dict[str, Any]]:
    """What GPUs recorded: ``gpu``, ``verdict``, ``measured``, ``versions`` and ``date`` of each."""
    from labkit import results

    return [
        {
            "gpu": result.machine["name"],
            "verdict": entry["verdict"],
            "measured": entry.get("measured"),
            "versions": result.machine.get("versions", {}),
            "date": result.date,
        }
        for result in results.recorded(claim.lesson)
        for entry in result.judgements
        if entry["id"] == claim.id and entry["verdict"] != Verdict.NOT_TESTABLE
    ]


def expect(condition: Any, message: str) -> None:
    """Check what must hold on any machine; ``message`` says what that is.

    Raises:
        ExpectationFailed: ``condition`` is false.
    """
    if not condition:
        raise ExpectationFailed(message)
    print(f"✓ {message}")
