"""``labkit record``: store what this machine's GPU gives, in ``results/<gpu>/``.

Without a choice it records all three parts: every lesson at GPU size, the accuracy matrix, the
headline runs. It goes on where it was stopped: what the same sources, versions and GPU recorded is
left alone.

``--check`` reads what is recorded, as continuous integration does with what people send in.

Exit codes: 0 all that was asked for is recorded, or sound; 1 something failed, or is not sound; 2
bad input, no GPU, or somebody else is recording; 130 Ctrl-C. What this GPU cannot do (pretend to be
a larger one) is a failure only if it was asked for by name.

Limits: needs CUDA or ROCm, but for ``--check``. One GPU, the current one.
"""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from labkit import cli_text
from labkit.memory import InputError, one_of

COMMAND = "record"
RECORD_FOLDER = Path("build/record")


def add_command(commands: Any) -> None:
    """Add the command to the parser's ``commands``."""
    parser = commands.add_parser(
        COMMAND,
        help="store what this machine's GPU gives (CUDA only)",
        description="Without --lessons, --accuracy or --headlines, all three are recorded.",
    )
    parser.add_argument(
        "--lessons", nargs="*", metavar="LESSON",
        help="lessons at GPU size: number, name or path of a notebook (all if none is named)",
    )  # fmt: skip
    parser.add_argument(
        "--accuracy", action="store_true", help="the accuracy matrix (benchmarks/accuracy.py)"
    )
    parser.add_argument(
        "--headlines", nargs="*", metavar="NAME", help="headline runs (all if none is named)"
    )
    parser.add_argument(
        "--again", action="store_true", help="measure what is recorded already too, for the drift"
    )
    parser.add_argument("--out", default="results", help="folder (default: %(default)s)")
    parser.add_argument(
        "--timeout", default="1800", metavar="SECONDS",
        help="limit for each lesson, each headline and the accuracy matrix (default: 1800)",
    )  # fmt: skip
    parser.add_argument(
        "--check", nargs="*", metavar="FOLDER",
        help="record nothing: say what is wrong with results/<gpu> (all of --out if none is named)",
    )  # fmt: skip
    parser.set_defaults(action=_record)


def _check(folders: Sequence[str], out: str) -> int:
    """Say of each folder whether it can be taken in."""
    from labkit.recorded_check import all_problems, problems

    found = {name: problems(name) for name in folders} if folders else all_problems(out)
    for name, wrong in found.items():
        for problem in wrong:
            print(f"{name}: {problem}")
        if not wrong:
            print(f"{name}: sound")
    if not found:
        print(f"Nothing is recorded in {out}.")
    return 1 if any(found.values()) else 0


def _record(options: argparse.Namespace) -> int:
    if options.check is not None:
        return _check(options.check, options.out)
    from labkit import hardware, notebooks
    from labkit.recording import Recorder
    from labkit.this_gpu import gpu_key

    timeout_seconds = cli_text.seconds(options.timeout)
    here = hardware.machine()
    if not here.can_measure:
        raise InputError(
            f"record needs a CUDA GPU, and this machine has none that PyTorch can use "
            f"({here.name}); `labkit run` works here, and `labkit doctor` says more"
        )
    chosen = _Chosen(options)
    key = gpu_key(here.name, here.capacity_bytes)
    target, work = Path(options.out) / key, RECORD_FOLDER / key
    for folder in (target, work):
        notebooks.prepare_folder(folder)
    with _alone(target, work):
        recorder = Recorder(
            target, work, here, again=options.again, timeout_seconds=timeout_seconds, tell=_tell
        )
        code = _record_all(recorder, chosen)
    print(f"Results: {target.resolve()}")
    return code


class _Chosen:
    """What is to be recorded, checked before anything is measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        from labkit.headlines import HEADLINES
        from labkit.lessons import declared_parameters, default_folder, find, read_notebook
        from labkit.recording import NO_BENCHMARKS, accuracy_script

        asked = (options.lessons is not None, options.accuracy, options.headlines is not None)
        wants_lessons, self.accuracy, wants_headlines = asked if any(asked) else (True,) * 3
        self.lessons: list[Any] = []
        if wants_lessons and (any(asked) or default_folder().is_dir()):
            self.lessons = find(options.lessons or ())
        elif wants_lessons:
            _tell("There are no lessons here: run `labkit record` from a checkout for theirs.")
        for lesson in self.lessons:
            if "size" not in declared_parameters(read_notebook(lesson.path)):
                raise InputError(
                    f"lesson {lesson.name!r} has no parameter 'size', so it cannot be recorded"
                )
        if options.accuracy and accuracy_script() is None:
            raise InputError(NO_BENCHMARKS)
        names = [one_of(name, HEADLINES, "headline") for name in options.headlines or ()]
        self.named = bool(names)
        self.headlines = [HEADLINES[name] for name in dict.fromkeys(names) or HEADLINES]
        if not wants_headlines:
            self.headlines = []


def _record_all(recorder: Any, chosen: _Chosen) -> int:
    from labkit.recording import FAILED, NOT_HERE

    code = 0
    if chosen.lessons:
        course = recorder.lessons(chosen.lessons, cli_text.announce)
        if course.outcomes:
            code = cli_text.finish(course, continues="the same command")
        if course.interrupted:
            return code
    parts = [recorder.accuracy()] if chosen.accuracy else []
    for job in chosen.headlines:
        _tell(f"{job.name}: {job.shows}")
        parts.append(recorder.headline(job))
        _show(recorder, job, parts[-1])
    if parts:
        rows = [(part.name, part.status, f"{part.seconds:.1f}") for part in parts]
        cli_text.print_table(("Part", "Status", "Seconds"), rows)
    bad = {FAILED, NOT_HERE} if chosen.named else {FAILED}
    return 1 if recorder.not_kept or any(part.status in bad for part in parts) else code


def _show(recorder: Any, job: Any, part: Any) -> None:
    """The figures of a headline that is recorded."""
    from labkit import headlines
    from labkit.recording import RECORDED, UNCHANGED

    if part.status in (RECORDED, UNCHANGED):
        found = headlines.load(recorder.target / job.file)
        cli_text.print_table(HEADLINE_COLUMNS, [_row(entry) for entry in found.entries])


HEADLINE_COLUMNS = ("Run", "Batch", "Peak", "Error", "Reserved", "Error", "Tokens/s", "Last loss")


def _row(entry: Any) -> Sequence[str]:
    from labkit.memory import format_bytes

    run, recipe = entry.run, entry.recipe
    batch = f"{recipe.batch_size}" + (f" × {recipe.accumulate}" if recipe.accumulate > 1 else "")
    reserved, speed = run.reserved_bytes, entry.tokens_per_second
    return (
        entry.label,
        batch,
        format_bytes(run.peak_bytes) if entry.fitted else "no fit",
        _per_cent(entry.peak_error_percent),
        format_bytes(reserved) if reserved is not None and entry.fitted else "–",
        _per_cent(entry.reserved_error_percent),
        f"{speed:,.0f}" if speed else "–",
        f"{run.losses[-1]:.2f}" if run.losses else "–",
    )


def _per_cent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f} %"


@contextlib.contextmanager
def _alone(*folders: Path) -> Iterator[None]:
    from labkit.register import locked

    with contextlib.ExitStack() as stack:
        for folder in sorted({folder.resolve() for folder in folders}):
            stack.enter_context(locked(folder))
        yield


def _tell(line: str) -> None:
    from tqdm import tqdm

    tqdm.write(line)
