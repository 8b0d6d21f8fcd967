"""Replay the event log of a run through a model of PyTorch's caching allocator.

That gives what a log of tensors cannot: reserved memory, fragmentation, the exact request that
fails under a budget, and (by `Player`) the map of segments at any moment, without a GPU.

Source: ``resize_bytes_cuda`` in PyTorch's ``aten/src/ATen/native/cuda/Resize.cpp`` for a storage
that changes its size in place; `gpumem.allocator.caching` for the rest.

Limits: the allocator's own, and the log's: what is not in it (the workspaces of cuDNN, say) is not
served.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from gpumem.allocator.caching import CachingAllocator
from gpumem.hardware import catalogue
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError
from gpumem.out_of_memory import SimulatedOutOfMemory
from gpumem.runs import OutOfMemory
from gpumem.trace import Category, Trace


@dataclass(frozen=True)
class Replay:
    """What the allocator does with every event of a trace on its device.

    After the first request that the budget cannot serve the replay continues without a budget, so
    that the figures say what would have been needed.

    Attributes:
        indices: the events of the trace on its device.
        allocated_bytes, reserved_bytes: after each of these events.
        highest_bytes: the most allocated during each of them: a storage that changes its size is
            copied, so the old and the new block are both in use for a moment.
        by_category: what the allocated peak was made of; sums to it. ``unattributed`` has what
            rounding took.
        failure: the first request that failed; None if all were served. Its ``live_bytes`` is
            what was allocated.
    """

    trace: Trace = field(repr=False, compare=False)
    indices: tuple[int, ...] = field(repr=False)
    allocated_bytes: tuple[int, ...] = field(repr=False)
    reserved_bytes: tuple[int, ...] = field(repr=False)
    highest_bytes: tuple[int, ...] = field(repr=False)
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    by_category: Mapping[Category, int]
    failure: OutOfMemory | None

    def step_peaks_bytes(self) -> tuple[int, ...]:
        """Return the most bytes allocated in each training step, or held when it began."""
        peaks = []
        for start, stop in self.trace.steps():
            first, last = bisect_left(self.indices, start), bisect_left(self.indices, stop)
            before = self.allocated_bytes[first - 1] if first else 0
            peaks.append(max(self.highest_bytes[first:last], default=before))
        return tuple(peaks)


def replay(
    trace: Trace,
    *,
    budget_bytes: int | None = None,
    expandable_segments: bool = False,
) -> Replay:
    """Serve every event of ``trace`` as a `CachingAllocator` with these arguments would.

    Raises:
        InputError: a bad argument, or a trace that frees more of a storage than it holds.
    """
    if not isinstance(trace, Trace):
        raise InputError(f"a replay needs a trace, as in run.trace, not {type(trace).__name__}")
    player = Player(trace, budget_bytes, expandable_segments)
    allocator = player.allocator
    indices, allocated, reserved, highest = [], [], [], []
    for index, _, _ in trace.changes():
        indices.append(index)
        highest.append(player.play(index))
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return Replay(
        trace=trace,
        indices=tuple(indices),
        allocated_bytes=tuple(allocated),
        reserved_bytes=tuple(reserved),
        highest_bytes=tuple(highest),
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        by_category=player.at_peak,
        failure=player.failure,
    )


class Player:
    """Gives the events of a trace to an allocator, one by one: `play` each index in order, and look
    at ``allocator`` in between. From one that fails on, the budget is lifted."""

    def __init__(
        self,
        trace: Trace,
        budget_bytes: int | None,
        expandable_segments: bool,
        device_bytes: int | None = None,
    ) -> None:
        self.allocator = CachingAllocator(
            budget_bytes=budget_bytes,
            expandable_segments=expandable_segments,
            device_bytes=device_bytes,
        )
        self.trace = trace
        self.failure: OutOfMemory | None = None
        self.at_peak: Counter[Category] = Counter()
        self._held: dict[int, tuple[int, int]] = {}  # storage: its handle and bytes
        self._live: Counter[Category] = Counter()

    def play(self, index: int) -> int:
        """Serve event ``index`` and return the most bytes allocated while doing so."""
        number, change_bytes, _, stream = self.trace.events[index]
        allocator, category = self.allocator, self.trace.storages[number].category
        highest_bytes = allocator.allocated_bytes
        if not change_bytes:
            if number in self._held:  # not an empty storage that was made or freed
                allocator.record_stream(self._held[number][0], stream)
            return highest_bytes
        handle, held_bytes = self._held.pop(number, (None, 0))
        nbytes = held_bytes + change_bytes
        if nbytes < 0:
            raise InputError(
                f"event {index} frees {-change_bytes} bytes of storage {number}, "
                f"which holds {held_bytes}"
            )
        if nbytes:  # before the old block is freed: resize_bytes_cuda copies
            peak_bytes = allocator.peak_allocated_bytes
            self._held[number] = self._allocate(index, nbytes), nbytes
            self._live[category] += nbytes
            highest_bytes = allocator.allocated_bytes
            if highest_bytes > peak_bytes:
                self.at_peak = self._by_category()
        if handle is not None:
            allocator.free(handle)
            self._live[category] -= held_bytes
        return highest_bytes

    def handle(self, number: int) -> int:
        """Return the allocator's handle of a storage that is alive."""
        return self._held[number][0]

    def _allocate(self, index: int, nbytes: int) -> int:
        allocator, stream = self.allocator, self.trace.events[index].stream
        try:
            return allocator.allocate(nbytes, stream=stream)
        except SimulatedOutOfMemory:
            budget_bytes, allocator.budget_bytes = allocator.budget_bytes, None
            live = self._by_category()
            self.failure = OutOfMemory.at_event(
                self.trace, index, nbytes, budget_bytes, live, allocator.reserved_bytes
            )
        return allocator.allocate(nbytes, stream=stream)

    def _by_category(self) -> Counter[Category]:
        """Return what is allocated now. The allocator hands out whole blocks: no category has what
        they take beyond the tensors."""
        found = self._live.copy()
        found[Category.UNATTRIBUTED] += self.allocator.allocated_bytes - found.total()
        return found


class ReplayedCuda(Player):
    """Memory of ``gpu`` while it serves ``trace``, asked by the functions of ``torch.cuda``.

    The context is the catalogue's figure; of the statistics there are two.
    """

    def __init__(self, trace: Trace, gpu: str | Gpu, *, expandable_segments: bool = False) -> None:
        self._gpu = catalogue.gpu(gpu)
        gpu_bytes = self._gpu.usable_bytes
        super().__init__(trace, self._gpu.budget_bytes, expandable_segments, gpu_bytes)

    def _allocate(self, index: int, nbytes: int) -> int:
        return self.allocator.allocate(nbytes, stream=self.trace.events[index].stream)

    def steps(self) -> Iterator[int]:
        """Serve one step after the other, the first with its setup; yield their numbers. A request
        that the GPU could not have served raises `SimulatedOutOfMemory`."""
        indices = [index for index, _, _ in self.trace.changes()]
        ends = [bisect_left(indices, stop) for _, stop in self.trace.steps()]
        for number, (start, end) in enumerate(pairwise([0, *ends]), start=1):
            for index in indices[start:end]:
                self.play(index)
            yield number

    def memory_allocated(self) -> int:
        return self.allocator.allocated_bytes

    def max_memory_allocated(self) -> int:
        return self.allocator.peak_allocated_bytes

    def memory_reserved(self) -> int:
        return self.allocator.reserved_bytes

    def mem_get_info(self) -> tuple[int, int]:
        used_bytes = self.allocator.reserved_bytes + self._gpu.context_bytes
        return self._gpu.usable_bytes - used_bytes, self._gpu.usable_bytes

    def memory_stats(self) -> dict[str, int]:
        requested, flushes = sum(n for _, n in self._held.values()), self.allocator.flushes
        return {"requested_bytes.all.current": requested, "num_alloc_retries": flushes}

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return self.allocator.segments()

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def reset_peak_memory_stats(self) -> None:
        self.allocator.peak_allocated_bytes = self.allocator.allocated_bytes
