"""A model of PyTorch's CUDA caching allocator.

What tensors hold and what the GPU must provide differ: the allocator rounds sizes up, reserves
memory from the driver in segments, and keeps freed blocks for the next request. `CachingAllocator`
follows its rules byte for byte; `labkit.allocator.replay` gives it the event log of a run.

Sources, in PyTorch: ``c10/cuda/CUDACachingAllocator.cpp`` for the rules (functions are named where
they are followed), ``c10/core/AllocatorConfig.h`` for the sizes.

Limits: default settings, so no ``max_split_size_mb``, ``roundup_power2_divisions``,
``garbage_collection_threshold`` or private pools of CUDA graphs; one stream, on which every free
takes effect at once. Addresses grow and are never used again, while a driver may hand out old
ones, which can turn a tie between blocks of one size. A budget stands for a device that has no
more: ``set_per_process_memory_fraction`` does the same to ordinary segments, but where segments
are expandable it compares the size of the request's segment before anything is mapped, and then
lets the pages pass.
"""

from bisect import bisect_left, insort
from itertools import chain
from typing import Any

from labkit.out_of_memory import SimulatedOutOfMemory
from labkit.values import MIB, InputError, positive_int

MIN_BLOCK_BYTES = 512  # kMinBlockSize: every size is rounded up to a multiple
SMALL_BYTES = MIB  # kSmallSize: requests up to this come from the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: the small pool's segments, or pages
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size: the large pool's, for medium requests
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from here on a request has a segment of its own size
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge: ... rounded up to this
EXABYTE = 1 << 60  # a request must be smaller: NativeCachingAllocator::allocate
FIRST_ADDRESS = 1 << 40


class _Block:
    """A range of addresses. The blocks of one segment are linked in the order of addresses.

    ``origin`` is where its segment begins. Only in expandable segments is a block ever not
    ``mapped``: addresses without memory behind them.
    """

    def __init__(self, pool: "_Pool", address: int, size: int, origin: int) -> None:
        self.pool, self.address, self.size, self.origin = pool, address, size, origin
        self.prev: _Block | None = None
        self.next: _Block | None = None
        self.allocated, self.mapped = False, True
        self.requested_bytes, self.name = 0, ""

    def cut(self, size: int) -> "_Block":
        """Keep the first ``size`` bytes; the rest becomes a block of its own, linked behind."""
        rest = _Block(self.pool, self.address + size, self.size - size, self.origin)
        rest.mapped, rest.prev, rest.next = self.mapped, self, self.next
        if rest.next is not None:
            rest.next.prev = rest
        self.next, self.size = rest, size
        return rest


def _size(block: _Block) -> tuple[int, int]:
    return block.size, block.address


def _address(block: _Block) -> int:
    return block.address


class _Pool:
    """Free blocks by size, then address; unmapped ones by address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.free: list[_Block] = []
        self.unmapped: list[_Block] = []

    def add(self, block: _Block) -> None:
        if block.mapped:
            insort(self.free, block, key=_size)
        else:
            insort(self.unmapped, block, key=_address)

    def remove(self, block: _Block) -> None:
        (self.free if block.mapped else self.unmapped).remove(block)

    def absorb(self, block: _Block, other: _Block | None) -> None:
        """Join ``block`` with a free neighbour, if it is one (``try_merge_blocks``)."""
        if other is None or other.allocated or other.mapped is not block.mapped:
            return
        self.remove(other)
        if other is block.prev:
            block.address, block.prev = other.address, other.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.prev = block
        block.size += other.size


class CachingAllocator:
    """PyTorch's caching allocator on one stream.

    Args:
        budget_bytes: what the device can provide in all; None is without limit. It may be changed.
        expandable_segments: as ``PYTORCH_ALLOC_CONF=expandable_segments:True``.

    ``allocated_bytes`` and ``reserved_bytes`` are what ``torch.cuda.memory_allocated()`` and
    ``memory_reserved()`` would say, ``peak_allocated_bytes`` and ``peak_reserved_bytes`` their
    largest values so far.
    """

    def __init__(
        self, *, budget_bytes: int | None = None, expandable_segments: bool = False
    ) -> None:
        if budget_bytes is not None:
            budget_bytes = positive_int(budget_bytes, "budget_bytes", most=EXABYTE)
        self.budget_bytes, self.expandable_segments = budget_bytes, bool(expandable_segments)
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._live: dict[int, _Block | None] = {}
        self._handles, self._next_address = 0, FIRST_ADDRESS

    # --- what callers use -----------------------------------------------------------------

    def allocate(self, nbytes: int, name: str = "") -> int:
        """Return a handle for ``nbytes`` bytes, as ``malloc`` serves them; 0 take no memory.

        First a cached block, else new memory; if there is none left, everything cached is
        returned to the device and new memory is asked for once more.

        Raises:
            SimulatedOutOfMemory: the budget cannot serve it. What was cached is gone by then.
        """
        if type(nbytes) is not int or not 0 <= nbytes < EXABYTE:
            raise InputError(f"bytes must be a whole number from 0 to 2**60 - 1, not {nbytes!r}")
        block = None
        if nbytes:
            size = -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
            pool = self._small if size <= SMALL_BYTES else self._large
            block = self._cached(pool, size) or self._new(pool, size)
            if block is None:
                self.empty_cache()
                block = self._new(pool, size)
            if block is None:
                raise SimulatedOutOfMemory(nbytes, self.allocated_bytes, self.budget_bytes)
            self._use(block, size, nbytes, name)
        self._handles += 1
        self._live[self._handles] = block
        return self._handles

    def free(self, handle: int) -> None:
        """Give a block back to the cache, joined with free neighbours (``free_block``)."""
        if handle not in self._live:
            raise InputError(f"{handle!r} is not live: never allocated, or freed before")
        block = self._live.pop(handle)
        if block is None:
            return
        self.allocated_bytes -= block.size
        block.allocated, block.requested_bytes, block.name = False, 0, ""
        block.pool.absorb(block, block.prev)
        block.pool.absorb(block, block.next)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Return wholly free segments, or pages, to the device (``release_cached_blocks``)."""
        for pool in (self._large, self._small):
            if self.expandable_segments:
                for block in list(pool.free):
                    self._unmap(block)
                continue
            whole = [block for block in pool.free if block.prev is block.next is None]
            pool.free = [block for block in pool.free if block not in whole]
            self.reserved_bytes -= sum(block.size for block in whole)

    def segments(self) -> list[dict[str, Any]]:
        """Return the memory held, in the form of ``torch.cuda.memory_snapshot()``, by address.

        Of an expandable segment each stretch with memory behind it is one entry.
        """
        held = (block for block in self._live.values() if block is not None)
        blocks = chain(held, self._small.free, self._large.free)
        heads = [block for block in blocks if block.prev is None or not block.prev.mapped]
        return [self._segment(head) for head in sorted(heads, key=_address)]

    def _segment(self, head: _Block) -> dict[str, Any]:
        blocks, block = [], head
        while block is not None and block.mapped:
            blocks.append(
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested_bytes,
                    "state": "active_allocated" if block.allocated else "inactive",
                    "name": block.name,
                }
            )
            block = block.next
        return {
            "address": head.address,
            "total_size": sum(b["size"] for b in blocks),
            "allocated_size": sum(b["size"] for b in blocks if b["state"] != "inactive"),
            "segment_type": "small" if head.pool.small else "large",
            "is_expandable": self.expandable_segments,
            "blocks": blocks,
        }

    # --- serving a request ----------------------------------------------------------------

    def _cached(self, pool: _Pool, size: int) -> _Block | None:
        """Best fit: the smallest free block, of these the lowest address (``get_free_block``)."""
        free = pool.free
        at = bisect_left(free, (size,), key=_size)
        if at == len(free):
            return None
        if self.expandable_segments:
            # A block at the growing end counts as large as it could become: spare it.
            while at + 1 < len(free) and _room(free[at + 1]) < _room(free[at]):
                at += 1
        return free.pop(at)

    def _new(self, pool: _Pool, size: int) -> _Block | None:
        """Return a block of new memory; None if the budget has none left (``alloc_block``)."""
        if self.expandable_segments:
            return self._expanded(pool, size)
        segment_bytes = _segment_bytes(size)
        if not self._reserve(segment_bytes):
            return None
        block = _Block(pool, self._next_address, segment_bytes, self._next_address)
        self._next_address += segment_bytes
        return block

    def _reserve(self, nbytes: int) -> bool:
        if self.budget_bytes is not None and self.reserved_bytes + nbytes > self.budget_bytes:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _use(self, block: _Block, size: int, nbytes: int, name: str) -> None:
        """Split off what is left over if that is worth it (``should_split``), and count."""
        rest = block.size - size
        if block.pool.small or self.expandable_segments:
            worth_splitting = rest >= MIN_BLOCK_BYTES
        else:
            worth_splitting = rest > SMALL_BYTES
        if worth_splitting:
            block.pool.add(block.cut(size))
        block.allocated, block.requested_bytes, block.name = True, nbytes, name
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    # --- expandable segments --------------------------------------------------------------

    def _expanded(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages until there is room (``try_allocate_expandable_block``).

        Where the budget ends halfway, what was mapped so far stays, free.
        """
        block = self._expandable(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            gap = block.next
            if not self._map(gap, min(size - block.size, gap.size)):
                return None
            block = gap
        pool.remove(block)
        return block

    def _expandable(self, pool: _Pool, size: int) -> _Block:
        """Where free and unmapped blocks in a row leave room; the lowest address."""
        for block in pool.unmapped:
            if block.prev is not None and not block.prev.allocated:
                block = block.prev
            room, following = 0, block
            while room < size and following is not None and not following.allocated:
                room += following.size
                following = following.next
            if room >= size:
                return block
        # A new segment: addresses for 1 1/8 of the device's memory. Without a budget, for all.
        span = 2 * EXABYTE if self.budget_bytes is None else self.budget_bytes * 9 // 8
        span = -(-span // pool.page_bytes) * pool.page_bytes
        block = _Block(pool, self._next_address, span, self._next_address)
        block.mapped = False
        self._next_address += span
        pool.add(block)
        return block

    def _map(self, block: _Block, size: int) -> bool:
        """Put memory behind the first pages of an unmapped block (``map_block``)."""
        pool = block.pool
        mapped_bytes = -(-size // pool.page_bytes) * pool.page_bytes
        if not self._reserve(mapped_bytes):
            return False
        pool.remove(block)
        if mapped_bytes < block.size:
            pool.add(block.cut(mapped_bytes))
        block.mapped = True
        pool.absorb(block, block.prev)
        pool.absorb(block, block.next)
        pool.add(block)
        return True

    def _unmap(self, block: _Block) -> None:
        """Return the pages that lie wholly inside a free block (``unmap_block``)."""
        pool, page_bytes = block.pool, block.pool.page_bytes
        offset = block.address - block.origin
        start = -(-offset // page_bytes) * page_bytes
        stop = (offset + block.size) // page_bytes * page_bytes
        if start >= stop:
            return
        pool.remove(block)
        if start > offset:
            head, block = block, block.cut(start - offset)
            pool.add(head)
        if block.size > stop - start:
            pool.add(block.cut(stop - start))
        block.mapped = False
        self.reserved_bytes -= stop - start
        pool.absorb(block, block.prev)
        pool.absorb(block, block.next)
        if block.prev is not None or block.next is not None:  # else the segment is gone
            pool.add(block)


def _room(block: _Block) -> int:
    """Return what a block could become: itself and the unmapped addresses behind it."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _segment_bytes(size: int) -> int:
    """Return the segment that is reserved for a request of ``size`` (``get_allocation_size``)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
