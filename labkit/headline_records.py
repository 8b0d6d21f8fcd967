"""The record of a headline run: what was to be run, and what a GPU gave for it.

Limits: the weights are random, so losses say that training works and no more; where batches
accumulate, a step's loss is that of its last batch.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.accuracy import error_percent
from labkit.memory import InputError, Run, shown
from labkit.recipes import MOST_BATCH, Recipe
from labkit.results import (
    impossible,
    plain,
    read_date,
    read_machine,
    read_run,
    read_seconds,
)

SCHEMA = 1
PREFIX = "headline-"
_MOST_ENTRIES, _MOST_TRIED, _MOST_TEXT = 40, 200, 300


@dataclass(frozen=True, kw_only=True)
class Job:
    """One headline run, ready to be made.

    Attributes:
        name: of its file and on the command line.
        shows: what it shows, in a sentence.
        model: a model of the table, or a folder with a ``config.json``.
        recipes: (label, recipe) pairs, run one after the other.
        within: whose memory is pretended, for people; "" for all of this GPU.
        budget_bytes: what PyTorch's allocator may take; None without a limit.
        largest_batch: look for the largest batch that fits, in place of the recipe's own.
    """

    name: str
    shows: str
    model: str
    recipes: tuple[tuple[str, Recipe], ...]
    within: str = ""
    budget_bytes: int | None = None
    largest_batch: bool = False

    def __post_init__(self) -> None:
        if self.largest_batch and self.budget_bytes is None:
            raise InputError(f"{self.name}: the largest batch that fits needs budget_bytes")

    @property
    def file(self) -> str:
        """The name of its file in ``results/<gpu>/``."""
        return f"{PREFIX}{self.name}.json"

    @property
    def command(self) -> str:
        """What makes it."""
        return f"labkit record --headlines {self.name}"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        record = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**record, "recipes": [[label, r.to_dict()] for label, r in self.recipes]}

    @classmethod
    def from_dict(cls, record: Any) -> "Job":
        """Read back what ``to_dict`` wrote.

        Raises:
            InputError: a field is missing, unknown, of the wrong kind or out of range.
        """
        if not isinstance(record, Mapping) or set(record) != set(cls.__dataclass_fields__):
            raise InputError(f"a headline needs the fields {', '.join(cls.__dataclass_fields__)}")
        for key in ("name", "shows", "model", "within"):
            _text(record[key], key)
        budget_bytes = record["budget_bytes"]
        if budget_bytes is not None and not _is_count(budget_bytes, 1 << 50):
            raise InputError(f"budget_bytes must be a number of bytes, not {shown(budget_bytes)}")
        if not isinstance(record["largest_batch"], bool):
            raise InputError("largest_batch must be true or false")
        pairs = record["recipes"]
        if not isinstance(pairs, list | tuple) or not 1 <= len(pairs) <= _MOST_ENTRIES:
            raise InputError(f"recipes must be a list of 1 to {_MOST_ENTRIES}")
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise InputError("recipes must hold pairs of a label and a recipe")
        recipes = tuple((_text(label, "label"), Recipe.from_dict(r)) for label, r in pairs)
        return cls(**{**record, "recipes": recipes})


@dataclass(frozen=True)
class Entry:
    """One recipe of a headline.

    Attributes:
        label: what it is called in the table.
        recipe: how it trained, with the batch that ran.
        run: what the run took.
        predicted: the simulation of the same recipe for the same GPU under the same budget.
        tried: (batch, whether it fitted) of all runs in search of the largest batch.
    """

    label: str
    recipe: Recipe
    run: Run
    predicted: Run
    tried: tuple[tuple[int, bool], ...] = ()

    @property
    def fitted(self) -> bool:
        """Whether it ran without running out of memory."""
        return self.run.oom is None

    @property
    def oom(self) -> str | None:
        """Where memory ran out, in a sentence."""
        return str(self.run.oom) if self.run.oom else None

    @property
    def peak_error_percent(self) -> float | None:
        """By how much the predicted peak is too high; None for a run that did not fit."""
        return error_percent(self.predicted.peak_bytes, self.run.peak_bytes if self.fitted else 0)

    @property
    def reserved_error_percent(self) -> float | None:
        """The same of the reserved bytes; None where nothing is reserved."""
        reserved_bytes = self.run.reserved_bytes if self.fitted else None
        return error_percent(self.predicted.reserved_bytes, reserved_bytes)

    @property
    def tokens_per_second(self) -> float | None:
        """Of the median timed step: neither the first nor a tracked one; None if none was timed."""
        seconds = statistics.median(self.run.step_seconds) if self.run.step_seconds else 0
        return self.recipe.tokens / seconds if seconds else None


@dataclass(frozen=True)
class Headline:
    """What one GPU gave for one headline.

    Attributes:
        job: what was run.
        entries: one for each of its recipes.
        machine: the fields of ``hardware.Machine``: kind, name, versions and so on.
        seconds: how long all of it took.
        date: when, in ISO 8601, UTC.
    """

    job: Job
    entries: tuple[Entry, ...]
    machine: Mapping[str, Any]
    seconds: float
    date: str

    @property
    def name(self) -> str:
        """Its name in the table."""
        return self.job.name

    @property
    def factors(self) -> dict[str, float]:
        """By label, how many times its peak the first run's is; empty if that one did not fit."""
        first = self.entries[0]
        if not first.fitted or self.job.largest_batch:
            return {}
        return {entry.label: first.run.peak_bytes / entry.run.peak_bytes
                for entry in self.entries[1:] if entry.fitted}  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy. Entries also say what follows from them, for those who read the file;
        that is computed again, not read back."""
        return {
            "schema": SCHEMA,
            "job": self.job.to_dict(),
            "command": self.job.command,
            "entries": [_entry_record(entry) for entry in self.entries],
            "machine": plain(self.machine),
            "seconds": self.seconds,
            "date": self.date,
        }

    @classmethod
    def from_dict(cls, record: Any) -> "Headline":
        """Read back what ``to_dict`` wrote; nothing in it is trusted.

        Raises:
            InputError: a field is missing, unknown, of the wrong kind or out of range, or a run
                cannot be.
        """
        return _read_headline(record)


# --- reading, nothing trusted ---------------------------------------------------------------------


def _entry_record(entry: Entry) -> dict[str, Any]:
    return {
        "label": entry.label,
        "recipe": entry.recipe.to_dict(),
        "run": plain(entry.run.to_dict()),
        "predicted": plain(entry.predicted.to_dict()),
        "tried": [list(pair) for pair in entry.tried],
        **{name: getattr(entry, name) for name in _DERIVED},
    }


_DERIVED = ("fitted", "oom", "peak_error_percent", "reserved_error_percent", "tokens_per_second")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise InputError(f"{what} must be a text of at most {_MOST_TEXT} characters")
    return value


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _object(record: Any, names: set[str], what: str) -> Mapping[str, Any]:
    if not isinstance(record, Mapping):
        raise InputError(f"{what} must be an object, not {type(record).__name__}")
    if different := names ^ set(record):
        raise InputError(f"{what} lacks or has too much: {shown(sorted(map(str, different))[0])}")
    return record


def _read_headline(record: Any) -> Headline:
    names = {"schema", "command", *Headline.__dataclass_fields__}
    record = _object(record, names, "a headline's record")
    if record["schema"] != SCHEMA or isinstance(record["schema"], bool):
        raise InputError(
            f"headline schema {shown(record['schema'])} is not {SCHEMA}, the one we read"
        )
    job = Job.from_dict(record["job"])
    if record["command"] != job.command:
        raise InputError(f"command must be {job.command!r}")
    entries = record["entries"]
    if not isinstance(entries, list | tuple):
        raise InputError("entries must be a list")
    read = tuple(_read_entry(entry, job) for entry in entries)
    if [entry.label for entry in read] != [label for label, _ in job.recipes]:
        raise InputError("entries must be those of the job's recipes, in their order")
    for entry, (label, recipe) in zip(read, job.recipes, strict=True):
        batch_size = entry.recipe.batch_size if job.largest_batch else recipe.batch_size
        if entry.recipe != recipe.but(batch_size=batch_size):
            raise InputError(f"{label!r} was not run by the job's recipe")
    machine = read_machine(record["machine"])
    seconds = read_seconds(record["seconds"])
    return Headline(job, read, machine, seconds, read_date(record["date"]))


def _read_entry(record: Any, job: Job) -> Entry:
    names = {"label", "recipe", "run", "predicted", "tried"}
    record = _object(record, names | set(_DERIVED), "an entry")
    run, predicted = read_run(record["run"]), read_run(record["predicted"])
    label = _text(record["label"], "label")
    tried = record["tried"]
    if not isinstance(tried, list | tuple) or len(tried) > _MOST_TRIED:
        raise InputError(f"tried must be a list of at most {_MOST_TRIED}")
    for pair in tried:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or type(pair[1]) is not bool:
            raise InputError("tried must hold pairs of a batch and whether it fitted")
        if not _is_count(pair[0], MOST_BATCH):
            raise InputError(f"a batch tried must be from 1 to {MOST_BATCH}, not {shown(pair[0])}")
    entry = Entry(label, Recipe.from_dict(record["recipe"]), run, predicted,
                  tuple((batch, fitted) for batch, fitted in tried))  # fmt: skip
    if problems := list(_broken(entry, job)):
        raise InputError(f"{label!r}: {problems[0]}")
    return entry


def _broken(entry: Entry, job: Job) -> list[str]:
    """What cannot be true of an entry."""
    problems = impossible(entry.run) + impossible(entry.predicted)
    if entry.run.mode == "simulated" or entry.predicted.mode != "simulated":
        problems.append("it needs a real run, and a simulation as its prediction")
    if job.budget_bytes is not None:
        capacities = {entry.run.capacity_bytes, entry.predicted.capacity_bytes}
        if capacities != {job.budget_bytes}:
            problems.append("it was not run under the budget of its job")
    if entry.fitted and not entry.run.losses:
        problems.append("it has no losses")
    return problems
