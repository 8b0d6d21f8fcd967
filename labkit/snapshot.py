"""Reading the memory snapshots that PyTorch writes, without running what they say.

A snapshot is a pickle, and a pickle is a program: ``pickle.load`` would run whatever a file from
anywhere says. Refusing in ``Unpickler.find_class`` stops that, but leaves small files that ask for
gigabytes (a huge memo index) or crash the interpreter (hashing a deeply nested key). Plain data
needs few of pickle's instructions, so this reader knows only those, and cannot call anything.

Limits: protocols 2 to 5, as Python has written by default since 3.0. The format inside is private
to PyTorch and may change: it is checked for the two lists that lessons read, and no further.
"""

import io
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.memory import MIB, InputError, format_bytes

_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
_NUMBERS = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"})
_TEXTS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
_BYTES = frozenset({"SHORT_BINBYTES", "BINBYTES", "BINBYTES8"})
_SCALARS = _NUMBERS | _TEXTS | _BYTES
_NOTHING_TO_DO = frozenset({"PROTO", "FRAME", "STOP"})
_MARK = object()
#: Parts of a snapshot in which shared ones count each time. Events share the frames of their stack.
MOST_PARTS = 1 << 28


def read_snapshot(path: str | Path, *, most_bytes: int = 64 * MIB) -> dict[str, Any]:
    """Read a memory snapshot that ``torch.cuda.memory._dump_snapshot`` wrote, running nothing.

    Args:
        path: the pickle file; it may come from anywhere.
        most_bytes: refuse larger files. Reading takes about a second per 3 MiB.

    Returns:
        The snapshot: a dictionary with the lists ``segments`` and ``device_traces``.

    Raises:
        InputError: the file is missing, too large, truncated, not a snapshot, or holds anything
            but plain data (numbers, text, lists, tuples, dictionaries).
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise InputError(f"cannot read the snapshot {str(path)!r}: {error.strerror}") from error
    if len(data) > most_bytes:
        raise InputError(
            f"refused {path.name!r}: larger than {format_bytes(most_bytes)}; "
            "record fewer events or raise most_bytes"
        )
    try:
        snapshot = _read_plain_pickle(data)
    except InputError as error:
        raise InputError(f"refused {path.name!r}: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise InputError(f"refused {path.name!r}: the pickle is damaged ({error})") from error
    if not isinstance(snapshot, dict) or not all(
        isinstance(snapshot.get(key), list) for key in ("segments", "device_traces")
    ):
        raise InputError(f"refused {path.name!r}: not a memory snapshot of PyTorch")
    return snapshot


def _read_plain_pickle(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
        name = opcode.name
        if name in _SCALARS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in _BUILDERS:
            _BUILDERS[name](stack)
        elif name not in _NOTHING_TO_DO:
            raise InputError(f"it holds more than plain data (pickle instruction {name})")
    (result,) = stack
    _refuse_unfolding(result)
    return result


def _refuse_unfolding(result: Any) -> None:
    """Refuse what is small only because it says "the same again", within itself or many times.

    Raises:
        InputError: it contains itself, or has more than ``MOST_PARTS`` parts when written out.
    """
    parts: dict[int, int] = {}  # of each container that is done, by its identity
    begun: set[int] = set()
    waiting = [(result, False)]
    while waiting:
        item, done = waiting.pop()
        if not isinstance(item, list | tuple | dict) or id(item) in parts:
            continue
        inside = item.values() if isinstance(item, dict) else item
        if done:
            count = 1 + sum(parts.get(id(each), 1) for each in inside)
            if count > MOST_PARTS:
                raise InputError(f"it has more than {MOST_PARTS} parts when written out")
            parts[id(item)] = count
        elif id(item) in begun:
            raise InputError("it contains itself")
        else:
            begun.add(id(item))
            waiting.append((item, True))
            waiting += [(each, False) for each in inside if isinstance(each, list | tuple | dict)]


def _since_mark(stack: list[Any]) -> list[Any]:
    items = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _set_items(stack: list[Any], items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int):  # a nested key could exhaust the C stack
            raise InputError(f"a dictionary key is a {type(key).__name__}")
        _top(stack, dict)[key] = value


def _top(stack: list[Any], kind: type) -> Any:
    if type(stack[-1]) is not kind:
        raise ValueError(f"expected a {kind.__name__}, found a {type(stack[-1]).__name__}")
    return stack[-1]


def _tuple_of(count: int) -> Callable[[list[Any]], None]:
    def build(stack: list[Any]) -> None:
        items = [stack.pop() for _ in range(count)]
        stack.append(tuple(items[::-1]))

    return build


def _append(stack: list[Any]) -> None:
    item = stack.pop()
    _top(stack, list).append(item)


def _appends(stack: list[Any]) -> None:
    items = _since_mark(stack)
    _top(stack, list).extend(items)


def _set_item(stack: list[Any]) -> None:
    value, key = stack.pop(), stack.pop()
    _set_items(stack, [key, value])


def _pop_mark_tuple(stack: list[Any]) -> None:
    stack.append(tuple(_since_mark(stack)))


_BUILDERS: dict[str, Callable[[list[Any]], None]] = {
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": lambda stack: _set_items(stack, _since_mark(stack)),
    "TUPLE": _pop_mark_tuple,
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
}
