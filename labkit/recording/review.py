"""Check the recordings that someone sends in: ``labkit record --check results/<gpu>``.

There may be only files that `labkit record` writes, of one GPU, after which the folder is named.
Figures that could be true are believed.
"""

from collections.abc import Iterator
from pathlib import Path

from gpumem.hardware.this_machine import gpu_key
from gpumem.inputs import InputError
from labkit.lesson import results
from labkit.lesson.results import Result
from labkit.recording import accuracy
from labkit.recording.accuracy import AccuracyTable


def problems(folder: Path) -> list[str]:
    """Return what is wrong with the recordings in ``folder``, ``results/<gpu>``, in sentences."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; `labkit record` makes results/<gpu>")
    found = []
    for path in sorted(folder.iterdir()):
        try:
            found += [f"{path.name}: {problem}" for problem in _record_problems(path)]
        except InputError as error:
            found.append(f"{path.name}: {error}")
    return found


def _record_problems(path: Path) -> Iterator[str]:
    record = _load(path)
    kind, name = record.machine["kind"], record.machine["name"]
    if kind not in ("cuda", "rocm"):
        yield f"it was made on {kind!r}, not on a GPU"
    if record.phantom != (path.parent.parent.name == "phantom"):
        place = "belongs into" if record.phantom else "does not belong into"
        yield f"it {place} results/phantom"
    # The accuracy matrix does not say how large the GPU is.
    key = gpu_key(name, record.machine.get("capacity_bytes"))
    if path.parent.resolve().name != key and not isinstance(record, AccuracyTable):
        yield f"the folder of {name!r} is called {key}"
    if isinstance(record, Result):
        yield from record.broken_invariants()


def _load(path: Path) -> Result | AccuracyTable:
    if path.name in accuracy.FILES:
        return accuracy.load(path)
    return results.load_recorded(path)
