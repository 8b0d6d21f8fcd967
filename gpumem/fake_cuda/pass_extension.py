"""All of a conversation's forward passes from traces of a few.

``generate`` runs the model once over the prompt, and once more for each token. Each of these passes
does what the one before did, with one token more in the cache, so that what it takes grows by the
same bytes. `Decoding` traces passes in pairs, at both ends of stretches in which the attention
kernel does not change, repeats what lies between, and divides a stretch that does not end as it
began (a sliding window is full, say).

What a pass leaves to the next one (the cache, the tokens so far) is found again by its role: what
made it, and how many of that kind were alive before it.

Limits: passes of both ends of a stretch are traced; what differs between them only is not seen.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from gpumem.fake_cuda.depth_extension import single_lives
from gpumem.fake_cuda.step_extension import Role, roles_of
from gpumem.inputs import InputError
from gpumem.trace import Storage, Trace

#: Passes of a trace before its next one is like all that follow: the prompt's, and what it leaves.
FIRST = 2
#: Passes of a trace that are looked at: three like those that follow.
TRACED = FIRST + 3


@dataclass(frozen=True)
class Pass:
    """What one pass takes and frees, in order.

    ``changes`` are numbers of ``storages`` that it takes; or, freed, such numbers as ``~number``,
    or the roles of what earlier passes left. ``left`` are the roles of what it leaves.
    """

    changes: tuple[int | Role, ...]
    storages: tuple[Storage, ...]
    left: dict[Role, int]

    @property
    def sizes(self) -> list[int]:
        return [storage.nbytes for storage in self.storages]

    def like(self, other: "Pass") -> bool:
        """Return whether both do the same, sizes aside."""
        return self.changes == other.changes and self.left == other.left


class Stretch(NamedTuple):
    """Passes ``first`` to ``last``, by number, like ``passed``; each takes ``more`` bytes of each
    storage than the one before."""

    first: int
    last: int
    passed: Pass
    more: list[int]

    def sizes(self, number: int) -> list[int]:
        """Return the bytes of each storage that pass ``number`` takes."""
        times = number - self.first
        return [n + times * m for n, m in zip(self.passed.sizes, self.more, strict=True)]


class Decoding:
    """A conversation's passes, numbered from 1.

    Args:
        trace_at: ``trace_at(skipped, count)`` traces ``count`` passes, and no end, of the same
            conversation with a prompt that is ``skipped`` tokens longer.
        count: how many passes it has.
        edges: numbers of the passes with which stretches end, at least.
        fixed: whether the cache has its size from the beginning, so that nothing can be traced
            beyond the last pass.

    Attributes:
        setup: the trace of what comes before the first pass, and of the first passes.
        stretches: all passes, in order.
    """

    def __init__(
        self,
        trace_at: Callable[[int, int], Trace],
        count: int,
        edges: Iterable[int] = (),
        *,
        fixed: bool = False,
    ) -> None:
        self._trace_at, self._count, self._last = trace_at, count, count - fixed
        self.setup = single_lives(trace_at(0, min(count, TRACED)))
        first = passes_of(self.setup)
        alone = count if count <= TRACED else FIRST
        self.stretches = [_single(number, first[number - 1]) for number in range(1, alone + 1)]
        if count <= TRACED:
            return
        self._known = {FIRST + 1: first[FIRST:]}
        ends = sorted({self._last, *(edge for edge in edges if FIRST + 2 < edge < self._last)})
        for before, end in pairwise([FIRST, *ends]):
            self._stretch(before + 1, end)
        final = self.stretches.pop()
        if final.last < count and final.first == final.last:
            raise InputError("this conversation's last tokens are unlike all before: take one more")
        self.stretches.append(final._replace(last=count))

    def _at(self, number: int) -> list[Pass]:
        """Return pass ``number`` and up to two more."""
        if number not in self._known:
            more = self._last - number if self._last < self._count else 2
            skipped, count = number - FIRST - 1, FIRST + 1 + min(2, more)
            self._known[number] = passes_of(single_lives(self._trace_at(skipped, count)))[FIRST:]
        return self._known[number]

    def _stretch(self, first: int, last: int) -> None:
        begun = self._at(first)
        if last == first or (len(begun) > 1 and not begun[0].like(begun[1])):
            self.stretches.append(_single(first, begun[0]))
            if last > first:
                self._stretch(first + 1, last)
            return
        sizes = [passed.sizes for passed in begun[:2]]
        more = [b - a for a, b in zip(*sizes, strict=True)]
        found, ended = Stretch(first, last, begun[0], more), self._at(last)[0]
        if begun[0].like(ended) and found.sizes(last) == ended.sizes:
            self.stretches.append(found)
        elif last == first + 1:
            self._stretch(first, first)
            self._stretch(last, last)
        else:
            middle = (first + last) // 2
            self._stretch(first, middle)
            self._stretch(middle + 1, last)

    def passes(self) -> Iterator[tuple[int, Stretch]]:
        """Yield the number of each pass, and its stretch."""
        for stretch in self.stretches:
            for number in range(stretch.first, stretch.last + 1):
                yield number, stretch


def _single(number: int, passed: Pass) -> Stretch:
    return Stretch(number, number, passed, [0] * len(passed.storages))


def passes_of(trace: Trace) -> list[Pass]:
    """Return the passes of ``trace``."""
    living = set(living_before(trace))
    return [_passed(trace, living, begin, end) for begin, end in trace.steps()]


def living_before(trace: Trace) -> dict[int, Role]:
    """Return the roles of what is alive when the first pass begins, by number."""
    living: set[int] = set()
    _live(trace, living, 0, trace.step_starts[0])
    return roles_of(trace, sorted(living))


def _passed(trace: Trace, living: set[int], begin: int, end: int) -> Pass:
    before = roles_of(trace, sorted(living))
    made: dict[int, int] = {}
    changes: list[int | Role] = []
    for event in trace.events[begin:end]:
        number, change_bytes = event.storage, event.change_bytes
        if not change_bytes or trace.storages[number].device != trace.device:
            continue
        if change_bytes > 0 and (number in made or number in before):
            raise InputError("a tensor grows in its place in this model's passes: none is repeated")
        if change_bytes > 0:
            made[number] = len(made)
            changes.append(made[number])
        else:
            changes.append(~made[number] if number in made else before[number])
    _live(trace, living, begin, end)
    after = roles_of(trace, sorted(living))
    left = {role: made[number] for number, role in after.items() if number in made}
    return Pass(tuple(changes), tuple(trace.storages[number] for number in made), left)


def _live(trace: Trace, living: set[int], begin: int, end: int) -> None:
    """Bring ``living`` up to date with the events from ``begin`` to ``end``."""
    for event in trace.events[begin:end]:
        if trace.storages[event.storage].device == trace.device:
            if event.change_bytes > 0:
                living.add(event.storage)
            elif event.change_bytes < 0:
                living.discard(event.storage)
