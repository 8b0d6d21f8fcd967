"""The caching allocator's model: sizes, budgets, bad input, a GPU's own numbers, and traces.

In tests/phantom PyTorch's own code gets the same random requests, under each of its settings.
"""

import dataclasses
import gzip
import json
import re
from pathlib import Path

import pytest
import torch
from fake_runs import TraceBuilder

from gpumem.allocator import caching as module
from gpumem.allocator.caching import CachingAllocator
from gpumem.allocator.replay import ReplayedCuda, replay
from gpumem.estimation.estimate import other_verdicts
from gpumem.hardware import catalogue
from gpumem.inputs import InputError
from gpumem.out_of_memory import SimulatedOutOfMemory
from gpumem.simulation import Log as SimulatedLog
from gpumem.simulation import run_of
from gpumem.torch_release import following
from gpumem.trace import Category, Event, Phase, Trace
from gpumem.units import MIB

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


# --- a budget ----------------------------------------------------------------------------------


@KIND
def test_nothing_takes_no_memory_and_has_a_handle(expandable):
    allocator = CachingAllocator(budget_bytes=1, expandable_segments=expandable)
    one, two = allocator.allocate(0), allocator.allocate(0)
    assert one != two
    assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.segments()) == (0, 0, [])
    allocator.free(one)
    with pytest.raises(InputError, match="not live"):
        allocator.free(one)


def test_a_failed_request_changes_no_figure_and_empties_the_cache():
    allocator = CachingAllocator(budget_bytes=50 * MIB)
    kept, gone = fill(allocator, 20, 30)
    allocator.free(gone)
    with pytest.raises(SimulatedOutOfMemory, match=r"Tried to allocate 31\.0 MiB") as error:
        fill(allocator, 31)
    assert error.value.requested_bytes == 31 * MIB
    assert in_mib(allocator) == [[20]]
    assert allocator.allocated_bytes == 20 * MIB
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


def test_bytes_are_whole_numbers():
    allocator = CachingAllocator(expandable_segments=True)
    for nbytes in (-1, 1.0, True, None, "1", 1 << 60):
        with pytest.raises(InputError, match="whole number"):
            allocator.allocate(nbytes)
    assert allocator.allocate((1 << 60) - 1)
    for budget_bytes in (0, -1, 1.5, True, "24 GiB"):
        with pytest.raises(InputError, match="budget_bytes"):
            CachingAllocator(budget_bytes=budget_bytes)


# --- a GPU's own numbers ----------------------------------------------------------------------


def test_what_runs_on_a_gpu_asked_for_takes_as_much():
    """Four recipes of benchmarks/accuracy.py on an H200, driver 580.159.04, PyTorch 2.11: bytes
    that were asked for, and -1 less the number of what was freed."""
    path = Path(__file__).with_name("h200_events.json.gz")
    for run in json.loads(gzip.decompress(path.read_bytes())):
        with following("2.11"):
            allocator, handles = CachingAllocator(), []
        for event in run["events"]:
            if event < 0:
                allocator.free(handles[-1 - event])
            else:
                handles.append(allocator.allocate(event))
        peaks = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        assert peaks == (run["allocated_bytes"], run["reserved_bytes"]), run["recipe"]


def test_each_release_takes_its_own_of_two_free_blocks_of_one_size():
    def taken(release: str, *, split: bool) -> bool:
        """Return whether the block of the first segment is taken, which has the higher address."""
        with following(release):
            allocator = CachingAllocator()
        for handle in [allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)]:
            allocator.free(handle)
        if split:  # and joined again: the older segment's block is the younger one then
            allocator.free(allocator.allocate(12 * MIB))
        allocator.allocate(20 * MIB, "wanted")
        [low, high] = [segment["blocks"][0]["name"] for segment in allocator.segments()]
        assert "wanted" in (low, high)
        return high == "wanted"

    whole = {release: taken(release, split=False) for release in ("2.11", "2.12", "2.13")}
    assert whole == {"2.11": False, "2.12": True, "2.13": True}
    joined = {release: taken(release, split=True) for release in ("2.11", "2.12", "2.13")}
    assert joined == {"2.11": False, "2.12": False, "2.13": True}


def test_an_estimate_near_the_limit_names_the_releases_with_another_verdict():
    log = Log()
    log.hold(900 * MIB)
    first = log.hold(20 * MIB)
    log.free(log.hold(40 * MIB), P.FORWARD)
    front, back = log.hold(20 * MIB), log.hold(20 * MIB)
    log.free(back, P.FORWARD)
    log.free(first, P.FORWARD)
    log.hold(20 * MIB)  # in the older segment, or in that with the lower address
    log.free(front, P.FORWARD)
    log.hold(40 * MIB)
    t4 = catalogue.gpu("t4")
    tight = dataclasses.replace(t4, usable_bytes=t4.context_bytes + 960 * MIB)
    work = SimulatedLog({}, log.trace(), None)
    verdicts = {}
    for release in ("2.11", "2.13"):
        with following(release):
            run = run_of(work, tight, name="job")
            verdicts[release] = run.fits, other_verdicts(work, tight, run)
    needed, fitting = 980 * MIB, 960 * MIB
    assert verdicts["2.11"] == (False, dict.fromkeys(("2.12", "2.13", "2.15"), fitting))
    assert verdicts["2.13"] == (True, {"2.8": needed, "2.11": needed})
    with following("2.13"):
        assert not other_verdicts(work, t4, run_of(work, t4, name="job"))  # far from the limit


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
    assert found.failure is None


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
    log.begin_step()
    log.change(storage, 18 * MIB)
    log.begin_step()
    log.change(storage, -25 * MIB)
    log.change(storage, -5 * MIB)
    log.begin_step()
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


def test_the_categories_are_those_of_the_moment_of_the_peak():
    log = Log()
    resized = log.hold(12 * MIB - 1, C.ACTIVATIONS)
    log.change(resized, 18 * MIB)  # 42 MiB in blocks for a moment, 30 in tensors
    log.change(resized, 1 - 30 * MIB)
    log.hold(35 * MIB, C.WEIGHTS)
    trace = log.trace()
    assert trace.peak().by_category == {C.WEIGHTS: 35 * MIB}
    run = run_of(SimulatedLog({}, trace, None), catalogue.gpu("t4"), name="resized")
    assert run.peak_bytes == 42 * MIB
    assert run.by_category == {"activations": 42 * MIB - 2, "unattributed": 2}


def failing_log():
    log = Log()
    log.hold(30 * MIB, C.WEIGHTS, P.SETUP, name="embed.weight")
    log.hold(1000, C.BUFFERS, P.SETUP)
    log.begin_step()
    gone = log.hold(12 * MIB, C.ACTIVATIONS, P.FORWARD, "layers.0")
    log.begin_step()
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
    assert found.reserved_bytes[:5] == tuple(n * MIB for n in (30, 32, 44, 64, 64))
    assert found.reserved_bytes[5:] == (92 * MIB, 92 * MIB)  # the cached 12 were returned
    assert found.peak_reserved_bytes == 92 * MIB
    assert found.peak_allocated_bytes == 76 * MIB + 1024
    assert replay(failing_log()).peak_reserved_bytes == 104 * MIB
    enough = replay(failing_log(), budget_bytes=92 * MIB)
    assert (enough.failure, enough.peak_reserved_bytes) == (None, 92 * MIB)
    assert replay(failing_log(), budget_bytes=92 * MIB - 1).failure.requested_bytes == 40 * MIB


def test_a_replayed_step_fails_as_a_step_does():
    """How torch.cuda's questions are answered is held to torch.cuda in tests/phantom."""
    gpu = dataclasses.replace(catalogue.gpu("t4"), usable_bytes=(141 + 80) * MIB)
    cuda = ReplayedCuda(failing_log(), gpu)
    found = replay(failing_log(), budget_bytes=80 * MIB)
    steps = cuda.steps()
    assert next(steps) == 1
    [(_, stop), _] = found.trace.steps()
    assert cuda.memory_reserved() == found.reserved_bytes[found.indices.index(stop) - 1]
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 40"):
        next(steps)
    assert cuda.memory_allocated() == found.failure.live_bytes
    assert cuda.memory_stats()["num_alloc_retries"] == 1
    assert (
        sum(segment["total_size"] for segment in cuda.memory_snapshot()) == cuda.memory_reserved()
    )


def test_peaks_of_the_steps_include_what_a_step_found():
    log = Log()
    log.hold(12 * MIB)
    log.begin_step()
    log.free(log.hold(4 * MIB), P.FORWARD)
    log.begin_step()
    log.begin_step()
    log.hold(1)
    log.hold(99 * MIB, device="cpu:1")
    found = replay(log.trace())
    assert found.step_peaks_bytes() == (16 * MIB, 12 * MIB, 12 * MIB + 512)
    assert found.indices == (0, 1, 2, 3)


def test_a_replay_takes_a_trace_that_makes_sense():
    with pytest.raises(InputError, match=r"run\.trace"):
        replay("run")
    with pytest.raises(InputError, match="budget_bytes"):
        replay(Trace("cpu", (), ()), budget_bytes=0)
    log = Log()
    log.change(log.hold(100), -101)
    with pytest.raises(InputError, match="event 1 frees 101 bytes of storage 0, which holds 100"):
        replay(log.trace())
