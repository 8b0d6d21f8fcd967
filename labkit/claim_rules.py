"""What the articles claim, the rule each claim is judged by, and values written for people.

The claims and their rules are in ``claims.toml``, fixed before anything was measured. This
module reads and checks that file; ``labkit.claims`` judges by it.

Limits: a rule is one interval per claim, so an article's sentence that names several figures is
several entries.
"""

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from labkit.memory import InputError, format_bytes, one_of

CLAIMS_FILE = Path(__file__).with_name("claims.toml")
Value = float | bool | None
"""A measured value: a number, yes or no, or nothing."""

UNITS = (
    "share",  # 0.4 is shown as 40 %
    "ratio",  # 2.0 is shown as 2.00 ×
    "bytes",
    "bytes_per_parameter",
    "GB",  # 1000 ** 3 bytes, because the articles' figures are
    "GB/s",
    "exponent",  # slope of log(bytes) over log(size): 1 is linear, 2 quadratic
    "relative_error",
    "yes_no",
)


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
    by ``expected``. ``assumptions`` is what we had to add to make the claim testable.
    ``needs`` is ``"any"`` or ``"gpu"``. ``sources`` are the letters of the articles, ``cited``
    their titles.
    """

    id: str
    lesson: str
    sources: tuple[str, ...]
    cited: tuple[str, ...]
    says: str
    claimed: str
    measure: str
    unit: str
    supported: tuple[float, float] | None = None
    wrong_below: float | None = None
    wrong_above: float | None = None
    expected: bool | None = None
    assumptions: str = ""
    needs: str = "any"

    @property
    def rule(self) -> str:
        """The rule as a sentence."""
        if self.supported is None:
            return f"Supported if the answer is {format_value(self.expected, self.unit)}."
        text = f"Supported {self._interval()}"
        limits = []
        if self.wrong_below is not None:
            limits.append(f"below {format_value(self.wrong_below, self.unit)}")
        if self.wrong_above is not None:
            limits.append(f"above {format_value(self.wrong_above, self.unit)}")
        return f"{text}; wrong {' or '.join(limits)}." if limits else f"{text}."

    def _interval(self) -> str:
        low, high = (format_value(edge, self.unit) for edge in self.supported)
        if math.isinf(self.supported[1]):
            return f"from {low} upwards"
        return f"from {low} to {high}"


def load(path: Path = CLAIMS_FILE) -> dict[str, Claim]:
    """Read a file of claims.

    Raises:
        InputError: an entry is not one that can be judged; the message names it.
    """
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    titles = document["sources"]
    return {id: _read_claim(id, entry, titles) for id, entry in document["claims"].items()}


@functools.cache
def all_claims() -> Mapping[str, Claim]:
    """Every claim of the course by its id, in the order of the lessons."""
    return load()


def find(id: str) -> Claim:
    """The claim called ``id``.

    Raises:
        InputError: there is none; the message names the nearest.
    """
    return all_claims()[one_of(id, all_claims(), "claim")]


def of_lesson(lesson: str) -> list[Claim]:
    """The claims that lesson ``"06"`` judges."""
    return [entry for entry in all_claims().values() if entry.lesson == lesson]


def _read_claim(id: str, entry: Mapping[str, Any], titles: Mapping[str, str]) -> Claim:
    known = {f.name for f in fields(Claim)} - {"id", "cited"}
    if unknown := set(entry) - known:
        raise InputError(f"claim {id!r} has no field {sorted(unknown)[0]!r}")
    required = {"lesson", "sources", "says", "claimed", "measure", "unit"}
    if missing := required - set(entry):
        raise InputError(f"claim {id!r} needs the field {sorted(missing)[0]!r}")
    values = dict(entry)
    one_of(values["unit"], UNITS, f"unit in claim {id!r}")
    one_of(values.get("needs", "any"), ("any", "gpu"), f"needs in claim {id!r}")
    if not (len(values["lesson"]) == 2 and values["lesson"].isdecimal()):
        raise InputError(f"claim {id!r}: lesson must be two digits, not {values['lesson']!r}")
    values["sources"] = tuple(
        one_of(letter, titles, f"source in claim {id!r}") for letter in values["sources"]
    )
    values["cited"] = tuple(titles[letter] for letter in values["sources"])
    if "supported" in values:
        values["supported"] = tuple(values["supported"])
    read = Claim(id=id, **values)
    _check_rule(read)
    return read


def _check_rule(claim: Claim) -> None:
    if claim.unit == "yes_no":
        figures = (claim.supported, claim.wrong_below, claim.wrong_above)
        if not isinstance(claim.expected, bool) or figures != (None, None, None):
            raise InputError(f"claim {claim.id!r} is yes or no: it needs expected, and no interval")
        return
    if claim.expected is not None or claim.supported is None:
        raise InputError(f"claim {claim.id!r} names a figure: it needs supported, not expected")
    low, high = claim.supported
    below = -math.inf if claim.wrong_below is None else claim.wrong_below
    above = math.inf if claim.wrong_above is None else claim.wrong_above
    if not below <= low <= high <= above:
        raise InputError(f"claim {claim.id!r}: wrong_below <= supported <= wrong_above must hold")


def format_value(value: Value, unit: str) -> str:
    """A value for people: ``"12.9 %"``, ``"3.40 ×"``, ``"2.00 bytes per parameter"``, ``"yes"``."""
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
