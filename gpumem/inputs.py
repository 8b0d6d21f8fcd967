"""What a user gave us: the error that refuses it, and how records are read."""

import dataclasses
import difflib
import numbers
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Kind = TypeVar("Kind")

PRECISIONS = ("fp32", "amp-fp16", "amp-bf16", "bf16")

#: Choices that a refusal names; of more, it names a dozen.
MOST_NAMED = 30


class InputError(ValueError):
    """A value we were given cannot be used. The message says which, and what would do."""


def one_of(value: Any, allowed: Iterable[str], what: str) -> str:
    """Return the one of ``allowed`` that ``value`` is, ignoring case and ``_`` for ``-``, or raise
    an `InputError` that names it, the nearest choice, and all of them (a dozen of very many)."""
    allowed = [str(choice) for choice in allowed]
    folded = {choice.lower().replace("_", "-"): choice for choice in allowed}
    key = (value if isinstance(value, str) else shown(value))[:200].lower().replace("_", "-")
    if key in folded:
        return folded[key]
    near = difflib.get_close_matches(key, folded, n=1, cutoff=0.4)
    hint = f" Did you mean {folded[near[0]]!r}?" if near else ""
    known = allowed
    if len(allowed) > MOST_NAMED:
        known = [*allowed[:12], f"and {len(allowed) - 12} more"]
    raise InputError(f"unknown {what} {shown(value)}.{hint} Known: {', '.join(known)}.")


def positive_int(value: Any, what: str, *, most: int = 1 << 31) -> int:
    """Return ``value`` as a whole number from 1 to ``most``, or raise an `InputError`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InputError(f"{what} must be a whole number of at least 1, not {shown(value)}")
    if not 1 <= value <= most:
        raise InputError(f"{what} must be from 1 to {most}, not {shown(value)}")
    return int(value)


def boolean(value: Any, what: str) -> bool:
    """Return ``value``, or raise an `InputError` if it is neither true nor false."""
    if not isinstance(value, bool):
        raise InputError(f"{what} must be true or false, not {shown(value)}")
    return value


def size(text: str, what: str = "it") -> int:
    """Return the bytes that ``64GiB`` or ``22 GB`` means, or raise an `InputError`."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?) ?(?:([KMGT])(I?))?B?", text.upper())
    if found is None:
        raise InputError(f"{what} must be a size such as 64GiB, not {text[:40]!r}")
    power = " KMGT".index(found[2] or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def shown(value: Any) -> str:
    """Return ``value`` as Python writes it, short enough for a sentence."""
    try:
        text = repr(value)
    except Exception:  # thousands of digits, lists without end, or a `__repr__` that fails
        return f"a {type(value).__name__} that cannot be written out"
    return text if len(text) <= 80 else f"{text[:79]}…"


def read_record(kind: type[Kind], record: Any, what: str) -> Kind:
    """Convert what JSON gave to ``kind``, a dataclass whose annotations state types and bounds.

    Bounds are ``Annotated[int, msgspec.Meta(ge=0)]``; what relates several fields is checked in
    ``__post_init__``, which raises ``ValueError`` (an ``InputError`` is one).

    Raises:
        InputError: a field is missing, unknown, of another type or out of its bounds.
    """
    import msgspec  # `labkit doctor` imports this module and must start where it is missing

    if isinstance(record, Mapping):
        known = [field.name for field in dataclasses.fields(kind)]
        for name in record:
            if name not in known:
                raise InputError(f"{what} has no field {shown(name)}")
    try:
        return msgspec.convert(record, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{what}: {str(error)[:300]}") from None
