"""Exercises of lesson 02: what `empty_cache` can return, and a program that fragments."""

from gpumem.allocator.caching import CachingAllocator
from gpumem.out_of_memory import SimulatedOutOfMemory
from gpumem.units import MIB, format_bytes
from labkit.exercises.checks import NotAttempted, call, expect_number
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

BUDGET_BYTES = 160 * MIB
messy = from_notebook("02", "messy", globals())


def returned(segments):
    return sum(
        segment["total_size"]
        for segment in segments
        if all(block["state"] == "inactive" for block in segment["blocks"])
    )


def _crowd(stays):
    """Return the segments of 40 tensors of 4 MiB, five in each, of which only ``stays`` stay."""
    memory = CachingAllocator()
    tensors = [memory.allocate(4 * MIB) for _ in range(40)]
    for number, tensor in enumerate(tensors):
        if number not in stays:
            memory.free(tensor)
    return memory.segments()


def _blocks(segments):
    return [block for segment in segments for block in segment["blocks"]]


def _samples():
    """Segments with cached and stranded blocks, also before the used ones; with stranded ones only;
    with cached ones only; and one that is a single used block."""
    memory = CachingAllocator()
    memory.allocate(24 * MIB)
    memory.free(memory.allocate(32 * MIB))
    return [*map(_crowd, [(0, 5, 10), (2, 3, 4, 19), range(0, 40, 5), ()]), memory.segments()]


@check_of("02-1", returned)
def check_returned(answer):
    for segments in _samples():
        right = returned(segments)
        free = sum(b["size"] for b in _blocks(segments) if b["state"] == "inactive")
        reserved = sum(segment["total_size"] for segment in segments)
        by_first = sum(s["total_size"] for s in segments if s["blocks"][0]["state"] == "inactive")
        slips = {
            by_first: "That counts a segment as soon as its first block is free. One used block "
            "anywhere in it holds it.",
            free: "That is every free block. Those beside a used block are stranded: a segment "
            "goes back as a whole or not at all.",
            reserved - right: "Those are the segments that must stay; the others go back.",
        }
        given = call(answer, segments)
        if problem := expect_number(given, right, rel_tolerance=0, unit="bytes", slips=slips):
            return (
                f"There are {format_bytes(reserved)} in {len(segments)} segments, "
                f"{format_bytes(free)} of them free. {problem}"
            )
    return None


def tidy(memory):
    for i in range(8):  # what stays, together
        memory.allocate(4 * MIB, f"result {i}")
    scratch = [memory.allocate(4 * MIB, f"scratch {i}.{j}") for i in range(8) for j in range(4)]
    for block in scratch:
        memory.free(block)
    memory.allocate(24 * MIB, "output")


class _Watched(CachingAllocator):
    """The allocator, with a record of what was asked for."""

    def __init__(self):
        super().__init__()
        self.asked: set[tuple[str, str]] = set()

    def allocate(self, nbytes, name=""):
        self.asked.add((name, format_bytes(nbytes)))
        return super().allocate(nbytes, name)

    def live(self) -> set[str]:
        return {b["name"] for b in _blocks(self.segments()) if b["state"] != "inactive"}


@check_of("02-2", tidy)
def check_tidy(answer):
    asked, wanted = _Watched(), _Watched()
    answer(asked)
    if not asked.asked:
        raise NotAttempted("`tidy` allocates nothing yet. Start from a copy of `messy`.")
    messy(wanted)
    if problem := _other_work(asked, wanted):
        return problem
    tight = CachingAllocator(budget_bytes=BUDGET_BYTES)
    try:
        answer(tight)
    except SimulatedOutOfMemory as error:
        holes = [b["size"] for b in _blocks(tight.segments()) if b["state"] == "inactive"]
        free, largest = format_bytes(sum(holes)), format_bytes(max(holes, default=0))
        pieces = f"{free} are free in {len(holes)} pieces, the largest of {largest}"
        return f"{error} {pieces}. Which tensors keep the segments from going back?"
    return None


def _other_work(asked, wanted):
    """Return why this is not the same work as `messy`; None if it is."""
    if other := sorted(asked.asked ^ wanted.asked):
        return (
            "The tensors, their sizes and their names must stay as in `messy`. These are in one "
            f"of the two: {', '.join(f'{name} of {size}' for name, size in other[:2])}."
        )
    if asked.peak_allocated_bytes < wanted.peak_allocated_bytes:
        return (
            f"At most {format_bytes(asked.peak_allocated_bytes)} of your tensors are alive at "
            f"once; in `messy` it is {format_bytes(wanted.peak_allocated_bytes)}. The last scratch "
            "tensor is computed from all others: free none before all of them are there."
        )
    if gone := sorted(wanted.live() - asked.live()):
        return f"{gone[0]} is gone at the end. The output is made from all results: keep them."
    return None
