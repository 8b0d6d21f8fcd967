"""Recording what this machine's GPU gives, and checking what others sent in: `labkit record`.

`record_lessons` executes lessons and writes every result to ``results/<gpu>/`` atomically, as soon
as it is there. What is there already is skipped, so that an interrupted recording continues.

Limits: a change of versions, of a lesson or of labkit is not noticed; ``again`` records anew.
`problems` believes figures that could be true.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from gpumem.hardware.this_machine import Machine, gpu_key
from gpumem.inputs import InputError
from labkit.course import outcomes, runner
from labkit.course.outcomes import Outcome
from labkit.lesson import results
from labkit.lesson.notebooks import Lesson
from labkit.lesson.results import Result
from labkit.recording import accuracy
from labkit.recording.accuracy import AccuracyTable


def record_lessons(
    lessons: Sequence[Lesson],
    machine: Machine,
    *,
    target: Path,
    work: Path,
    again: bool,
    timeout_seconds: float,
    announce: Callable[[Outcome], None],
) -> tuple[runner.Course, list[str]]:
    """Execute lessons on this ``machine``, and store their results in ``target``.

    ``work`` is for executed notebooks and logs; both folders exist. What is recorded already is
    skipped unless ``again``. Returns how it went, and the names of lessons that are not recorded
    because another machine ran them, or no GPU did.
    """
    todo = []
    for lesson in lessons:
        if not again and _is_recorded(target / f"{lesson.number}.json"):
            tqdm.write(f"recorded before  {lesson.name}")
        else:
            todo.append(lesson)
    ran_elsewhere: list[str] = []
    if not todo:
        return runner.Course((), work), ran_elsewhere

    def store(outcome: Outcome) -> None:
        announce(outcome)
        found = outcomes.stored_result(outcome, work) if outcome.passed else None
        if found is None:
            return
        if (where := found.machine.name) == machine.name:
            results.save(found, target / f"{found.lesson}.json")
            return
        ran_elsewhere.append(outcome.name)
        tqdm.write(f"{outcome.name} is not recorded: it ran on {where}, not on {machine.name}")

    parameters = [("size", "auto")]
    how = {"parameters": parameters, "timeout_seconds": timeout_seconds, "on_done": store}
    return runner.run(todo, folder=work, **how), ran_elsewhere


def _is_recorded(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        results.load_recorded(path)
    except InputError as error:
        tqdm.write(f"{error}. It is recorded again.")
        return False
    return True


# --- what others sent in ------------------------------------------------------------------------


def problems(folder: Path) -> list[str]:
    """Return what is wrong with the recordings in ``folder``, ``results/<gpu>``, in sentences.

    There may be only files that `labkit record` writes, of the GPU that the folder is named after.
    """
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
    load = accuracy.load if path.name in accuracy.FILES else results.load_recorded
    record = load(path)
    kind, name = record.machine.kind, record.machine.name
    if kind not in ("cuda", "rocm"):
        yield f"it was made on {kind!r}, not on a GPU"
    if record.phantom != (path.parent.parent.name == "phantom"):
        place = "belongs into" if record.phantom else "does not belong into"
        yield f"it {place} results/phantom"
    # The accuracy matrix does not say how large the GPU is.
    key = gpu_key(name, record.machine.capacity_bytes)
    if path.parent.resolve().name != key and not isinstance(record, AccuracyTable):
        yield f"the folder of {name!r} is called {key}"
    if isinstance(record, Result):
        yield from record.broken_invariants()
