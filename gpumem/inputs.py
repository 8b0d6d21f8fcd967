"""Input errors, reading of records, byte units and the names of precisions."""

import dataclasses
import difflib
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

Kind = TypeVar("Kind")

PRECISIONS = ("fp32", "amp-fp16", "amp-bf16", "bf16")

#: Choices that a refusal names; of more, it names a dozen.
MOST_NAMED = 30
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

#: Set in the environment of a process whose GPU is not there: see `phantom_gpu`.
PHANTOM_VARIABLE = "LABKIT_PHANTOM"
#: Holds what such a process is to watch itself for, as JSON of `phantom_gpu.watch_script.Orders`.
WATCH_VARIABLE = "LABKIT_PHANTOM_WATCH"


class InputError(ValueError):
    """A value we were given cannot be used. The message says which, and what would do."""


def as_printed(found: Any, printer: Any, cycle: bool) -> None:
    """Show it in a notebook as `print` writes it: a dataclass's ``_repr_pretty_``."""
    printer.text(str(found))


def format_bytes(nbytes: int | float) -> str:
    """Return ``nbytes`` with a binary unit: ``"1.50 GiB"``, ``"212 MiB"``, ``"512 B"``.

    Picks the unit so that something other than zero always shows.
    """
    sign, size = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    for unit, scale in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= scale * 0.9995:
            value = size / scale
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{sign}{value:.{digits}f} {unit}"
    return f"{sign}{size:.0f} B"


def table_lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Write a table in columns as wide as needed; all but the last are flush right."""
    table = [headings, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings) - 1)]
    lines = []
    for row in table:
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=False)]
        lines.append("  " + "  ".join([*cells, row[-1]]))
    return lines


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
