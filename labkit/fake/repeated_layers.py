"""A trace of a deep model from two traces of shallow ones.

A decoder repeats one layer. The log of a model with two layers is that of a model with one, with
some stretches added: what the second layer allocates and frees while the model is built, in each
forward, in each backward, in each optimizer step. `extend` finds those stretches and repeats them
as often as the deep model has more layers. Nothing is fitted: the result is an event log like any
other. Where two logs do not differ by such stretches, the caller traces the whole model.

Which of several equal storages a repeated stretch frees is decided as the traced log decided it:
the oldest, the newest, or the n-th newest (backward frees in the opposite order of forward).

Limits: for models whose layers are identical from the second on. `extend` sees two depths and takes
that for granted; `same` compares with the trace of one layer more, which tells nothing of layers
further up. Module names in the stretches repeated are those of the layer that was traced.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from labkit.trace import Event, Storage, Trace, Work

#: Depths that are traced. What the second layer adds is what is repeated.
SHALLOW, DEEPER = 1, 2
#: The same where a layer fetches the next one's weights: the last two differ from all others.
SHARDED_DEPTHS = (2, 3)


class Extended(NamedTuple):
    """The log of a deep model, and the deeper of the two logs that it was extended from."""

    log: Any
    deeper: Any


def extended_log(
    log_with_layers: Callable[[int], Any],
    layers: int,
    *,
    depths: tuple[int, int],
    check: bool,
) -> Extended | None:
    """Return the log of a model with ``layers`` layers without tracing all of them.

    Args:
        log_with_layers: traces the model with that many layers; gives a `simulation.Log`.
        layers: how many the wanted model has.
        depths: as for `extend`.
        check: trace one layer more than ``depths`` too, and compare: for layers of which nothing
            is known but that they are said to be identical.

    Returns:
        None where the whole model has to be traced: it is not deeper than what would be traced, or
        its layers do not repeat.
    """
    shallow_layers, deeper_layers = depths
    if layers <= deeper_layers + check:
        return None
    # The deepest first: the first trace of a process has what libraries allocate once.
    checked = log_with_layers(deeper_layers + 1) if check else None
    deeper, shallow = log_with_layers(deeper_layers), log_with_layers(shallow_layers)
    trace = extend(shallow.trace, deeper.trace, layers, depths=depths)
    if trace is None and not check:
        deeper = log_with_layers(deeper_layers)  # the first trace of the process was not like it
        trace = extend(shallow.trace, deeper.trace, layers, depths=depths)
    if trace is None:
        return None
    if checked is not None:
        predicted = extend(shallow.trace, deeper.trace, deeper_layers + 1, depths=depths)
        if predicted is None or not same(predicted, checked.trace):
            return None
    one_layer = deeper.step_work - shallow.step_work
    step_work = deeper.step_work + one_layer * (layers - deeper_layers)
    return Extended(replace(deeper, trace=trace, step_work=step_work), deeper)


def extend(
    shallow: Trace, deeper: Trace, layers: int, *, depths: tuple[int, int] = (SHALLOW, DEEPER)
) -> Trace | None:
    """Return the trace of a model with ``layers`` layers, more than ``depths[1]``.

    Args:
        shallow, deeper: traces of the same run with ``depths[0]`` and ``depths[1]`` layers, one
            more. From there on each further layer does what the last one did.

    Returns:
        None where the two do not differ by whole stretches.
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
    step_starts = tuple(log.first.get(start, end) for start in deeper.step_starts)
    work = _extended_work(shallow.work, deeper.work, layers - depths[1])
    return Trace(deeper.device, tuple(log.storages), tuple(log.events), step_starts, work)


def same(one: Trace, other: Trace) -> bool:
    """Return whether two traces have the same events and the same peak in each step.

    Modules' names and the order of events do not count: an optimizer that goes through groups of
    small tensors takes them in an order that depends on their number.
    """
    one, other = map(_single_lives, (one, other))
    if one.work != other.work or _parts(one) != _parts(other):
        return False
    for start, stop in _parts(one):
        if _counted(one, start, stop) != _counted(other, start, stop):
            return False
        for device in one.devices:
            peaks = [trace.peak(device, start=start, stop=stop) for trace in (one, other)]
            if peaks[0].by_category != peaks[1].by_category:
                return False
    return True


def _counted(trace: Trace, start: int, stop: int) -> Counter[tuple]:
    return Counter(_looks(trace, event) for event in trace.events[start:stop])


# --- what the deeper log has more ---------------------------------------------------------------


def _single_lives(trace: Trace) -> Trace:
    """Make several storages of one that is emptied and filled again, as by ``fully_shard``."""
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
    step_starts = tuple(where[start] for start in trace.step_starts)
    return replace(trace, storages=tuple(storages), events=tuple(events), step_starts=step_starts)


def _ordered(trace: Trace) -> Trace:
    """Sort events that free one after another.

    Their order is arbitrary where a table of tensors is dropped, as autocast drops its casts, and
    nothing depends on it: what is live after the last is the same, and so are the free blocks.
    """
    events, freeing = [], []
    starts = set(trace.step_starts)
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
    if len(shallow.step_starts) != len(deeper.step_starts):
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
    """Return each operator's work with ``more`` layers."""
    return {name: done + (done - shallow.get(name, Work())) * more for name, done in deeper.items()}
