"""Exercises of lesson 02: what `empty_cache` can return, and a program that fragments."""

from labkit.allocator import CachingAllocator
from labkit.exercises import Exercise
from labkit.exercises.checks import NotAttempted, call, expect_number, quote
from labkit.memory import MIB, format_bytes
from labkit.tracker import SimulatedOutOfMemory

BUDGET_BYTES = 160 * MIB

# --- 1: what empty_cache would return ----------------------------------------------------------


def returned(segments):
    return sum(
        segment["total_size"]
        for segment in segments
        if all(block["state"] == "inactive" for block in segment["blocks"])
    )


def _samples():
    """Segments with cached and stranded blocks; with stranded ones only; with cached ones only."""
    for kept in (range(0, 15, 5), range(0, 40, 5), (), range(7)):
        allocator = CachingAllocator()
        tensors = [allocator.allocate(4 * MIB, f"tensor {i}") for i in range(40)]
        for i in set(range(40)) - set(kept):
            allocator.free(tensors[i])
        yield allocator.segments()


def check_returned(answer):
    for segments in _samples():
        right, value = returned(segments), call(answer, segments)
        blocks = [block for segment in segments for block in segment["blocks"]]
        free = sum(block["size"] for block in blocks if block["state"] == "inactive")
        reserved = sum(segment["total_size"] for segment in segments)
        seen = f"{format_bytes(reserved)} in {len(segments)} segments, {format_bytes(free)} free"
        if right != free and type(value) in (int, float) and value == free:
            return (
                f"Of {seen}, you return {format_bytes(free)}: every free block. Those beside a "
                "used block are stranded: a segment goes back as a whole or not at all."
            )
        if value == reserved - right and type(value) in (int, float):
            return (
                f"Of {seen}, you return {format_bytes(value)}. Those are the segments that must "
                "stay; the others go back."
            )
        if problem := expect_number(value, right, rel_tolerance=0, unit="bytes"):
            return f"Of {seen}: {problem}"
    return None


# --- 2: the same tensors in the same budget ----------------------------------------------------


def messy(memory):
    """The program that the notebook shows: it runs out of memory at the last line."""
    scratch = []
    for i in range(8):
        memory.allocate(4 * MIB, f"result {i}")
        scratch += [memory.allocate(4 * MIB, f"scratch {i}.{j}") for j in range(4)]
    for block in scratch:
        memory.free(block)
    memory.allocate(24 * MIB, "output")


def tidy(memory):
    for i in range(8):  # what stays, side by side
        memory.allocate(4 * MIB, f"result {i}")
    scratch = [memory.allocate(4 * MIB, f"scratch {i}.{j}") for i in range(8) for j in range(4)]
    for block in scratch:
        memory.free(block)
    memory.allocate(24 * MIB, "output")


class _Watched(CachingAllocator):
    """The allocator with a memory of what was asked of it, tensor by tensor."""

    def __init__(self, budget_bytes=None):
        super().__init__(budget_bytes=budget_bytes)
        self.asked, self.names, self.peak_bytes, self.at_output = {}, {}, 0, set()

    def allocate(self, nbytes, name=""):
        if not isinstance(name, str) or not name:
            raise ValueError(f"each tensor needs the name it has in `messy`, not {quote(name)}")
        if name in self.asked:
            raise ValueError(f"{name} is allocated twice")
        if name == "output":
            self.at_output = self.live
        handle = super().allocate(nbytes, name)
        self.asked[name], self.names[handle] = nbytes, name
        self.peak_bytes = max(self.peak_bytes, self.requested_bytes)
        return handle

    def free(self, handle):
        super().free(handle)
        del self.names[handle]

    @property
    def live(self):
        return set(self.names.values())


def check_tidy(answer):
    asked, wanted = _Watched(), _Watched()
    answer(asked)
    if not asked.asked:
        raise NotAttempted("`tidy` allocates nothing yet. Start from a copy of `messy`.")
    messy(wanted)
    return _different(asked, wanted) or _too_tight(answer, _Watched(BUDGET_BYTES))


def _different(asked, wanted):
    """Why this is not the same work as `messy`, None if it is."""
    for name, nbytes in wanted.asked.items():
        if name not in asked.asked:
            return f"Your program never allocates {name}. The work must stay the same."
        if asked.asked[name] * MIB == nbytes:
            return f"Your {name} has {format_bytes(asked.asked[name])}: bytes. Multiply by `MIB`."
        if asked.asked[name] != nbytes:
            return (
                f"Your {name} has {format_bytes(asked.asked[name])}, it needs "
                f"{format_bytes(nbytes)}. Change the order, not the amount."
            )
    if extra := set(asked.asked) - set(wanted.asked):
        return f"Your program allocates {min(extra)}, which `messy` does not."
    if asked.peak_bytes < wanted.peak_bytes:
        return (
            f"At most {format_bytes(asked.peak_bytes)} of your tensors are alive at once; in "
            f"`messy` it is {format_bytes(wanted.peak_bytes)}. The last scratch tensor is computed "
            "from all others: free none before all of them are there. Change the order, not the "
            "amount."
        )
    if gone := sorted(wanted.at_output - (asked.at_output & asked.live)):
        return f"{gone[0]} is gone at the end. The output is made from all results: keep them."
    return None


def _too_tight(answer, memory):
    try:
        answer(memory)
    except SimulatedOutOfMemory as error:
        blocks = [block for segment in memory.segments() for block in segment["blocks"]]
        holes = [block["size"] for block in blocks if block["state"] == "inactive"]
        return (
            f"It does not fit {format_bytes(BUDGET_BYTES)} yet: {error}. "
            f"{format_bytes(sum(holes))} are free in {len(holes)} pieces, the largest of "
            f"{format_bytes(max(holes, default=0))}. Which tensors keep the segments from going "
            "back?"
        )
    if memory.peak_reserved_bytes > BUDGET_BYTES:
        return f"Your program changes the budget. It is {format_bytes(BUDGET_BYTES)}."
    return None


EXERCISES = (
    Exercise(
        "02-1",
        question="How many bytes would `empty_cache` return?",
        hints=(
            "A segment goes back to the driver as a whole. Which segments can go?",
            "Those whose blocks are all `inactive`: `all(block['state'] == 'inactive' for block "
            "in segment['blocks'])`. Add up their `total_size`.",
        ),
        solution=returned,
        check=check_returned,
        kind="function",
    ),
    Exercise(
        "02-2",
        question="The same tensors, the same peak of live bytes, in the same budget.",
        hints=(
            "After the scratch is freed, what is left in each segment? Draw the map.",
            "One result in each of eight segments holds them all. Eight results side by side "
            "would hold two. When do they have to be allocated to lie side by side?",
        ),
        solution=tidy,
        check=check_tidy,
        kind="function",
    ),
)
