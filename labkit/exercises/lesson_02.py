"""Exercises of lesson 02: what `empty_cache` can return, and a program that fragments."""

from itertools import groupby

import torch

from labkit.exercises import Exercise
from labkit.exercises.checks import NotAttempted, call, expect_number, quote
from labkit.memory import MIB, format_bytes


# The notebook shows this class as it stands here; a test compares the two.
class ToyAllocator(list):  # of segments; a segment has one entry per MiB: a tensor's name or None
    budget = 160  # MiB

    def take(self, name, n):
        holes = ((s, i) for s in self for i in range(len(s)) if s[i : i + n] == [None] * n)
        segment, at = next(holes, None) or (self.reserve(n), 0)
        segment[at : at + n] = [name] * n

    def reserve(self, n):
        segment = [None] * (20 if n < 10 else n + n % 2)
        if sum(map(len, self)) + len(segment) > self.budget:
            self.empty_cache()  # the last resort before giving up
        if sum(map(len, self)) + len(segment) > self.budget:
            raise torch.OutOfMemoryError(f"no hole of {n} MiB, and no room for a new segment")
        self.append(segment)
        return segment

    def give(self, name):
        self[:] = [[None if owner == name else owner for owner in s] for s in self]

    def empty_cache(self):
        self[:] = [s for s in self if any(s)]


def segments_of(toy):
    """The toy's segments in the shape of ``torch.cuda.memory_snapshot()``."""
    return [
        {
            "total_size": len(segment) * MIB,
            "blocks": [
                {
                    "size": len(list(same)) * MIB,
                    "state": "active_allocated" if owner else "inactive",
                    "frames": [{"name": owner, "filename": "the toy", "line": 0}] if owner else [],
                }
                for owner, same in groupby(segment)
            ],
        }
        for segment in toy
    ]


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
        toy = ToyAllocator()
        for i in range(40):
            toy.take(f"tensor {i}", 4)
        for i in set(range(40)) - set(kept):
            toy.give(f"tensor {i}")
        yield segments_of(toy)


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
    for i in range(8):
        memory.take(f"result {i}", 4)
        for j in range(4):
            memory.take(f"scratch {i}.{j}", 4)
    for i in range(8):
        for j in range(4):
            memory.give(f"scratch {i}.{j}")
    memory.take("output", 24)


def tidy(memory):
    for i in range(8):  # what stays, side by side
        memory.take(f"result {i}", 4)
    for i in range(8):
        for j in range(4):
            memory.take(f"scratch {i}.{j}", 4)
    for i in range(8):
        for j in range(4):
            memory.give(f"scratch {i}.{j}")
    memory.take("output", 24)


class _Watched(ToyAllocator):
    """The toy with a memory of what was asked of it, that refuses what the real one could not."""

    budget = 10_000  # enough for anybody

    def __init__(self):
        self.taken, self.live, self.peak, self.at_output = {}, {}, 0, None

    def take(self, name, n):
        if not isinstance(name, str) or not name:
            raise ValueError(f"a tensor's name is a text, not {quote(name)}")
        if type(n) is not int or not 1 < n <= 1000:
            raise ValueError(f"{name}: a size is a whole number of MiB from 2 on, not {quote(n)}")
        if name in self.taken:
            raise ValueError(f"{name} is taken twice")
        if name == "output":
            self.at_output = dict(self.live)
        super().take(name, n)
        self.taken[name] = self.live[name] = n
        self.peak = max(self.peak, sum(self.live.values()))

    def give(self, name):
        if name not in self.live:
            raise ValueError(f"{quote(name)} is given back, but it is not there")
        del self.live[name]
        super().give(name)


class _Limited(_Watched):
    budget = ToyAllocator.budget


def check_tidy(answer):
    asked, wanted = _Watched(), _Watched()
    answer(asked)
    if not asked.taken:
        raise NotAttempted("`tidy` takes nothing yet. Start from a copy of `messy`.")
    messy(wanted)
    limited = _Limited()
    return _different(asked, wanted) or _too_tight(answer, limited)


def _different(asked, wanted):
    """Why this is not the same work as `messy`, None if it is."""
    for name in wanted.taken:
        if name not in asked.taken:
            return f"Your program never takes {name}. The work must stay the same."
        if asked.taken[name] != wanted.taken[name]:
            return (
                f"Your {name} has {asked.taken[name]} MiB, it needs {wanted.taken[name]}. Change "
                "the order, not the amount."
            )
    if extra := set(asked.taken) - set(wanted.taken):
        return f"Your program takes {min(extra)}, which `messy` does not."
    if asked.peak < wanted.peak:
        return (
            f"At most {asked.peak} MiB of your tensors are alive at once; in `messy` it is "
            f"{wanted.peak}. The last scratch tensor is computed from all others: free none before "
            "all of them are there. Change the order, not the amount."
        )
    for name in wanted.at_output:
        if name not in asked.at_output or name not in asked.live:
            return f"{name} is gone at the end. The output is made from all results: keep them."
    return None


def _too_tight(answer, memory):
    try:
        answer(memory)
    except torch.OutOfMemoryError as error:
        reserved, live = sum(map(len, memory)), sum(memory.live.values())
        holes = [len(list(run)) for s in memory for owner, run in groupby(s) if not owner]
        return (
            f"It does not fit {memory.budget} MiB yet: {error}. {live} MiB are in use, "
            f"{reserved - live} MiB are free in {len(holes)} pieces, the largest of "
            f"{max(holes, default=0)} MiB. Which tensors keep the segments from going back?"
        )
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
            "would hold two. When do they have to be taken to lie side by side?",
        ),
        solution=tidy,
        check=check_tidy,
        kind="function",
    ),
)
