"""Answers to PyTorch's questions about CUDA memory, from the log of a simulated run.

    cuda = ReplayedCuda(run.trace, gpu="t4")
    for _ in cuda.steps():
        print(cuda.memory_reserved())

The functions have the names and the meaning of those in ``torch.cuda``, so that the same lines ask
either.

Limits: those of `labkit.allocator.replay`; the context is the catalogue's figure. Of the statistics
there are the two that lessons read.
"""

from collections.abc import Iterator
from typing import Any

from labkit.allocator.replay import Player
from labkit.hardware import catalogue
from labkit.hardware.catalogue import Gpu
from labkit.trace import Trace


class ReplayedCuda:
    """Memory of the GPU called ``gpu`` while it serves the requests of ``trace``, step by step."""

    def __init__(self, trace: Trace, gpu: str | Gpu, *, expandable_segments: bool = False) -> None:
        self._gpu, self._trace = catalogue.gpu(gpu), trace
        memory = self._gpu.budget_bytes, expandable_segments, self._gpu.usable_bytes
        self._player = Player(trace, *memory, stops=True)
        self._allocator = self._player.allocator

    def steps(self) -> Iterator[int]:
        """Serve one training step after the other, the first with its setup; yield their numbers.

        Raises:
            SimulatedOutOfMemory: a request that the GPU could not have served.
        """
        served = 0
        for number, (_, stop) in enumerate(self._trace.steps(), start=1):
            for index, _, _ in self._trace.changes():
                if served <= index < stop:
                    self._player.play(index)
            served = stop
            yield number

    def memory_allocated(self) -> int:
        """Bytes of the blocks that live tensors hold."""
        return self._allocator.allocated_bytes

    def max_memory_allocated(self) -> int:
        """The most of these since `reset_peak_memory_stats`."""
        return self._allocator.peak_allocated_bytes

    def memory_reserved(self) -> int:
        """Bytes that the allocator holds, for tensors and in its cache."""
        return self._allocator.reserved_bytes

    def mem_get_info(self) -> tuple[int, int]:
        """Bytes of the GPU that are free, and all of them."""
        used_bytes = self._allocator.reserved_bytes + self._gpu.context_bytes
        return self._gpu.usable_bytes - used_bytes, self._gpu.usable_bytes

    def memory_stats(self) -> dict[str, int]:
        """Bytes that tensors ask for, and how often ``cudaMalloc`` failed."""
        return {
            "requested_bytes.all.current": self._player.requested_bytes,
            "num_alloc_retries": self._allocator.flushes,
        }

    def memory_snapshot(self) -> list[dict[str, Any]]:
        """Every segment and its blocks."""
        return self._allocator.segments()

    def empty_cache(self) -> None:
        """Return to the driver what no tensor uses."""
        self._allocator.empty_cache()

    def reset_peak_memory_stats(self) -> None:
        """Start `max_memory_allocated` again from what is allocated now."""
        self._allocator.peak_allocated_bytes = self._allocator.allocated_bytes
