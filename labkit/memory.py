"""The vocabulary: categories, traces, runs, and how bytes are written for people.

Everything here is a plain record built from the standard library, so that results can be read,
checked and compared on a machine that has no PyTorch. Bytes are ``int`` and their names end in
``_bytes``; GiB (1024 ** 3) appears only in text meant for people.

Limits: a trace knows storages, not tensors. Two views of one storage are one entry, and a view
that keeps a large storage alive counts in full, as it does in the allocator.
"""

import difflib
import enum
import numbers
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: Above any whole number of a record: Python does not write out very long ones.
MOST_WHOLE = 10**30


class InputError(ValueError):
    """A value we were given cannot be used. The message says which, and what would do."""


class Category(enum.StrEnum):
    """What a byte is for, in the order in which figures stack it."""

    WEIGHTS = "weights"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    TEMPORARY = "temporary"
    UNATTRIBUTED = "unattributed"


class Phase(enum.StrEnum):
    """Which part of a training step was running."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OTHER = "other"


# --- a trace: everything that was allocated and freed, in order --------------------------------


class Storage(NamedTuple):
    """One block of memory behind one or more tensors.

    ``operator`` allocated it, inside ``module`` (dotted path, ``""`` outside any module) and
    ``phase``. ``name`` is the parameter's qualified name where the storage belongs to one.
    """

    nbytes: int
    category: Category
    device: str
    operator: str
    module: str
    name: str
    phase: Phase
    shape: tuple[int, ...]
    dtype: str


class Event(NamedTuple):
    """``change_bytes`` bytes more (or fewer, if negative) held by storage number ``storage``."""

    storage: int
    change_bytes: int
    phase: Phase


class Mark(NamedTuple):
    """A named moment: ``text`` happened just before event number ``index``."""

    index: int
    text: str


class Work(NamedTuple):
    """What one operator did in total: calls, floating-point operations, bytes read and written,
    and bytes sent to other ranks."""

    calls: int
    flops: int
    moved_bytes: int
    sent_bytes: int = 0


class Peak(NamedTuple):
    """The largest number of live bytes, when it was reached, and what it was made of.

    ``index`` is the event that reached it, -1 where nothing was allocated. The values of
    ``by_category`` sum to ``total_bytes``.
    """

    index: int
    total_bytes: int
    by_category: dict[Category, int]


@dataclass(frozen=True)
class Trace:
    """The event log of a run. Peak, breakdown, timeline and tables are functions of it.

    ``device`` is the device whose bytes the views count unless told otherwise; a trace may hold
    storages of several (weights offloaded to the CPU, say). ``work`` is per operator.
    """

    device: str
    storages: tuple[Storage, ...]
    events: tuple[Event, ...]
    marks: tuple[Mark, ...] = ()
    work: Mapping[str, Work] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device that held a storage, the main one first."""
        return tuple(dict.fromkeys([self.device, *(s.device for s in self.storages)]))

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole trace (a multiply-add counts as two)."""
        return sum(work.flops for work in self.work.values())

    def changes(self, device: str | None = None) -> Iterator[tuple[int, Storage, int]]:
        """``(event index, storage, change_bytes)`` for each event on ``device``."""
        device = device or self.device
        for index, event in enumerate(self.events):
            storage = self.storages[event.storage]
            if storage.device == device:
                yield index, storage, event.change_bytes

    def peak(self, device: str | None = None, *, start: int = 0, stop: int | None = None) -> Peak:
        """The peak over events ``start`` (inclusive) to ``stop`` (exclusive).

        What was live before ``start`` counts: the peak of a step includes the weights that an
        earlier moment allocated.
        """
        live: Counter[Category] = Counter()
        total, best = 0, Peak(-1, 0, {})
        stop = len(self.events) if stop is None else stop
        for index, storage, change_bytes in self.changes(device):
            if index >= stop:
                break
            if index >= start and best.index < 0 and total > 0:
                best = Peak(index - 1, total, _nonzero(live))
            live[storage.category] += change_bytes
            total += change_bytes
            if index >= start and total > best.total_bytes:
                best = Peak(index, total, _nonzero(live))
        if best.index < 0 and total > 0:  # nothing happened from `start` on
            best = Peak(max(start - 1, 0), total, _nonzero(live))
        return best

    @property
    def peak_bytes(self) -> int:
        return self.peak().total_bytes

    def steps(self) -> list[tuple[int, int]]:
        """Event ranges ``(start, stop)`` of the training steps, from the marks ``step N``."""
        starts = [mark.index for mark in self.marks if mark.text.startswith("step ")]
        return list(zip(starts, [*starts[1:], len(self.events)][: len(starts)], strict=True))

    def live_at(self, index: int, device: str | None = None) -> list[Storage]:
        """The storages that held memory just after event ``index``, the largest first.

        A storage that was resized appears with the bytes it held at that moment.
        """
        held: Counter[int] = Counter()
        device = device or self.device
        for event in self.events[: index + 1]:
            if self.storages[event.storage].device == device:
                held[event.storage] += event.change_bytes
        alive = [
            self.storages[number]._replace(nbytes=nbytes)
            for number, nbytes in held.items()
            if nbytes > 0
        ]
        return sorted(alive, key=lambda storage: -storage.nbytes)

    def timeline(self, device: str | None = None) -> "Timeline":
        """Live bytes by category after every event on ``device``, ready to draw."""
        live: Counter[Category] = Counter()
        indices, phases = [], []
        rows: dict[Category, list[int]] = {category: [] for category in Category}
        for index, storage, change_bytes in self.changes(device):
            live[storage.category] += change_bytes
            indices.append(index)
            phases.append(self.events[index].phase)
            for category, row in rows.items():
                row.append(live[category])
        used = {category: tuple(row) for category, row in rows.items() if any(row)}
        return Timeline(tuple(indices), tuple(phases), used)

    def by_module(self, *, depth: int | None = None, index: int | None = None) -> dict[str, int]:
        """Live bytes per module path, cut to ``depth`` names, at event ``index`` (the peak)."""
        index = self.peak().index if index is None else index
        table: Counter[str] = Counter()
        for storage in self.live_at(index):
            owner = storage.name.rpartition(".")[0] if storage.name else storage.module
            table[".".join(owner.split(".")[:depth])] += storage.nbytes
        return dict(table.most_common())


class Timeline(NamedTuple):
    """``bytes_by_category[c][i]`` bytes of category ``c`` were live after event ``indices[i]``."""

    indices: tuple[int, ...]
    phases: tuple[Phase, ...]
    bytes_by_category: dict[Category, tuple[int, ...]]

    def totals(self) -> tuple[int, ...]:
        """Live bytes of all categories after each event."""
        return tuple(map(sum, zip(*self.bytes_by_category.values(), strict=True)))


def _nonzero(live: Mapping[Category, int]) -> dict[Category, int]:
    return {category: live[category] for category in Category if live.get(category)}


# --- a run: what one execution of an experiment gave -------------------------------------------

MODES = ("measured", "tracked", "simulated")


@dataclass(frozen=True)
class OutOfMemory:
    """Where a run ran out of memory.

    ``requested_bytes`` is the request that failed (0 where the error did not say),
    ``live_bytes`` what was held at that moment and ``by_category`` what it was made of.
    ``step`` counts from 1; 0 means the failure came before the first step.
    """

    requested_bytes: int
    live_bytes: int
    capacity_bytes: int | None
    by_category: Mapping[str, int]
    step: int
    phase: str
    module: str
    operator: str

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        when = f"step {self.step}, {self.phase}" if self.step else "before the first step"
        room = f" of {format_bytes(self.capacity_bytes)}" if self.capacity_bytes else ""
        asked = format_bytes(self.requested_bytes) if self.requested_bytes else "more memory"
        return (
            f"out of memory: asked for {asked} with {format_bytes(self.live_bytes)}{room} "
            f"in use ({when}{where})"
        )


@dataclass(frozen=True)
class Run:
    """What one execution of an experiment gave. The same record in all three worlds.

    Attributes:
        name: the experiment.
        parameters: the arguments it ran with (numbers, strings, booleans or None).
        mode: ``measured`` on a GPU, ``tracked`` on a CPU, ``simulated`` on fake tensors.
        device: what ran it, or for a simulation what it stands for ("T4", "NVIDIA H200", "CPU").
        peak_bytes: most bytes allocated at once; up to the failure if it ran out of memory.
        by_category: what the peak was made of; sums to ``peak_bytes``.
        step_peaks_bytes: the same per training step, in order.
        reserved_bytes: most bytes that the caching allocator held; None where there is none.
        capacity_bytes: what the device (or the pretended one) lets a program use; None: unknown.
        host_bytes: most bytes held on the CPU by a run on another device.
        losses: the loss at each step; empty in a simulation.
        step_seconds: seconds per timed step, warm-up left out; empty in a simulation.
        flops: floating-point operations of one step; None where they were not counted.
        moved_bytes: bytes that one step's operators read and write; None where not counted.
        sent_bytes: bytes that one step sends to other ranks; 0 where there are none.
        oom: where it ran out of memory; None if it did not.
        trace: the event log; None for a run read back from a file.
    """

    name: str
    parameters: Mapping[str, Any]
    mode: str
    device: str
    peak_bytes: int
    by_category: Mapping[str, int]
    step_peaks_bytes: tuple[int, ...] = ()
    reserved_bytes: int | None = None
    capacity_bytes: int | None = None
    host_bytes: int = 0
    losses: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    flops: int | None = None
    moved_bytes: int | None = None
    sent_bytes: int = 0
    oom: OutOfMemory | None = None
    trace: Trace | None = field(default=None, repr=False, compare=False)

    @property
    def fits(self) -> bool | None:
        """Whether it fitted its device; None where the capacity is unknown."""
        if self.oom is not None:
            return False
        if self.capacity_bytes is None:
            return None
        return max(self.peak_bytes, self.reserved_bytes or 0) <= self.capacity_bytes

    @property
    def seconds_per_step(self) -> float | None:
        """Median of the timed steps; None where nothing was timed."""
        if not self.step_seconds:
            return None
        ordered = sorted(self.step_seconds)
        middle = len(ordered) // 2
        return (ordered[middle] + ordered[-middle - 1]) / 2

    @property
    def label(self) -> str:
        """How the figures call where these numbers come from."""
        return {
            "measured": f"measured on {self.device}",
            "tracked": f"tracked on {self.device}",
            "simulated": f"simulated for {self.device}",
        }[self.mode]

    def bytes_of(self, category: str) -> int:
        """Bytes of one category at the peak, 0 where there were none.

        Raises:
            InputError: unknown category.
        """
        return self.by_category.get(one_of(category, list(Category), "category"), 0)

    def named(self, name: str) -> "Run":
        """The same run under another name, for figures."""
        return replace(self, name=name)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy, without the trace."""
        record = asdict(replace(self, trace=None))
        del record["trace"]
        record["by_category"] = {str(k): v for k, v in self.by_category.items()}
        return record

    @classmethod
    def from_dict(cls, record: Any) -> "Run":
        """Read back what ``to_dict`` wrote; nothing in it is trusted.

        Raises:
            InputError: a field is missing, unknown, of the wrong kind or out of range, or the
                categories do not sum to the peak.
        """
        return _read_run(record)


def _read_run(record: Any) -> Run:
    if not isinstance(record, Mapping):
        raise InputError(f"a run must be an object, not {type(record).__name__}")
    known = {f.name for f in fields(Run)} - {"trace"}
    required = {"name", "parameters", "mode", "device", "peak_bytes", "by_category"}
    if unknown := set(record) - known:
        raise InputError(f"a run has no field {shown(sorted(map(str, unknown))[0])}")
    if missing := required - set(record):
        raise InputError(f"a run needs the field {sorted(missing)[0]!r}")
    values = dict(record)
    for key in ("name", "device"):
        if not isinstance(values[key], str) or len(values[key]) > 200:
            raise InputError(f"{key} must be a text of at most 200 characters")
    values["mode"] = one_of(values["mode"], MODES, "mode")
    if not isinstance(values["parameters"], Mapping):
        raise InputError("parameters must be an object")
    for key, value in values["parameters"].items():
        if not is_plain(value):
            raise InputError(f"parameter {shown(key)} must be a plain value, not {shown(value)}")
    for key in ("peak_bytes", "host_bytes", "sent_bytes"):
        _read_bytes(values.get(key, 0), key)
    for key in ("reserved_bytes", "capacity_bytes", "flops", "moved_bytes"):
        if values.get(key) is not None:
            _read_bytes(values[key], key)
    values["by_category"] = _read_categories(values["by_category"], values["peak_bytes"])
    for key in ("step_peaks_bytes", "losses", "step_seconds"):
        items = values.get(key, ())
        if not isinstance(items, Sequence) or isinstance(items, str):
            raise InputError(f"{key} must be a list")
        values[key] = tuple(items)
    for key, kind in (("step_peaks_bytes", int), ("losses", float), ("step_seconds", float)):
        if not all(_is_number(item) and isinstance(item, int | kind) for item in values[key]):
            raise InputError(f"{key} must hold numbers only")
    if any(peak < 0 for peak in values["step_peaks_bytes"]):
        raise InputError("step_peaks_bytes must not be negative")
    if not all(is_plain(item) for item in (*values["losses"], *values["step_peaks_bytes"])):
        raise InputError("losses and step_peaks_bytes must not hold numbers of thirty digits")
    if any(not 0 <= s < 1e18 for s in values["step_seconds"]):
        raise InputError("step_seconds must be finite and not negative")
    if values.get("oom") is not None:
        values["oom"] = _read_oom(values["oom"])
    return Run(**values)


def _read_categories(record: Any, total_bytes: int) -> dict[str, int]:
    if not isinstance(record, Mapping):
        raise InputError("by_category must be an object")
    given = len(record)
    record = {one_of(key, list(Category), "category"): item for key, item in record.items()}
    if len(record) != given:
        raise InputError("by_category names a category twice")
    for key, value in record.items():
        _read_bytes(value, f"by_category[{key!r}]")
    if sum(record.values()) != total_bytes:
        raise InputError(
            f"the categories sum to {sum(record.values())} bytes, the peak is {total_bytes}"
        )
    return record


def _read_oom(record: Any) -> OutOfMemory:
    names = {f.name for f in fields(OutOfMemory)}
    if not isinstance(record, Mapping) or set(record) != names:
        raise InputError(f"oom must be an object with the fields {', '.join(sorted(names))}")
    for key in ("requested_bytes", "live_bytes", "step"):
        _read_bytes(record[key], f"oom.{key}")
    if record["capacity_bytes"] is not None:
        _read_bytes(record["capacity_bytes"], "oom.capacity_bytes")
    for key in ("phase", "module", "operator"):
        if not isinstance(record[key], str):
            raise InputError(f"oom.{key} must be text")
    categories = _read_categories(record["by_category"], record["live_bytes"])
    return OutOfMemory(**{**record, "by_category": categories})


def _read_bytes(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 80:
        raise InputError(f"{what} must be a whole number, not negative, not {shown(value)}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def is_plain(value: Any) -> bool:
    """Whether a record may hold ``value`` by itself: a text, yes or no, nothing, or a number that
    can be written out and counted with (whole ones below ``MOST_WHOLE``)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < MOST_WHOLE
    return isinstance(value, str | float | bool | None)


# --- text for people, and bad input ------------------------------------------------------------


def format_bytes(nbytes: int | float) -> str:
    """``nbytes`` with a binary unit: ``"1.50 GiB"``, ``"212 MiB"``, ``"512 B"``.

    Picks the unit so that something other than zero always shows.
    """
    sign, size = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    for unit, scale in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= scale * 0.9995:
            value = size / scale
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{sign}{value:.{digits}f} {unit}"
    return f"{sign}{size:.0f} B"


def one_of(value: Any, allowed: Iterable[str], what: str) -> str:
    """``value``, if it is one of ``allowed`` (capitals and ``_`` for ``-`` are forgiven).

    Raises:
        InputError: it is not; the message names it, the nearest choice, and all of them.
    """
    allowed = [str(choice) for choice in allowed]
    folded = {choice.lower().replace("_", "-"): choice for choice in allowed}
    key = (value if isinstance(value, str) else shown(value))[:200].lower().replace("_", "-")
    if key in folded:
        return folded[key]
    near = difflib.get_close_matches(key, folded, n=1, cutoff=0.4)
    hint = f" Did you mean {folded[near[0]]!r}?" if near else ""
    raise InputError(f"unknown {what} {shown(value)}.{hint} Known: {', '.join(allowed)}.")


def positive_int(value: Any, what: str, *, most: int = 1 << 31) -> int:
    """``value`` as a whole number from 1 to ``most``.

    Raises:
        InputError: it is not one.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InputError(f"{what} must be a whole number of at least 1, not {shown(value)}")
    if not 1 <= value <= most:
        raise InputError(f"{what} must be from 1 to {most}, not {shown(value)}")
    return int(value)


def shown(value: Any) -> str:
    """``value`` as Python writes it, short enough for a sentence."""
    if isinstance(value, int) and abs(value) >= MOST_WHOLE:
        return "a number of more than thirty digits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # such a number within, or lists without end
        return f"a {type(value).__name__} too large to quote"
    return text if len(text) <= 80 else f"{text[:79]}…"
