"""The event log of a run: every allocation and every free, and what can be computed from them.

Plain records built from the standard library, so that results can be read, checked and compared
without PyTorch. Bytes are ``int`` and their names end in ``_bytes``.

Limits: a trace knows storages, not tensors. Two views of one storage are one entry, and a view
that keeps a large storage alive counts in full, as it does in the allocator.
"""

import enum
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

#: What an allocator gives beyond what was asked for: it rounds up, and leaves small rests uncut.
ROUNDING = "rounding"
THIN_ABOVE, BUCKETS = 4000, 1200


class Category(enum.StrEnum):
    """What a byte is for, in the order in which figures stack it.

    Only a phantom GPU knows transformers' caches of keys and values, inputs (copied from the host,
    or handed to a model), cuBLAS's workspaces, and what else a script itself makes outside any
    module.
    """

    WEIGHTS = "weights"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    TEMPORARY = "temporary"
    CACHE = "KV cache"
    INPUTS = "inputs"
    WORKSPACES = "workspaces"
    SCRIPT = "script's tensors"
    UNATTRIBUTED = "unattributed"


class Phase(enum.StrEnum):
    """Which part of a training step was running; only a phantom GPU tells forward passes without
    gradients from others, and of transformers' ``generate`` the first, over the prompt."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    GENERATION = "generation"
    PREFILL = "prefill"
    DECODE = "decode"
    OTHER = "other"


WITHOUT_GRADIENTS = (Phase.EVALUATION, Phase.GENERATION, Phase.PREFILL, Phase.DECODE)

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
    """``change_bytes`` bytes more (or fewer, if negative) held by storage number ``storage``.

    ``stream`` is the one that was current, 0 the default. An event of 0 bytes says that this stream
    uses the storage too (``Tensor.record_stream``).
    """

    storage: int
    change_bytes: int
    phase: Phase
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """Operator calls, floating-point operations (a multiply-add counts as two), bytes read and
    written, and bytes sent to other ranks."""

    calls: int = 0
    flops: int = 0
    moved_bytes: int = 0
    sent_bytes: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.calls + other.calls,
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
            self.sent_bytes + other.sent_bytes,
        )

    def __mul__(self, times: int) -> "Work":
        return Work(
            self.calls * times,
            self.flops * times,
            self.moved_bytes * times,
            self.sent_bytes * times,
        )

    def __sub__(self, other: "Work") -> "Work":
        return self + other * -1


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
    storages of several (weights offloaded to the CPU, say). ``step_starts`` are the indices of the
    events with which the training steps begin; what comes before them is setup. ``work`` is per
    operator.
    """

    device: str
    storages: tuple[Storage, ...]
    events: tuple[Event, ...]
    step_starts: tuple[int, ...] = ()
    work: Mapping[str, Work] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device that held a storage, the main one first."""
        return tuple(dict.fromkeys([self.device, *(s.device for s in self.storages)]))

    @property
    def flops(self) -> int:
        """Floating-point operations of the whole trace."""
        return sum(work.flops for work in self.work.values())

    def changes(self, device: str | None = None) -> Iterator[tuple[int, Storage, int]]:
        """Yield ``(event index, storage, change_bytes)`` for each event on ``device``."""
        device = device or self.device
        for index, event in enumerate(self.events):
            storage = self.storages[event.storage]
            if storage.device == device:
                yield index, storage, event.change_bytes

    def peak(self, device: str | None = None, *, start: int = 0, stop: int | None = None) -> Peak:
        """Return the peak over events ``start`` (inclusive) to ``stop`` (exclusive).

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
        """Return event ranges ``(start, stop)`` of the training steps."""
        return list(itertools.pairwise([*self.step_starts, len(self.events)]))

    def step_at(self, index: int) -> int:
        """Return the number of the training step that event ``index`` belongs to, 0 for setup."""
        return bisect_right(self.step_starts, index)

    def step_peaks_bytes(self) -> tuple[int, ...]:
        """Return the most bytes live in each training step."""
        return tuple(self.peak(start=start, stop=stop).total_bytes for start, stop in self.steps())

    def live_at(self, index: int, device: str | None = None) -> list[Storage]:
        """Return the storages that held memory just after event ``index``, the largest first.

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
        """Return live bytes by category after every event on ``device``, ready to draw."""
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
        return Timeline(tuple(indices), tuple(phases), used, self.step_starts)


class Timeline(NamedTuple):
    """``bytes_by_category[c][i]`` bytes of category ``c`` were live after event ``indices[i]``."""

    indices: tuple[int, ...]
    phases: tuple[Phase, ...]
    bytes_by_category: dict[Category, tuple[int, ...]]
    step_starts: tuple[int, ...] = ()

    def steps(self) -> list[tuple[int, int]]:
        """Return event ranges ``(start, stop)`` of the training steps."""
        return list(itertools.pairwise([*self.step_starts, self.indices[-1] + 1]))

    def totals_bytes(self) -> list[int]:
        """Return the live bytes of all categories after each event."""
        return [sum(row) for row in zip(*self.bytes_by_category.values(), strict=True)]

    def thinned(self) -> "Timeline":
        """Return the points worth drawing: the peak of each phase of each step is one of them."""
        starts = [bisect_left(self.indices, start) for start in self.step_starts]
        turns = [i for i, (a, b) in enumerate(itertools.pairwise(self.phases), 1) if a is not b]
        points = points_to_draw(self.totals_bytes(), [*starts, *turns])
        rows = {c: tuple(row[i] for i in points) for c, row in self.bytes_by_category.items()}
        indices, phases = (tuple(row[i] for i in points) for row in self[:2])
        return Timeline(indices, phases, rows, self.step_starts)


def points_to_draw(heights: Sequence[int], cuts: Iterable[int] = ()) -> list[int]:
    """Return some thousand positions: of each stretch its highest, lowest and last.

    A stretch is narrower than a pixel, and reaches across none of ``cuts``.
    """
    count = len(heights)
    if count <= THIN_ABOVE:
        return list(range(count))
    chosen = {0}
    edges = sorted({*cuts, *(count * i // BUCKETS for i in range(BUCKETS + 1))})
    for start, stop in itertools.pairwise(edges):
        stretch = range(start, stop)
        ends = (max(stretch, key=heights.__getitem__), min(stretch, key=heights.__getitem__))
        chosen |= {*ends, stop - 1}
    return sorted(chosen)


def _nonzero(live: Mapping[Category, int]) -> dict[Category, int]:
    return {category: live[category] for category in Category if live.get(category)}
