"""Where the driver puts the memory that ``cudaMalloc`` asks for.

Of two free blocks of one size PyTorch's allocator before 2.13 takes the one with the lower address.
So the places of segments decide which block is cut, and in the end what is allocated and reserved.

Source: the addresses of ten runs on an H200, driver 580.159.04 on Linux (docs/LOG.md, 2026-11-26).
Address space comes from the top down, in chunks of 32 MiB or a multiple. What a request leaves of
its chunk serves later ones, the lowest place first. A chunk that is wholly free is given up.

Limits: what else the driver keeps in the same chunks, code of kernels for example, is left out.
Other drivers and systems may choose otherwise. Standard library only.
"""

from bisect import bisect_right, insort

from gpumem.units import MIB

CHUNK_BYTES = 32 * MIB
TOP = 1 << 45


class DriverAddresses:
    """The addresses that one device's memory gets, as (start, end) of what is free."""

    def __init__(self) -> None:
        self._space = [(0, TOP)]  # outside chunks
        self._left: list[tuple[int, int]] = []  # inside
        self._chunks: list[tuple[int, int]] = []
        self._used_bytes: dict[int, int] = {}  # by where a chunk starts

    def take(self, nbytes: int) -> int:
        """Return where ``nbytes`` bytes, a multiple of 2 MiB, begin."""
        for place, (start, end) in enumerate(self._left):
            if end - start >= nbytes:
                del self._left[place]
                break
        else:
            start, end = self._new_chunk(-(-nbytes // CHUNK_BYTES) * CHUNK_BYTES)
        if start + nbytes < end:
            insort(self._left, (start + nbytes, end))
        self._used_bytes[self._chunk_of(start)[0]] += nbytes
        return start

    def give_back(self, address: int, nbytes: int) -> None:
        """Free what `take` returned for as many bytes."""
        chunk = self._chunk_of(address)
        self._used_bytes[chunk[0]] -= nbytes
        if self._used_bytes[chunk[0]]:
            _add(self._left, (address, address + nbytes), within=chunk)
            return
        self._left = [free for free in self._left if not chunk[0] <= free[0] < chunk[1]]
        self._chunks.remove(chunk)
        del self._used_bytes[chunk[0]]
        _add(self._space, chunk, within=(0, TOP))

    def _new_chunk(self, nbytes: int) -> tuple[int, int]:
        place = max(i for i, (start, end) in enumerate(self._space) if end - start >= nbytes)
        start, end = self._space.pop(place)
        if start < end - nbytes:
            self._space.insert(place, (start, end - nbytes))
        chunk = (end - nbytes, end)
        insort(self._chunks, chunk)
        self._used_bytes[chunk[0]] = 0
        return chunk

    def _chunk_of(self, address: int) -> tuple[int, int]:
        return self._chunks[bisect_right(self._chunks, (address, TOP)) - 1]


def _add(free: list[tuple[int, int]], freed: tuple[int, int], within: tuple[int, int]) -> None:
    """Add a range to sorted ones, joined with those beside it that lie ``within``."""
    start, end = freed
    after = bisect_right(free, freed)
    if after < len(free) and free[after][0] == end < within[1]:
        end = free.pop(after)[1]
    if after and free[after - 1][1] == start > within[0]:
        after -= 1
        start = free.pop(after)[0]
    free.insert(after, (start, end))
