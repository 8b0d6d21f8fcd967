"""The caching allocator's model: PyTorch's own numbers, each rule by hand, two naive models of it
that share nothing with it, random logs, and traces."""

import itertools
import random
import re
from pathlib import Path

import pytest
import torch
from fake_runs import TraceBuilder, training_trace

from labkit import allocator as module
from labkit.allocator import CachingAllocator
from labkit.memory import MIB, Category, Event, InputError, Phase, Trace
from labkit.replays import replay
from labkit.show.segments import sums
from labkit.tracker import SimulatedOutOfMemory, track

C, P = Category, Phase
KIND = pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])


def layout(allocator):
    """Blocks of each segment in the order of addresses; a negative size is free."""
    return [
        [b["size"] if b["state"] == "active_allocated" else -b["size"] for b in s["blocks"]]
        for s in allocator.segments()
    ]


def in_mib(allocator):
    return [[size / MIB for size in segment] for segment in layout(allocator)]


def fill(allocator, *mib):
    """Handles for requests of so many MiB."""
    return [allocator.allocate(int(n * MIB)) for n in mib]


# --- PyTorch's own numbers ---------------------------------------------------------------------


def test_the_sizes_are_those_of_the_installed_pytorch():
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    text = header.read_text()
    if "kMinLargeAlloc" not in text:
        pytest.skip("this PyTorch keeps the sizes in a source file that is not installed")
    sizes = {key: int(n) for key, n in re.findall(r"constexpr size_t (\w+) = (\d+);", text)}
    assert sizes["kMinBlockSize"] == module.MIN_BLOCK_BYTES
    assert sizes["kSmallSize"] == module.SMALL_BYTES
    assert sizes["kSmallBuffer"] == module.SMALL_SEGMENT_BYTES
    assert sizes["kMinLargeAlloc"] == module.MIN_LARGE_BYTES
    assert sizes["kRoundLarge"] == module.ROUND_LARGE_BYTES
    large = re.search(r"large_segment_size_\{(\d+)\}", text)
    assert int(large.group(1)) == module.LARGE_SEGMENT_BYTES


@KIND
@pytest.mark.parametrize(
    ("nbytes", "segments", "reserved", "reserved_after", "paged", "paged_after"),
    [
        (512, 1, 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB),
        (MIB, 2, 4 * MIB, 2 * MIB, 4 * MIB, 2 * MIB),
        (MIB + 512, 1, 20 * MIB, 20 * MIB, 20 * MIB, 20 * MIB),
        (10 * MIB - 512, 2, 40 * MIB, 20 * MIB, 40 * MIB, 40 * MIB),
        (10 * MIB + 512, 3, 36 * MIB, 12 * MIB, 40 * MIB, 20 * MIB),
    ],
)
def test_pytorchs_test_of_its_statistics(
    expandable, nbytes, segments, reserved, reserved_after, paged, paged_after
):
    """``test_graph_memory_stats_and_use_result_after_destroy_graph`` in ``test/test_cuda.py``.

    Its captured graph has a pool of its own, in which ``b = a.clone()`` and five times
    ``b = b.clone() + 1`` run; then all but ``b`` is returned. Numbers as it expects them.
    """
    allocator = CachingAllocator(expandable_segments=expandable)
    b = allocator.allocate(nbytes)
    for _ in range(5):
        clone = allocator.allocate(nbytes)
        total = allocator.allocate(nbytes)
        allocator.free(clone)
        allocator.free(b)
        b = total
    assert allocator.reserved_bytes == (paged if expandable else reserved)
    assert len(allocator.segments()) == (1 if expandable else segments)
    assert allocator.allocated_bytes == allocator.requested_bytes == nbytes
    allocator.empty_cache()
    assert allocator.reserved_bytes == (paged_after if expandable else reserved_after)
    assert allocator.allocated_bytes == nbytes


def test_pytorchs_test_of_a_kilobyte():
    """``test_memory_stats``: 256 floats make 1024 bytes active, and none once they are freed."""
    allocator = CachingAllocator()
    handle = allocator.allocate(256 * 4)
    assert allocator.allocated_bytes == 1024
    allocator.free(handle)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (1024, 2 * MIB)


def test_a_snapshot_that_somebody_published():
    """Of ``X @ W + b`` on a real GPU, with the workspace of cuBLAS in a segment of its own.

    https://discuss.pytorch.org/t/178671: ``torch.cuda.memory_snapshot()`` of 1000 x 10 weights.
    """
    allocator = CachingAllocator()
    for nbytes in (1000 * 10 * 4, 10 * 4, 1000 * 4):
        allocator.allocate(nbytes)
    allocator.allocate(8519680)
    product = allocator.allocate(10 * 4)
    allocator.allocate(10 * 4)
    allocator.free(product)
    assert layout(allocator) == [
        [40448, 512, 4096, -512, 512, -2051072],
        [8519680, -12451840],
    ]
    found = [(s["total_size"], s["allocated_size"]) for s in allocator.segments()]
    assert found == [(2097152, 45568), (20971520, 8519680)]


@KIND
def test_pytorchs_test_of_running_out_and_trying_again(expandable):
    """``test_out_of_memory_retry``: two halves do not fit at once; freed, the second one does."""
    allocator = CachingAllocator(budget_bytes=1000 * MIB - 1, expandable_segments=expandable)
    first = allocator.allocate(500 * MIB)
    with pytest.raises(SimulatedOutOfMemory):
        allocator.allocate(500 * MIB)
    allocator.free(first)
    assert allocator.allocate(500 * MIB)


# --- sizes -------------------------------------------------------------------------------------


@KIND
@pytest.mark.parametrize(
    ("nbytes", "block"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1025, 1536)]
)
def test_sizes_are_rounded_up_to_512_bytes(expandable, nbytes, block):
    allocator = CachingAllocator(expandable_segments=expandable)
    allocator.allocate(nbytes)
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (nbytes, block)
    assert layout(allocator) == [[block, block - 2 * MIB]]


@pytest.mark.parametrize(
    ("nbytes", "segment", "kind"),
    [
        (1, 2 * MIB, "small"),
        (MIB, 2 * MIB, "small"),
        (MIB + 1, 20 * MIB, "large"),
        (10 * MIB - 512, 20 * MIB, "large"),
        (10 * MIB - 511, 10 * MIB, "large"),  # rounded to 10 MiB before it is looked at
        (10 * MIB, 10 * MIB, "large"),
        (10 * MIB + 1, 12 * MIB, "large"),
        (33 * MIB, 34 * MIB, "large"),
    ],
)
def test_a_segment_for_each_size(nbytes, segment, kind):
    allocator = CachingAllocator()
    allocator.allocate(nbytes)
    (found,) = allocator.segments()
    assert (found["total_size"], found["segment_type"]) == (segment, kind)
    assert found["is_expandable"] is False
    assert allocator.reserved_bytes == segment


@pytest.mark.parametrize(
    ("nbytes", "mapped", "kind"),
    [
        (1, 2 * MIB, "small"),
        (MIB, 2 * MIB, "small"),
        (MIB + 1, 20 * MIB, "large"),
        (10 * MIB, 20 * MIB, "large"),
        (20 * MIB, 20 * MIB, "large"),
        (20 * MIB + 1, 40 * MIB, "large"),
    ],
)
def test_pages_for_each_size(nbytes, mapped, kind):
    allocator = CachingAllocator(expandable_segments=True)
    allocator.allocate(nbytes)
    (found,) = allocator.segments()
    assert (found["total_size"], found["segment_type"]) == (mapped, kind)
    assert found["is_expandable"] is True
    assert allocator.reserved_bytes == mapped


@KIND
def test_nothing_takes_no_memory_and_has_a_handle(expandable):
    allocator = CachingAllocator(budget_bytes=1, expandable_segments=expandable)
    one, two = allocator.allocate(0), allocator.allocate(0)
    assert one != two
    assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.segments()) == (0, 0, [])
    allocator.free(one)
    with pytest.raises(InputError, match="not live"):
        allocator.free(one)


# --- choosing and splitting --------------------------------------------------------------------


@KIND
def test_the_smallest_block_that_suffices(expandable):
    allocator = CachingAllocator(expandable_segments=expandable)
    handles = [allocator.allocate(n * 1024) for n in (64, 1, 16, 1, 32, 1)]
    addresses = [b["address"] for b in allocator.segments()[0]["blocks"]]
    for at in (0, 2, 4):
        allocator.free(handles[at])
    allocator.allocate(16 * 1024 - 700, "new")  # 64, 16 and 32 KiB are free, and the end
    blocks = {b["name"]: b["address"] for b in allocator.segments()[0]["blocks"]}
    assert blocks["new"] == addresses[2]
    allocator.allocate(17 * 1024, "newer")
    blocks = {b["name"]: b["address"] for b in allocator.segments()[0]["blocks"]}
    assert blocks["newer"] == addresses[4]


@KIND
def test_of_equal_blocks_the_lowest_address(expandable):
    allocator = CachingAllocator(expandable_segments=expandable)
    handles = [allocator.allocate(4096) for _ in range(6)]
    start = allocator.segments()[0]["address"]
    for at in (4, 0, 2):  # whatever the order of freeing
        allocator.free(handles[at])
    for place in (0, 2, 4):
        allocator.allocate(4096, f"at {place}")
        blocks = {b["name"]: b["address"] for b in allocator.segments()[0]["blocks"]}
        assert blocks[f"at {place}"] == start + place * 4096


@KIND
def test_the_small_pool_splits_off_512_bytes(expandable):
    allocator = CachingAllocator(expandable_segments=expandable)
    allocator.allocate(MIB)
    allocator.allocate(MIB - 512)
    assert layout(allocator) == [[MIB, MIB - 512, -512]]
    allocator.allocate(1)
    assert layout(allocator) == [[MIB, MIB - 512, 512]]
    assert allocator.reserved_bytes == 2 * MIB


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (10 * MIB, [9 * MIB, 11 * MIB]),  # 1 MiB is left over: not worth it
        (10 * MIB - 512, [9 * MIB, 10 * MIB - 512, -(MIB + 512)]),
    ],
)
def test_the_large_pool_splits_off_more_than_a_mebibyte(nbytes, expected):
    allocator = CachingAllocator()
    fill(allocator, 9)
    allocator.allocate(nbytes)
    assert layout(allocator) == [expected]
    assert allocator.allocated_bytes == sum(n for n in expected if n > 0)
    assert allocator.requested_bytes == 9 * MIB + nbytes


def test_what_is_not_split_off_counts_as_allocated():
    allocator = CachingAllocator()
    first, second = fill(allocator, 9, 10)
    assert allocator.allocated_bytes == 20 * MIB
    assert allocator.requested_bytes == 19 * MIB
    allocator.free(second)
    assert (allocator.allocated_bytes, allocator.requested_bytes) == (9 * MIB, 9 * MIB)
    allocator.free(first)
    assert in_mib(allocator) == [[-20]]


def test_an_expandable_segment_splits_off_512_bytes_in_the_large_pool_too():
    allocator = CachingAllocator(expandable_segments=True)
    fill(allocator, 9)
    allocator.allocate(11 * MIB - 512)
    assert layout(allocator) == [[9 * MIB, 11 * MIB - 512, -512]]


@KIND
def test_the_pools_do_not_help_each_other(expandable):
    allocator = CachingAllocator(expandable_segments=expandable)
    (large,) = fill(allocator, 5)
    allocator.free(large)
    small = allocator.allocate(MIB)
    assert allocator.reserved_bytes == 22 * MIB
    allocator.free(small)
    fill(allocator, 1.5)
    assert allocator.reserved_bytes == 22 * MIB
    assert sorted(s["segment_type"] for s in allocator.segments()) == ["large", "small"]


# --- joining free neighbours -------------------------------------------------------------------


@KIND
@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([0, 1], [-8, 4, -4]),  # with the one before
        ([1, 0], [-8, 4, -4]),  # with the one behind
        ([0, 2, 1], [-16]),  # with both, and the end
        ([2], [4, 4, -8]),
    ],
)
def test_free_neighbours_are_joined(expandable, order, expected):
    """Three blocks of 4 KiB and a fourth that is free, in a segment cut to 16 KiB."""
    allocator = CachingAllocator(expandable_segments=expandable)
    handles = [allocator.allocate(4096) for _ in range(3)]
    for at in order:
        allocator.free(handles[at])
    (found,) = layout(allocator)
    found[-1] += 2 * MIB - 16 * 1024  # the segment's end, which nobody asked for
    assert found == [n * 1024 for n in expected]


def test_neighbours_in_other_segments_are_not_joined():
    allocator = CachingAllocator()
    for handle in fill(allocator, 20, 20):
        allocator.free(handle)
    assert in_mib(allocator) == [[-20], [-20]]
    fill(allocator, 40)
    assert allocator.reserved_bytes == 80 * MIB


# --- a budget ----------------------------------------------------------------------------------


def test_a_budget_may_be_used_to_the_last_byte():
    assert fill(CachingAllocator(budget_bytes=20 * MIB), 20)
    with pytest.raises(SimulatedOutOfMemory):
        fill(CachingAllocator(budget_bytes=20 * MIB - 1), 20)
    with pytest.raises(SimulatedOutOfMemory):  # 2 MiB would do, but a segment is 20
        fill(CachingAllocator(budget_bytes=20 * MIB - 1), 2)


def test_cached_segments_are_returned_before_a_request_fails():
    allocator = CachingAllocator(budget_bytes=64 * MIB)
    whole, split, small = *fill(allocator, 30, 5), allocator.allocate(100)
    assert allocator.reserved_bytes == 52 * MIB
    for handle in (whole, small):
        allocator.free(handle)
    fill(allocator, 14)  # from the 15 MiB behind the 5
    assert allocator.reserved_bytes == 52 * MIB
    fill(allocator, 32)  # 20 + 32 fit, once 30 and 2 are returned
    assert in_mib(allocator) == [[5, 15], [32]]
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (52 * MIB, 52 * MIB)
    allocator.free(split)
    with pytest.raises(SimulatedOutOfMemory):
        fill(allocator, 14)  # 5 are free, but in a segment that is in use


def test_a_failed_request_changes_no_figure_and_empties_the_cache():
    allocator = CachingAllocator(budget_bytes=50 * MIB)
    kept, gone = fill(allocator, 20, 30)
    allocator.free(gone)
    with pytest.raises(SimulatedOutOfMemory, match=r"Tried to allocate 31\.0 MiB") as error:
        fill(allocator, 31)
    assert error.value.requested_bytes == 31 * MIB
    assert in_mib(allocator) == [[20]]
    assert (allocator.allocated_bytes, allocator.requested_bytes) == (20 * MIB, 20 * MIB)
    allocator.free(kept)
    assert allocator.reserved_bytes == 20 * MIB


def test_enough_is_free_and_the_request_fails_unless_segments_expand():
    """The same requests: 32 of 40 MiB are wanted at the end, in an order that leaves holes."""

    def serve(**options):
        allocator = CachingAllocator(budget_bytes=40 * MIB, **options)
        (first,) = fill(allocator, 28)
        allocator.free(first)
        fill(allocator, 10)
        return allocator, lambda: fill(allocator, 22)

    allocator, last = serve()
    assert in_mib(allocator) == [[10, -18]]
    assert 40 * MIB - allocator.allocated_bytes >= 22 * MIB
    with pytest.raises(SimulatedOutOfMemory):
        last()
    allocator, last = serve(expandable_segments=True)
    last()
    assert in_mib(allocator) == [[10, 22, -8]]


def test_emptying_the_cache_leaves_what_is_stranded():
    allocator = CachingAllocator()
    used, between, other = fill(allocator, 5, 5, 30)
    allocator.free(between)
    allocator.free(other)
    found = sums(allocator.segments())
    assert (found.cached_bytes, found.stranded_bytes) == (30 * MIB, 15 * MIB)
    allocator.empty_cache()
    assert in_mib(allocator) == [[5, -15]]
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(used)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.segments()) == (0, [])


# --- expandable segments -----------------------------------------------------------------------


def test_an_expandable_segment_grows_in_place():
    allocator = CachingAllocator(expandable_segments=True)
    fill(allocator, 12)
    fill(allocator, 12)  # 8 of it in the page that is there
    assert in_mib(allocator) == [[12, 12, -16]]
    fill(allocator, 37)
    assert in_mib(allocator) == [[12, 12, 37, -19]]
    assert len({s["address"] for s in allocator.segments()}) == 1


def test_the_growing_end_is_spared_for_what_fits_nowhere_else():
    """15 MiB at the end would fit best, but the end may grow: the larger hole is taken."""
    allocator = CachingAllocator(expandable_segments=True)
    _, hole, _ = fill(allocator, 5, 30, 10)
    allocator.free(hole)
    assert in_mib(allocator) == [[5, -30, 10, -15]]
    fill(allocator, 14)
    assert in_mib(allocator) == [[5, 14, -16, 10, -15]]
    fill(allocator, 16)  # exactly the rest of the hole, and then there is only the end
    fill(allocator, 14)
    assert in_mib(allocator) == [[5, 14, 16, 10, 14, -1]]


def test_only_pages_that_are_wholly_free_are_returned():
    allocator = CachingAllocator(expandable_segments=True)
    first, middle, last = fill(allocator, 10, 70, 20)
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(middle)  # from 10 to 80: the pages 20 to 40, 40 to 60, 60 to 80
    allocator.empty_cache()
    assert in_mib(allocator) == [[10, -10], [20]]
    assert allocator.reserved_bytes == 40 * MIB
    low, high = (s["address"] for s in allocator.segments())
    assert high - low == 80 * MIB
    allocator.free(last)
    allocator.free(first)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.segments()) == (0, [])
    fill(allocator, 10)  # the segment is gone, with its addresses
    assert allocator.segments()[0]["address"] > high


def test_less_than_a_page_is_not_returned():
    allocator = CachingAllocator(expandable_segments=True)
    _, middle, _ = fill(allocator, 10, 25, 5)
    allocator.free(middle)  # from 10 to 35: no whole page
    allocator.empty_cache()
    assert in_mib(allocator) == [[10, -25, 5]]


def test_holes_are_mapped_again_lowest_address_first():
    allocator = CachingAllocator(expandable_segments=True)
    handles = fill(allocator, 20, 20, 20, 40, 20)
    for at in (1, 3):
        allocator.free(handles[at])
    allocator.empty_cache()
    assert in_mib(allocator) == [[20], [20], [20]]
    fill(allocator, 15)
    assert in_mib(allocator) == [[20, 15, -5, 20], [20]]
    fill(allocator, 25)  # the first hole is too small by now
    assert in_mib(allocator) == [[20, 15, -5, 20, 25, -15, 20]]
    assert allocator.reserved_bytes == 120 * MIB


def test_a_free_block_and_the_hole_behind_it_serve_together():
    allocator = CachingAllocator(expandable_segments=True)
    _, middle, _ = fill(allocator, 10, 30, 20)
    allocator.free(middle)
    allocator.empty_cache()
    assert in_mib(allocator) == [[10, -10], [20]]
    fill(allocator, 30)
    assert in_mib(allocator) == [[10, 30, 20]]


def test_pages_are_returned_under_pressure():
    allocator = CachingAllocator(budget_bytes=60 * MIB, expandable_segments=True)
    first, _ = fill(allocator, 40, 20)
    allocator.free(first)
    allocator.allocate(100)  # the small pool needs 2 MiB
    assert in_mib(allocator)[0] == [20]
    assert allocator.reserved_bytes == 22 * MIB
    assert allocator.peak_reserved_bytes == 60 * MIB


def test_a_mapping_that_ends_halfway_is_undone_with_the_cache():
    """A hole, three free pages and the end: the hole is filled, then the budget is at its end."""
    allocator = CachingAllocator(budget_bytes=100 * MIB, expandable_segments=True)
    first, second = fill(allocator, 20, 20)
    allocator.free(first)
    allocator.empty_cache()
    (third,) = fill(allocator, 40)
    allocator.free(second)
    allocator.free(third)
    assert in_mib(allocator) == [[-60]]
    assert allocator.peak_reserved_bytes == 60 * MIB
    with pytest.raises(SimulatedOutOfMemory):
        fill(allocator, 110)
    assert allocator.peak_reserved_bytes == 80 * MIB
    assert (allocator.reserved_bytes, allocator.segments()) == (0, [])
    fill(allocator, 100)
    assert in_mib(allocator) == [[100]]


def test_without_room_among_its_addresses_a_second_segment_begins():
    """Addresses for 9/8 of 400 MiB are 23 pages; every other one is used."""
    allocator = CachingAllocator(budget_bytes=400 * MIB, expandable_segments=True)
    handles = fill(allocator, *[20] * 20)
    for handle in handles[::2]:
        allocator.free(handle)
    fill(allocator, 60)  # at the end, where 3 pages are left
    assert allocator.reserved_bytes == 260 * MIB
    before = [s["address"] for s in allocator.segments()]
    start = before[0] - 20 * MIB  # its first page is a hole
    fill(allocator, 80)
    assert allocator.reserved_bytes == 340 * MIB
    (new,) = {s["address"] for s in allocator.segments()} - {*before}
    assert new == start + 23 * 20 * MIB
    fill(allocator, 20)  # the lowest hole first
    assert allocator.segments()[0]["address"] == start


# --- bad input ---------------------------------------------------------------------------------


@KIND
def test_a_block_is_freed_once(expandable):
    allocator = CachingAllocator(expandable_segments=expandable)
    handle = allocator.allocate(100)
    other = allocator.allocate(100)
    allocator.free(handle)
    again = allocator.allocate(100)  # the same place, another handle
    assert again not in (handle, other)
    for unknown in (handle, 99, "x", None):
        with pytest.raises(InputError, match="not live"):
            allocator.free(unknown)
    assert allocator.allocated_bytes == 1024


@pytest.mark.parametrize("nbytes", [-1, 1.0, True, None, "1", 1 << 60])
def test_a_request_is_a_whole_number_below_an_exabyte(nbytes):
    allocator = CachingAllocator(expandable_segments=True)
    with pytest.raises(InputError, match="whole number"):
        allocator.allocate(nbytes)
    assert allocator.allocate((1 << 60) - 1)


@pytest.mark.parametrize("budget_bytes", [0, -1, 1.5, True, "24 GiB"])
def test_a_budget_is_a_positive_whole_number(budget_bytes):
    with pytest.raises(InputError, match="budget_bytes"):
        CachingAllocator(budget_bytes=budget_bytes)


# --- random logs -------------------------------------------------------------------------------

SIZES = [
    1, 512, 513, 4096, 100_000, 700_000, MIB - 512, MIB, MIB + 1, 2 * MIB, 3 * MIB, 5 * MIB,
    9 * MIB, 10 * MIB - 512, 10 * MIB, 11 * MIB, 18 * MIB, 20 * MIB, 25 * MIB, 45 * MIB,
]  # fmt: skip


def random_log(rng, events):
    """Requests (bytes), frees (-1 - which live one) and emptied caches (None)."""
    palette = rng.sample(SIZES, rng.randint(2, 8))
    live = 0
    for _ in range(events):
        draw = rng.random()
        if draw < 0.05:
            yield None
        elif live and draw < 0.05 + min(0.7, live / 16):
            live -= 1
            yield -1 - rng.randrange(live + 1)
        else:
            live += 1
            size = rng.choice(palette)
            yield size + rng.choice([0, 0, 0, 1]) * rng.randrange(size)


def check(allocator, live):
    """What holds at any moment. ``live``: name of each live block: its bytes."""
    segments = allocator.segments()
    end = allocated = requested = reserved = 0
    cached, named = [], {}
    for segment in segments:
        assert segment["address"] >= end  # in order, none over another
        at, before = segment["address"], "active_allocated"
        for block in segment["blocks"]:
            assert block["address"] == at  # no gap and no overlap
            assert block["size"] > 0
            assert block["size"] % 512 == 0
            assert "inactive" not in (block["state"], before) or block["state"] != before
            if block["state"] == "inactive":
                cached.append((block["size"], at))
                assert (block["requested_size"], block["name"]) == (0, "")
            else:
                assert 0 < block["requested_size"] <= block["size"]
                assert block["name"] not in named
                named[block["name"]] = block["requested_size"]
                allocated += block["size"]
            at, before = at + block["size"], block["state"]
        assert at == segment["address"] + segment["total_size"]
        end, reserved = at, reserved + segment["total_size"]
        requested += sum(b["requested_size"] for b in segment["blocks"])
        paged = allocator.expandable_segments and segment["segment_type"] == "large"
        assert segment["total_size"] % (20 * MIB if paged else 2 * MIB) == 0
    assert named == live
    listed = [entry[:2] for pool in (allocator._small, allocator._large) for entry in pool.free]
    assert sorted(cached) == sorted(listed)
    assert (allocator.allocated_bytes, allocator.requested_bytes) == (allocated, requested)
    assert allocator.reserved_bytes == reserved
    assert reserved >= allocated >= requested
    assert allocator.budget_bytes is None or allocator.peak_reserved_bytes <= allocator.budget_bytes
    assert allocator.peak_reserved_bytes >= reserved
    assert allocator.peak_allocated_bytes >= allocated


@KIND
@pytest.mark.parametrize("budget", [None, 120 * MIB], ids=["unlimited", "budget"])
def test_invariants_of_random_logs(expandable, budget):
    rng = random.Random(f"{expandable} {budget}")
    failures = 0
    for number in range(2500):
        allocator = CachingAllocator(budget_bytes=budget, expandable_segments=expandable)
        handles, live = [], {}
        for serial, step in enumerate(random_log(rng, 40)):
            if step is None:
                allocator.empty_cache()
            elif step < 0:
                if -1 - step < len(handles):  # fewer are live than the log believes
                    handle, name = handles.pop(-1 - step)
                    del live[name]
                    allocator.free(handle)
                    with pytest.raises(InputError):
                        allocator.free(handle)
            else:
                try:
                    handles.append((allocator.allocate(step, f"#{serial}"), f"#{serial}"))
                    live[f"#{serial}"] = step
                except SimulatedOutOfMemory:
                    failures += 1
            if number % 3 == 0 or serial % 8 == 7:
                check(allocator, live)
        for handle, _ in handles:
            allocator.free(handle)
        check(allocator, {})
        allocator.empty_cache()
        assert allocator.reserved_bytes == allocator.allocated_bytes == 0
        assert allocator.segments() == []
    assert (failures > 100) is (budget is not None)


class NaiveSegments:
    """Ordinary segments as lists of ``[bytes, in use]``, searched from end to end."""

    def __init__(self, budget_bytes=None):
        self.budget_bytes, self.segments = budget_bytes or 1 << 60, []

    def reserved(self):
        return sum(size for _, blocks in self.segments for size, _ in blocks)

    def allocate(self, nbytes, name):
        size = max(1, (nbytes + 511) // 512) * 512
        small = size <= MIB
        for attempt in range(3):
            fits = [
                (block[0], where, at)
                for where, (pool, blocks) in enumerate(self.segments)
                for at, block in enumerate(blocks)
                if pool == small and block[1] is None and block[0] >= size
            ]
            if fits:
                break
            span = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // MIB) * MIB
            span += span % (2 * MIB)
            if self.reserved() + span <= self.budget_bytes:
                self.segments.append((small, [[span, None]]))
            elif attempt:
                return False
            else:
                self.empty_cache()
        _, where, at = min(fits)
        blocks = self.segments[where][1]
        rest = blocks[at][0] - size
        if rest > (511 if small else MIB):
            blocks[at : at + 1] = [[size, name], [rest, None]]
        else:
            blocks[at][1] = name
        return True

    def free(self, name):
        for _, blocks in self.segments:
            for block in blocks:
                if block[1] == name:
                    block[1] = None
            at = 1
            while at < len(blocks):
                if blocks[at - 1][1] is None and blocks[at][1] is None:
                    blocks[at - 1][0] += blocks.pop(at)[0]
                else:
                    at += 1

    def empty_cache(self):
        self.segments = [s for s in self.segments if any(name for _, name in s[1])]

    def picture(self):
        return [[(size, name or "") for size, name in blocks] for _, blocks in self.segments]


class NaivePages:
    """Expandable segments as used ranges and a set of mapped pages, one of each per pool."""

    def __init__(self):
        self.used, self.pages = {True: {}, False: {}}, {True: set(), False: set()}

    def reserved(self):
        return sum(len(pages) * page_bytes(small) for small, pages in self.pages.items())

    def free_runs(self, small):
        """Start and end of every free stretch with memory behind it."""
        page, pages, used, runs = page_bytes(small), self.pages[small], self.used[small], []
        edges = {n * page for n in pages} | {(n + 1) * page for n in pages}
        edges |= {*used} | {start + size for start, (size, _) in used.items()}
        for start, end in itertools.pairwise(sorted(edges)):
            if start // page not in pages or overlaps(used, start, end):
                continue
            if runs and runs[-1][1] == start:
                runs[-1][1] = end
            else:
                runs.append([start, end])
        return runs

    def allocate(self, nbytes, name):
        size = -(-nbytes // 512) * 512
        small = size <= MIB
        page, pages, used = page_bytes(small), self.pages[small], self.used[small]

        def growth(run):  # 0 where no unmapped page follows
            end = run[1] // page
            if run[1] % page or end in pages:
                return run[1] - run[0]
            following = [n for n in pages if n > end]
            return (min(following) * page if following else 1 << 62) - run[0]

        runs = sorted(self.free_runs(small), key=lambda run: (run[1] - run[0], run[0]))
        fits = [run for run in runs if run[1] - run[0] >= size]
        while len(fits) > 1 and growth(fits[1]) < growth(fits[0]):
            fits.pop(0)
        if fits:
            start = fits[0][0]
        else:
            # Page by page: the first unmapped one from whose free run everything up to the end
            # of the request is unused.
            for n in range(max(pages, default=-1) + 2):
                if n in pages or (n and n - 1 not in pages):
                    continue
                start = next((a for a, b in self.free_runs(small) if b == n * page), n * page)
                if not overlaps(used, start, start + size):
                    break
        pages |= set(range(start // page, -(-(start + size) // page)))
        used[start] = (size, name)
        return True

    def free(self, name):
        for used in self.used.values():
            for start, (_, holder) in list(used.items()):
                if holder == name:
                    del used[start]

    def empty_cache(self):
        for small, pages in self.pages.items():
            page = page_bytes(small)
            for start, end in self.free_runs(small):
                pages -= set(range(-(-start // page), end // page))

    def picture(self):
        """Named ranges and free ones, cut where pages are missing, of both pools."""
        result = []
        for small in (True, False):
            blocks = [(start, size, name) for start, (size, name) in self.used[small].items()]
            blocks += [(start, end - start, "") for start, end in self.free_runs(small)]
            end = None
            for start, size, name in sorted(blocks):
                if start != end:
                    result.append([])
                result[-1].append((size, name))
                end = start + size
        return result


def overlaps(used, start, end):
    return any(start < at + size and at < end for at, (size, _) in used.items())


def page_bytes(small):
    return 2 * MIB if small else 20 * MIB


def picture(allocator):
    return [[(b["size"], b["name"]) for b in s["blocks"]] for s in allocator.segments()]


@pytest.mark.parametrize(
    ("budget", "expandable"),
    [(None, False), (100 * MIB, False), (None, True)],
    ids=["segments", "segments and a budget", "expandable"],
)
def test_random_logs_end_as_in_a_naive_model(budget, expandable):
    """The same blocks at every moment, in two programs that have no line in common."""
    rng = random.Random(f"naive {expandable} {budget}")
    refused = 0
    for _ in range(1500):
        allocator = CachingAllocator(budget_bytes=budget, expandable_segments=expandable)
        naive = NaivePages() if expandable else NaiveSegments(budget)
        live = []
        for serial, step in enumerate(random_log(rng, 40)):
            name = f"#{serial}"
            if step is None:
                allocator.empty_cache()
                naive.empty_cache()
            elif step < 0:
                if -1 - step < len(live):
                    handle, name = live.pop(-1 - step)
                    allocator.free(handle)
                    naive.free(name)
            else:
                try:
                    live.append((allocator.allocate(step, name), name))
                    assert naive.allocate(step, name)
                except SimulatedOutOfMemory:
                    refused += 1
                    assert not naive.allocate(step, name)
            assert allocator.reserved_bytes == naive.reserved()
            if serial % 4 == 3:
                assert sorted(picture(allocator)) == sorted(naive.picture())
    assert (refused > 100) is (budget is not None)


# --- whole traces ------------------------------------------------------------------------------


class Log(TraceBuilder):
    """Adds what a device other than the main one holds, and storages that change their size."""

    def hold(
        self, nbytes, category=C.TEMPORARY, phase=P.FORWARD, module="", *, name="", device="cpu"
    ):
        number = super().hold(nbytes, category, phase, module)
        self.storages[number] = self.storages[number]._replace(name=name, device=device)
        return number

    def change(self, storage, change_bytes, phase=P.FORWARD):
        self.events.append(Event(storage, change_bytes, phase))


@KIND
def test_a_replay_has_one_entry_for_each_event(expandable):
    log = Log()
    small, large = log.hold(1000), log.hold(3 * MIB)
    log.free(small, P.FORWARD)
    log.hold(700)
    log.free(large, P.FORWARD)
    found = replay(log.trace(), expandable_segments=expandable)
    assert found.indices == (0, 1, 2, 3, 4)
    assert found.allocated_bytes == (1024, 3 * MIB + 1024, 3 * MIB, 3 * MIB + 1024, 1024)
    assert found.reserved_bytes == (2 * MIB, *[22 * MIB] * 4)
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (3 * MIB + 1024, 22 * MIB)
    assert (found.budget_bytes, found.failure) == (None, None)
    assert found.expandable_segments is expandable


def test_an_empty_trace_and_empty_storages():
    found = replay(Trace("cpu", (), ()))
    assert (found.peak_allocated_bytes, found.indices, found.step_peaks_bytes()) == (0, (), ())
    log = Log()
    log.free(log.hold(0), P.FORWARD)
    empty = log.hold(0)
    log.change(empty, 600)  # it grows later, as an `out=` tensor does
    found = replay(log.trace(), budget_bytes=2 * MIB)
    assert found.allocated_bytes == (0, 0, 0, 1024)
    assert found.reserved_bytes == (0, 0, 0, 2 * MIB)
    assert found.failure is None


def test_a_storage_that_changes_its_size_is_held_twice_for_a_moment():
    """``resize_bytes_cuda`` allocates, copies and only then frees; to 0 it just frees."""
    log = Log()
    storage = log.hold(12 * MIB)
    log.mark("step 1")
    log.change(storage, 18 * MIB)
    log.mark("step 2")
    log.change(storage, -25 * MIB)
    log.change(storage, -5 * MIB)
    log.mark("step 3")
    log.change(storage, 7 * MIB)
    found = replay(log.trace())
    # 12 and 30 have segments of their size, 5 is cut from the 12, 7 takes the 12 again
    assert found.allocated_bytes == (12 * MIB, 30 * MIB, 5 * MIB, 0, 7 * MIB)
    assert found.reserved_bytes == (12 * MIB, *[42 * MIB] * 4)
    assert found.highest_bytes == (12 * MIB, 42 * MIB, 35 * MIB, 5 * MIB, 7 * MIB)
    assert found.peak_allocated_bytes == 42 * MIB
    assert found.step_peaks_bytes() == (42 * MIB, 35 * MIB, 7 * MIB)
    assert replay(log.trace(), budget_bytes=42 * MIB).failure is None
    failure = replay(log.trace(), budget_bytes=42 * MIB - 1).failure
    assert (failure.requested_bytes, failure.live_bytes) == (30 * MIB, 12 * MIB)
    assert failure.by_category == {"temporary": 12 * MIB}


def failing_log():
    log = Log()
    log.hold(30 * MIB, C.WEIGHTS, P.SETUP, name="embed.weight")
    log.hold(1000, C.BUFFERS, P.SETUP)
    log.mark("step 1")
    gone = log.hold(12 * MIB, C.ACTIVATIONS, P.FORWARD, "layers.0")
    log.mark("step 2")
    log.hold(5 * MIB - 24, C.GRADIENTS, P.BACKWARD, "layers.1")  # a segment of 20 MiB
    log.free(gone, P.BACKWARD)
    log.hold(40 * MIB, C.OPTIMIZER, P.OPTIMIZER, "layers.2")
    log.hold(1 * MIB, C.TEMPORARY, P.OPTIMIZER)
    return log.trace()


def test_the_first_request_that_fails():
    found = replay(failing_log(), budget_bytes=80 * MIB)
    failure = found.failure
    assert failure.requested_bytes == 40 * MIB
    assert failure.capacity_bytes == 80 * MIB
    assert failure.by_category == {
        "weights": 30 * MIB,
        "buffers": 1000,
        "gradients": 5 * MIB - 24,
        "unattributed": 24 + 24,  # rounding
    }
    assert failure.live_bytes == sum(failure.by_category.values()) == 35 * MIB + 1024
    assert (failure.step, failure.phase) == (2, "optimizer")
    assert (failure.module, failure.operator) == ("layers.2", "aten.mm")


def test_after_a_failure_the_replay_goes_on_without_a_budget():
    found = replay(failing_log(), budget_bytes=80 * MIB)
    assert found.budget_bytes == 80 * MIB
    assert found.reserved_bytes[:5] == tuple(n * MIB for n in (30, 32, 44, 64, 64))
    assert found.reserved_bytes[5:] == (92 * MIB, 92 * MIB)  # the cached 12 were returned
    assert found.peak_reserved_bytes == 92 * MIB
    assert found.peak_allocated_bytes == 76 * MIB + 1024
    assert replay(failing_log()).peak_reserved_bytes == 104 * MIB
    enough = replay(failing_log(), budget_bytes=92 * MIB)
    assert (enough.failure, enough.peak_reserved_bytes) == (None, 92 * MIB)
    assert replay(failing_log(), budget_bytes=92 * MIB - 1).failure.requested_bytes == 40 * MIB


@KIND
def test_the_first_event_of_all_and_of_a_step_may_fail(expandable):
    nothing = replay(failing_log(), budget_bytes=1, expandable_segments=expandable)
    assert (nothing.failure.step, nothing.failure.live_bytes) == (0, 0)
    assert nothing.failure.by_category == {}
    assert nothing.peak_allocated_bytes == 76 * MIB + 1024
    log = Log()
    log.hold(100)
    log.mark("step 1")
    log.hold(3 * MIB)
    found = replay(log.trace(), budget_bytes=2 * MIB, expandable_segments=expandable)
    assert found.failure.step == 1


def test_peaks_of_the_steps_include_what_a_step_found():
    log = Log()
    log.hold(12 * MIB)
    log.mark("step 1")
    log.free(log.hold(4 * MIB), P.FORWARD)
    log.mark("step 2")
    log.mark("step 3")
    log.hold(1)
    log.hold(99 * MIB, device="cpu:1")
    found = replay(log.trace())
    assert found.step_peaks_bytes() == (16 * MIB, 12 * MIB, 12 * MIB + 512)
    assert found.indices == (0, 1, 2, 3)


def test_only_the_device_that_is_asked_for():
    log = Log()
    log.hold(5 * MIB)
    log.hold(100, device="cpu:1")
    log.hold(3 * MIB)
    assert replay(log.trace()).indices == (0, 2)
    other = replay(log.trace(), device="cpu:1")
    assert (other.indices, other.allocated_bytes, other.device) == ((1,), (512,), "cpu:1")
    with pytest.raises(InputError, match="unknown device"):
        replay(log.trace(), device="cuda:7")


def test_a_replay_takes_a_trace_that_makes_sense():
    with pytest.raises(InputError, match=r"run\.trace"):
        replay("run")
    with pytest.raises(InputError, match="budget_bytes"):
        replay(Trace("cpu", (), ()), budget_bytes=0)
    log = Log()
    log.change(log.hold(100), -101)
    with pytest.raises(InputError, match="event 1 frees 101 bytes of storage 0, which holds 100"):
        replay(log.trace())


@KIND
def test_a_budget_either_suffices_or_is_passed(expandable):
    """From the tensors' bytes to more than is ever reserved; what is served stays the same."""
    trace = training_trace(layer_bytes=3 * MIB)
    free = replay(trace, expandable_segments=expandable)
    sizes = range(trace.peak_bytes - 8 * MIB, free.peak_reserved_bytes + 4 * MIB, 2 * MIB)
    outcomes = []
    for budget in sizes:
        found = replay(trace, budget_bytes=budget, expandable_segments=expandable)
        outcomes.append(found.failure is None)
        assert outcomes[-1] is (found.peak_reserved_bytes <= budget)
        if found.failure is None:
            assert max(found.reserved_bytes) <= budget
        else:
            assert found.failure.live_bytes == sum(found.failure.by_category.values())
    assert outcomes[0] is False
    assert outcomes[-1] is True


@KIND
def test_a_budget_changes_no_request(expandable):
    """Random logs: served with a budget or without one, the same bytes are live at each event."""
    rng = random.Random(f"same {expandable}")
    served = 0
    for _ in range(300):
        log, live = Log(), []
        for step in random_log(rng, 40):
            if step is not None and step >= 0:
                live.append(log.hold(step))
            elif step is not None and -1 - step < len(live):
                log.free(live.pop(-1 - step), P.FORWARD)
        trace = log.trace()
        free = replay(trace, expandable_segments=expandable)
        tight = replay(trace, budget_bytes=100 * MIB, expandable_segments=expandable)
        tensors = trace.timeline().totals()
        rounded = [a - t for a, t in zip(free.allocated_bytes, tensors, strict=True)]
        assert min(rounded) >= 0
        if expandable:  # no remainder is left in a block: rounding alone, the same in any place
            assert max(rounded) < 512 * len(trace.events)
            assert tight.allocated_bytes == free.allocated_bytes
        if tight.failure is None:
            served += 1
            assert tight.peak_reserved_bytes <= 100 * MIB
            assert all(a >= t for a, t in zip(tight.allocated_bytes, tensors, strict=True))
        else:
            assert tight.peak_reserved_bytes > 100 * MIB
    assert 30 < served < 270


@KIND
def test_a_real_training_step(expandable):
    torch.manual_seed(0)
    with track() as tracker:
        layers = torch.nn.Linear(300, 700), torch.nn.ReLU(), torch.nn.Linear(700, 9)
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in (1, 2):
            tracker.mark(f"step {step}")
            model(torch.randn(500, 300)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        storage = torch.empty(3_000_000, dtype=torch.uint8)
        storage.untyped_storage().resize_(0)
        storage.untyped_storage().resize_(2_000_000)
    trace = tracker.trace()
    found = replay(trace, expandable_segments=expandable)
    totals = trace.timeline().totals()
    assert len(found.indices) == len(trace.events)
    assert all(a >= t for a, t in zip(found.allocated_bytes, totals, strict=True))
    assert found.peak_reserved_bytes >= found.peak_allocated_bytes >= trace.peak_bytes
    assert len(found.step_peaks_bytes()) == 2


def test_a_free_block_is_found_without_looking_through_all():
    """Work per event must not grow with the number of blocks: comparisons are counted."""

    class Counted(int):
        compared = 0

        def __lt__(self, other):
            Counted.compared += 1
            return int.__lt__(self, other)

    def comparisons(blocks):
        allocator = CachingAllocator()
        handles = [allocator.allocate(512 * (1 + n % 50)) for n in range(blocks)]
        for handle in handles[::2]:
            allocator.free(handle)
        free = allocator._small.free
        free[:] = [(Counted(size), address, block) for size, address, block in free]
        Counted.compared = 0
        for size in range(1, 50):
            allocator.free(allocator.allocate(512 * size))
        return Counted.compared

    assert comparisons(8000) < 3 * comparisons(500)
