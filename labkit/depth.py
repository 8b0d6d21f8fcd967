"""A trace of a deep model from two traces of shallow ones.

A decoder repeats one layer. The log of a model with two layers is that of a model with one, with
some stretches added: what the second layer allocates and frees while the model is built, in each
forward, in each backward, in each optimizer step. `extend` finds those stretches and repeats them
as often as the deep model has more layers. Nothing is fitted: the result is an event log like any
other, with peak, categories and replay of its own. Where two logs do not differ by such stretches,
or layers are not alike, it says so and the caller traces the whole model.

Which of several equal storages a repeated stretch frees is decided as the traced log decided it:
the oldest, the newest, or the n-th newest (backward frees in the opposite order of forward).

Limits: for models whose layers are all alike from the second on. `extend` sees two depths and takes
that for granted: `repeats` looks at a model's layers, `same` compares with the trace of one layer
more, which tells nothing of layers further up. Module names in the stretches repeated are those of
the layer that was traced.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.memory import Event, Mark, Storage, Trace, Work

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Depths that are traced. What the second layer adds is what is repeated.
SHALLOW, DEEPER = 1, 2
#: The same where a layer fetches the next one's weights: the last two differ from all others.
SHARDED_DEPTHS = (2, 3)


def repeats(config: "PreTrainedConfig") -> bool:
    """Whether all layers of the model are alike, the first one apart.

    The model is built on ``meta``, where it takes no memory.
    """
    from labkit.models import layers_of, model

    kinds = getattr(config, "layer_types", None)
    if kinds and len(set(kinds)) > 1:
        return False  # the same weights, but another attention
    layers = layers_of(model(config, device="meta"))
    looks = [_look(layer) for layer in layers or []]
    return bool(looks) and all(look == looks[-1] for look in looks[1:])


def _look(layer: Any) -> list[tuple]:
    parts = [(name, type(part).__name__) for name, part in layer.named_modules()]
    return parts + [(name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters()]


def extend(
    shallow: Trace, deeper: Trace, layers: int, *, depths: tuple[int, int] = (SHALLOW, DEEPER)
) -> Trace | None:
    """The trace of a model with ``layers`` layers.

    Args:
        shallow: the trace of the same run with ``depths[0]`` layers.
        deeper: that with one layer more, ``depths[1]``.
        layers: how many the wanted model has, more than ``depths[1]``.
        depths: from where on each further layer does what the last one did: one layer, or two
            where each fetches the next (sharded weights).

    Returns:
        The trace, or None where the two do not differ by whole stretches.
    """
    shallow, deeper = _ordered(_single_lives(shallow)), _ordered(_single_lives(deeper))
    frees = _frees(deeper)
    stretches = _stretches(shallow, deeper)
    if frees is None or stretches is None:
        return None
    log = _Log(deeper, frees)
    for stretch in stretches:
        for _ in range(layers - depths[0] if stretch.repeated else 1):
            for index in range(stretch.start, stretch.stop):
                if not log.add(index):
                    return None
    end = len(log.events)  # where a last step without events begins
    marks = tuple(Mark(log.first.get(mark.index, end), mark.text) for mark in deeper.marks)
    work = _extended_work(shallow.work, deeper.work, layers - depths[1])
    return Trace(deeper.device, tuple(log.storages), tuple(log.events), marks, work)


def same(one: Trace, other: Trace) -> bool:
    """Whether two traces record the same: in each step the same events, and the same peak.

    Names of modules and the order of events apart: an optimizer that goes through groups of small
    tensors takes them in an order that depends on their number.
    """
    one, other = map(_single_lives, (one, other))
    if one.marks != other.marks or one.work != other.work or _parts(one) != _parts(other):
        return False
    for start, stop in _parts(one):
        looks, others = (
            Counter(_looks(trace, event) for event in trace.events[start:stop])
            for trace in (one, other)
        )
        if looks != others:
            return False
        for device in {device for *_, device, _ in looks}:
            peaks = [trace.peak(device, start=start, stop=stop) for trace in (one, other)]
            if peaks[0].by_category != peaks[1].by_category:
                return False
    return True


# --- what the deeper log has more ---------------------------------------------------------------


def _single_lives(trace: Trace) -> Trace:
    """A storage that is emptied and filled again, as a storage for each time.

    ``fully_shard`` keeps one for each gathered weight. To an allocator they are many.
    """
    held: Counter[int] = Counter()
    lives = Counter(event.storage for event in trace.events if event.change_bytes > 0)
    storages, events, now = list(trace.storages), [], {}
    where = [0]  # how many events are left before each event of the trace
    for event in trace.events:
        if lives[event.storage] > 1:
            if event.change_bytes > 0 and not held[event.storage]:
                now[event.storage] = len(storages)
                nbytes = event.change_bytes
                storages.append(trace.storages[event.storage]._replace(nbytes=nbytes))
            held[event.storage] += event.change_bytes
            event = event._replace(storage=now.get(event.storage, event.storage))
        if event.change_bytes or lives[event.storage] <= 1:
            events.append(event)
        where.append(len(events))
    marks = tuple(Mark(where[mark.index], mark.text) for mark in trace.marks)
    return replace(trace, storages=tuple(storages), events=tuple(events), marks=marks)


def _ordered(trace: Trace) -> Trace:
    """Events that free one after another, in an order of our own.

    Theirs is arbitrary where a table of tensors is dropped, as autocast drops its casts, and
    nothing depends on it: what is live after the last is the same, and so are the free blocks.
    """
    events, freeing = [], []
    starts = {mark.index for mark in trace.marks}
    for index, event in enumerate(trace.events):
        if freeing and (event.change_bytes >= 0 or index in starts):
            events += sorted(freeing, key=lambda event: _looks(trace, event))
            freeing.clear()
        (freeing if event.change_bytes < 0 else events).append(event)
    events += sorted(freeing, key=lambda event: _looks(trace, event))
    return replace(trace, events=tuple(events))


class _Stretch(NamedTuple):
    """Events ``start`` to ``stop`` of the deeper log; ``repeated``: not in the shallow one."""

    start: int
    stop: int
    repeated: bool


def _stretches(shallow: Trace, deeper: Trace) -> list[_Stretch] | None:
    found = []
    if len(shallow.marks) != len(deeper.marks):
        return None
    for (a, b), (c, d) in zip(_parts(shallow), _parts(deeper), strict=True):
        before = [_looks(shallow, event) for event in shallow.events[a:b]]
        after = [_looks(deeper, event) for event in deeper.events[c:d]]
        matcher = SequenceMatcher(None, before, after, autojunk=False)
        for kind, _, _, start, stop in matcher.get_opcodes():
            if kind not in ("equal", "insert"):
                return None
            found.append(_Stretch(c + start, c + stop, kind == "insert"))
    return found


def _parts(trace: Trace) -> list[tuple[int, int]]:
    """Building the model, and each step."""
    steps = trace.steps()
    return [(0, steps[0][0] if steps else len(trace.events)), *steps]


def _looks(trace: Trace, event: Event) -> tuple:
    storage = trace.storages[event.storage]
    return (event.change_bytes, event.phase, *_kind(storage))


def _kind(storage: Storage) -> tuple:
    """Storages of one kind stand in for each other."""
    return storage.nbytes, storage.category, storage.operator, storage.device, storage.dtype


# --- which storage a repeated event frees ---------------------------------------------------------

_OLDEST = -1


def _frees(trace: Trace) -> dict[int, int] | None:
    """For each freeing event: how many of its kind were newer, or that it was the oldest.

    None where a storage changed its size while it lived.
    """
    alive: defaultdict[tuple, list[int]] = defaultdict(list)
    usual: dict[tuple, int] = {}  # how its kind was freed last when there was a choice
    frees: dict[int, int] = {}
    seen: Counter[int] = Counter()
    for index, event in enumerate(trace.events):
        storage = trace.storages[event.storage]
        same = alive[_kind(storage)]
        seen[event.storage] += 1
        if seen[event.storage] == 1:
            same.append(event.storage)
        elif seen[event.storage] == 2 and event.change_bytes == -storage.nbytes:
            place, newer = same.index(event.storage), len(same) - 1 - same.index(event.storage)
            if len(same) > 1:
                usual[_kind(storage)] = _OLDEST if place == 0 else newer
            frees[index] = usual.get(_kind(storage), 0)
            del same[place]
        else:
            return None
    return frees


class _Log:
    """The log being put together from events of the deeper one."""

    def __init__(self, source: Trace, frees: Mapping[int, int]) -> None:
        self.source, self.frees = source, frees
        self.storages: list[Storage] = []
        self.events: list[Event] = []
        self.first: dict[int, int] = {}  # where an event of the source first went
        self.alive: defaultdict[tuple, list[int]] = defaultdict(list)

    def add(self, index: int) -> bool:
        """Repeat event ``index`` of the source; False if there is nothing left for it to free."""
        event = self.source.events[index]
        storage = self.source.storages[event.storage]
        same = self.alive[_kind(storage)]
        self.first.setdefault(index, len(self.events))
        newer = self.frees.get(index)
        if newer is None:
            number = len(self.storages)
            self.storages.append(storage)
            same.append(number)
        elif newer >= len(same) or not same:
            return False
        else:
            number = same.pop(0 if newer == _OLDEST else len(same) - 1 - newer)
        self.events.append(Event(number, event.change_bytes, event.phase))
        return True


def _extended_work(
    shallow: Mapping[str, Work], deeper: Mapping[str, Work], more: int
) -> dict[str, Work]:
    """What each layer adds to each operator's work, so many times more."""
    none = Work(0, 0, 0)
    return {
        name: Work(*(d + more * (d - s) for s, d in zip(shallow.get(name, none), row, strict=True)))
        for name, row in deeper.items()
    }
