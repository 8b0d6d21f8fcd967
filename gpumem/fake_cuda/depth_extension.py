"""A trace of a deep model from two traces of shallow ones.

A decoder repeats one layer, or a few in turn, such as five whose attention sees a window and one
whose does not. The log of a model with two layers is that of a model with one, with some stretches
added: what the second layer allocates and frees while the model is built, in each forward, in each
backward, in each optimizer step. `extend` finds those stretches and repeats them as often as the
deep model has more layers. Nothing is fitted: the result is an event log like any other. Where two
logs do not differ by such stretches, the caller traces the whole model.

Which of several equal storages a repeated stretch frees is decided as the traced log decided it:
the oldest, the newest, or the n-th newest (backward frees in the opposite order of forward).

Limits: for models whose layers repeat from the second on. `extend` sees two depths and takes that
for granted; `same` compares with the trace of one repetition more, which tells nothing of layers
further up. Module names in the stretches repeated are those of the layer that was traced.
"""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from gpumem.trace import Event, Storage, Trace, Work

#: Depths that are traced. What the second layer adds is what is repeated.
SHALLOW, DEEPER = 1, 2
#: The same where a layer fetches the next one's weights: the last two differ from all others.
SHARDED_DEPTHS = (2, 3)


def depths_of(layers: int, least: int, period: int) -> tuple[int, int]:
    """Return two depths from ``least`` on that are ``period`` apart and end as ``layers`` do."""
    shallow = least + (layers - least) % period
    return shallow, shallow + period


class Extended(NamedTuple):
    """The log of a deep model, and the deeper of the two logs that it was extended from."""

    log: Any
    deeper: Any


def extended_log(
    log_with_layers: Callable[[int], Any], layers: int, *, depths: tuple[int, int], check: bool
) -> Extended | None:
    """Return the log of a model with ``layers`` layers without tracing all of them.

    Args:
        log_with_layers: traces the model with that many layers; gives a `simulation.Log`.
        layers: how many the wanted model has.
        depths: as for `extend`.
        check: trace one repetition more than ``depths`` too, and compare.

    Returns:
        None where the whole model has to be traced: it is shallow, or its layers do not repeat.
    """
    shallow_layers, deeper_layers = depths
    unit = deeper_layers - shallow_layers
    if layers <= (deeper_layers + unit if check else deeper_layers):
        return None
    # The deepest first: the first trace of a process has what libraries allocate once.
    checked = log_with_layers(deeper_layers + unit) if check else None
    deeper, shallow = log_with_layers(deeper_layers), log_with_layers(shallow_layers)
    trace = extend(shallow.trace, deeper.trace, layers, depths=depths)
    if trace is None and not check:
        deeper = log_with_layers(deeper_layers)  # the first trace of the process was not like it
        trace = extend(shallow.trace, deeper.trace, layers, depths=depths)
    if trace is None:
        return None
    if checked is not None:
        predicted = extend(shallow.trace, deeper.trace, deeper_layers + unit, depths=depths)
        if predicted is None or not same(predicted, checked.trace):
            return None
    more = (layers - deeper_layers) // unit
    step_work = deeper.step_work + (deeper.step_work - shallow.step_work) * more
    return Extended(replace(deeper, trace=trace, step_work=step_work), deeper)


def extend(
    shallow: Trace, deeper: Trace, layers: int, *, depths: tuple[int, int] = (SHALLOW, DEEPER)
) -> Trace | None:
    """Return the trace of a model with ``layers`` layers, more than ``depths[1]``.

    ``shallow`` and ``deeper`` are traces of the same run with ``depths[0]`` and ``depths[1]``
    layers: as many more as repeat, which ``layers`` has a whole number of times more. Returns None
    where they do not differ by whole stretches.
    """
    if _uses_of_streams(deeper):
        return None  # such an event makes and frees nothing
    shallow, deeper = single_lives(shallow), single_lives(deeper)
    extended = _extended(shallow, deeper, layers, depths)
    if extended is None:
        extended = _extended(_ordered(shallow), _ordered(deeper), layers, depths)
    return extended


def _extended(shallow: Trace, deeper: Trace, layers: int, depths: tuple[int, int]) -> Trace | None:
    stretches = _stretches(shallow, deeper)
    kinds = _kinds(deeper)
    frees = _frees(deeper, kinds)
    if frees is None or stretches is None:
        return None
    order: list[int] = []
    for stretch in stretches:
        times = (layers - depths[0]) // (depths[1] - depths[0]) if stretch.repeated else 1
        order += times * [*range(stretch.start, stretch.stop)]
    storages: list[Storage] = []
    events: list[Event] = []
    first: dict[int, int] = {}  # where an event of the deeper log first went
    alive: defaultdict[tuple, list[int]] = defaultdict(list)
    for index in order:
        event = deeper.events[index]
        storage = deeper.storages[event.storage]
        living = alive[kinds[event.storage]]
        first.setdefault(index, len(events))
        if index not in frees:
            number = len(storages)
            storages.append(storage)
            living.append(number)
        elif -len(living) <= frees[index] < len(living):
            number = living.pop(frees[index])
        else:
            return None  # there is nothing left to free
        events.append(event._replace(storage=number))
    # A last step without events begins at the end.
    step_starts = tuple(first.get(start, len(events)) for start in deeper.step_starts)
    more = (layers - depths[1]) // (depths[1] - depths[0])
    work = {
        name: done + (done - shallow.work.get(name, Work())) * more
        for name, done in deeper.work.items()
    }
    return Trace(deeper.device, tuple(storages), tuple(events), step_starts, work)


def same(one: Trace, other: Trace) -> bool:
    """Return whether two traces have the same events and the same peak in each step.

    Modules' names and the order of events do not count: an optimizer that goes through groups of
    small tensors takes them in an order that depends on their number.
    """
    one, other = map(single_lives, (one, other))
    if one.work != other.work or _parts(one) != _parts(other):
        return False
    for start, stop in _parts(one):
        counted = [
            Counter(
                (event.change_bytes, event.phase, event.stream, *_what(t.storages[event.storage]))
                for event in t.events[start:stop]
            )
            for t in (one, other)
        ]
        if counted[0] != counted[1]:
            return False
        for device in one.devices:
            peaks = [trace.peak(device, start=start, stop=stop) for trace in (one, other)]
            if peaks[0].by_category != peaks[1].by_category:
                return False
    return True


# --- what the deeper log has more ---------------------------------------------------------------


def single_lives(trace: Trace) -> Trace:
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
    kinds, events, freeing = _kinds(trace), [], []
    starts = set(trace.step_starts)
    for index, event in enumerate(trace.events):
        if freeing and (event.change_bytes >= 0 or index in starts):
            events += sorted(freeing, key=lambda event: _looks(event, kinds))
            freeing.clear()
        (freeing if event.change_bytes < 0 else events).append(event)
    events += sorted(freeing, key=lambda event: _looks(event, kinds))
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
    of_shallow, of_deeper = _kinds(shallow), _kinds(deeper)
    for (a, b), (c, d) in zip(_parts(shallow), _parts(deeper), strict=True):
        before = [_looks(event, of_shallow) for event in shallow.events[a:b]]
        after = [_looks(event, of_deeper) for event in deeper.events[c:d]]
        matcher = SequenceMatcher(None, before, after, autojunk=False)
        for kind, _, _, start, stop in matcher.get_opcodes():
            if kind not in ("equal", "insert"):
                return None
            if kind == "equal":
                found.append(_Stretch(c + start, c + stop, repeated=False))
                continue
            between = _end_of_repeat(after, start, stop)
            for first, last in ((start, between), (between, stop)):
                found.append(_Stretch(c + first, c + last, repeated=True))
    return found


def _end_of_repeat(looks: list[tuple], start: int, stop: int) -> int:
    """Return where inserted events stop to repeat what is before and begin to repeat what is after.

    Where a shallow log has A C and the deeper A A C C, the matcher inserts A C as one stretch.
    """
    for middle in range(stop, start - 1, -1):
        before, after = middle - start, stop - middle
        as_before = looks[max(0, start - before) : start] == looks[start:middle]
        if as_before and looks[stop : stop + after] == looks[middle:stop]:
            return middle
    return stop


def _parts(trace: Trace) -> list[tuple[int, int]]:
    """Building the model, and each step."""
    steps = trace.steps()
    return [(0, steps[0][0] if steps else len(trace.events)), *steps]


def _uses_of_streams(trace: Trace) -> bool:
    events = ((trace.storages[event.storage], event) for event in trace.events)
    return any(storage.nbytes and not event.change_bytes for storage, event in events)


def _looks(event: Event, kinds: Mapping[int, tuple]) -> tuple:
    return (event.change_bytes, event.phase, event.stream, *kinds[event.storage])


@functools.cache
def _in_any_layer(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _kinds(trace: Trace) -> dict[int, tuple]:
    """Return the kind of each storage; those of one kind stand in for each other.

    A layer may make several storages alike: its first, its second and so on are kinds of their own.
    """
    kinds: dict[int, tuple] = {}
    made: Counter[tuple] = Counter()
    starts = iter((*trace.step_starts, len(trace.events)))
    next_step = next(starts)
    for index, event in enumerate(trace.events):
        while index == next_step:
            next_step = next(starts)
            made.clear()
        if event.storage in kinds:
            continue
        storage = trace.storages[event.storage]
        module, name = _in_any_layer(storage.module), _in_any_layer(storage.name)
        place = 0
        if module != storage.module:  # one layer's own path
            alike = (*_what(storage), storage.module, storage.name, storage.phase)
            place = made[alike]
            made[alike] += 1
        kinds[event.storage] = (*_what(storage), module, name, place)
    return kinds


def _what(storage: Storage) -> tuple:
    return storage.nbytes, storage.category, storage.operator, storage.device, storage.dtype


# --- which storage a repeated event frees ---------------------------------------------------------


def _frees(trace: Trace, kinds: Mapping[int, tuple]) -> dict[int, int] | None:
    """For each freeing event: its storage's place among the living ones of its kind, from the
    newest (-1) or, where that is the oldest, 0. None where a living storage changed its size.
    """
    alive: defaultdict[tuple, list[int]] = defaultdict(list)
    usual: dict[tuple, int] = {}  # how its kind was freed last when there was a choice
    frees: dict[int, int] = {}
    seen: Counter[int] = Counter()
    for index, event in enumerate(trace.events):
        storage = trace.storages[event.storage]
        kind = kinds[event.storage]
        living = alive[kind]
        seen[event.storage] += 1
        if seen[event.storage] == 1:
            living.append(event.storage)
        elif seen[event.storage] == 2 and event.change_bytes == -storage.nbytes:
            place = living.index(event.storage)
            if len(living) > 1:
                usual[kind] = 0 if place == 0 else place - len(living)
            frees[index] = usual.get(kind, -1)
            del living[place]
        else:
            return None
    return frees
