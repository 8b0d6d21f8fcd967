"""Reading the memory snapshots that PyTorch writes, without running what they say.

A snapshot is a pickle, and ``pickle.load`` calls whatever a file names. A snapshot needs no names:
it is numbers, text, lists, tuples and dictionaries.

Limits: a damaged file may ask for much memory while it is read, as any pickle can. The format is
private to PyTorch and may change: only the two lists that lessons read are checked.
"""

import pickle
from pathlib import Path
from typing import Any

from labkit.values import MIB, InputError, format_bytes

MOST_BYTES = 64 * MIB


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise InputError(f"it holds more than plain data ({module}.{name})")


def read_snapshot(path: str | Path) -> dict[str, Any]:
    """Read a memory snapshot that ``torch.cuda.memory._dump_snapshot`` wrote, running nothing.

    Returns:
        The snapshot: a dictionary with the lists ``segments`` and ``device_traces``.

    Raises:
        InputError: the file is missing, larger than 64 MiB, damaged, not a snapshot, or names
            something to call.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"larger than {format_bytes(MOST_BYTES)}; record fewer events")
        with path.open("rb") as file:
            snapshot = _PlainUnpickler(file).load()
    except Exception as error:  # a damaged pickle raises whatever its instructions run into
        raise InputError(f"refused {path.name!r}: {error}") from error
    for key in ("segments", "device_traces"):
        if not isinstance(snapshot, dict) or not isinstance(snapshot.get(key), list):
            raise InputError(f"refused {path.name!r}: not a memory snapshot of PyTorch")
    return snapshot
