"""What the articles claim, the rule each claim is judged by, and how values are written.

The claims and their rules are in ``claims.toml``, fixed before anything was measured;
``labkit.lesson.verdicts`` judges by them.
"""

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from gpumem.inputs import format_bytes, one_of, read_record

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
    """How a claim came out."""

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
    ``assumptions`` is what we had to add to make the claim testable.
    ``needs`` is ``"any"`` or ``"gpu"``. ``sources`` are the letters of the articles, ``cited``
    their titles.
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
        limits = []
        if self.wrong_below is not None:
            limits.append(f"below {format_value(self.wrong_below, self.unit)}")
        if self.wrong_above is not None:
            limits.append(f"above {format_value(self.wrong_above, self.unit)}")
        text = f"{text}; wrong {' or '.join(limits)}." if limits else f"{text}."
        return f"{text} More is overstated." if self.overstated_if == "more" else text


@functools.cache
def all_claims() -> Mapping[str, Claim]:
    """Return every claim of the course by its id, in the order of the lessons."""
    document = tomllib.loads(CLAIMS_FILE.read_text(encoding="utf-8"))
    titles = document["sources"]
    claims = {}
    for id, entry in document["claims"].items():
        entry |= {"id": id, "cited": [titles[letter] for letter in entry["sources"]]}
        claims[id] = read_record(Claim, entry, f"claim {id!r}")
    return claims


def article_names() -> dict[str, str]:
    """Return a short name of each article by its letter."""
    titles = tomllib.loads(CLAIMS_FILE.read_text(encoding="utf-8"))["sources"]
    names = {letter: title.partition(", “")[0] for letter, title in titles.items()}
    return {letter: name.partition(" (")[0].strip("“”") for letter, name in names.items()}


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
