"""Continue traces of two steps into one of many steps, whose inputs may differ in length.

The first step of a run allocates what lasts, such as an optimizer's state; the second is what
repeats. What a step leaves behind (gradients, the loss) the next one frees. It is found again by
its role: what made it, and how many of that kind the step had left before it.

Limits: the steps of all lengths run the same code.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpumem.fake_cuda.depth_extension import single_lives
from gpumem.inputs import InputError
from gpumem.trace import Event, Trace

Role = tuple[tuple, int]  # of a storage: its kind, and its number among those of its kind


@dataclass(frozen=True)
class _TwoSteps:
    """A trace of two steps. ``before`` has the role of each storage that is alive when the second
    begins, ``after`` of each that the second makes and leaves, by number; ``second`` are its
    events."""

    trace: Trace
    second: range
    before: Mapping[int, Role]
    after: Mapping[int, Role]

    @classmethod
    def of(cls, trace: Trace) -> "_TwoSteps":
        if len(trace.step_starts) < 2:
            raise InputError(f"a trace of two steps is needed, not of {len(trace.step_starts)}")
        trace = single_lives(trace)
        starts, *later = trace.step_starts[1:]
        trace = replace(trace, events=trace.events[: later[0] if later else None])
        before = roles_of(trace, _living(trace.events[:starts]))
        after = roles_of(trace, _living(trace.events[starts:]))
        return cls(trace, range(starts, len(trace.events)), before, after)


def continued(traces: Mapping[int, Trace], lengths: Sequence[int]) -> Trace:
    """Return the trace of a run with one step for each of ``lengths``.

    Args:
        traces: for each length a trace of two steps of the same program; more are not used.
        lengths: of the steps, in order.

    Raises:
        InputError: a trace has but one step.
    """
    templates = {length: _TwoSteps.of(traces[length]) for length in dict.fromkeys(lengths)}
    start = templates[lengths[0]]
    events, storages = list(start.trace.events[: start.second.start]), list(start.trace.storages)
    step_starts = [start.trace.step_starts[0]]
    held = _held(events)
    left = {role: number for number, role in start.before.items()}
    for length in lengths[1:]:
        template = templates[length]
        step_starts.append(len(events))
        older = {number: left.get(role) for number, role in template.before.items()}
        own: dict[int, int] = {}
        for index in template.second:
            event = template.trace.events[index]
            number, change_bytes = older.get(event.storage), event.change_bytes
            if event.storage not in older:
                if event.storage not in own:
                    own[event.storage] = len(storages)
                    storages.append(template.trace.storages[event.storage])
                number = own[event.storage]
            elif number is None:
                continue  # the step before has left no such storage
            elif change_bytes < 0:  # of another length, perhaps
                change_bytes = -held[number]
            held[number] += change_bytes
            events.append(event._replace(storage=number, change_bytes=change_bytes))
        left |= {role: own[number] for number, role in template.after.items()}
    return replace(
        start.trace,
        storages=tuple(storages),
        events=tuple(events),
        step_starts=tuple(step_starts),
        work={},
    )


def roles_of(trace: Trace, numbers: Iterable[int]) -> dict[int, Role]:
    """Return the role of each of these storages, which are counted in this order."""
    seen: Counter[tuple] = Counter()
    roles = {}
    for number in numbers:
        storage = trace.storages[number]
        kind = (storage.device, storage.operator, storage.module, storage.name, storage.dtype)
        roles[number] = kind, seen[kind]
        seen[kind] += 1
    return roles


def _living(events: Iterable[Event]) -> list[int]:
    return [number for number, nbytes in _held(events).items() if nbytes > 0]


def _held(events: Iterable[Event]) -> Counter[int]:
    held: Counter[int] = Counter()
    for event in events:
        held[event.storage] += event.change_bytes
    return held
