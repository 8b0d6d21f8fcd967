"""Streams of the simulated GPU: a request is served from blocks of the one that is current.

They order nothing: whatever is asked for is done at once. FSDP, whose mesh is of ``cpu`` here,
takes its streams from ``torch.cpu``.

Limits: backward runs on the stream that is current when it is called, not on that of each forward.
"""

import weakref

import torch

from gpumem.tracker import Streams


class FakeStreams(Streams):
    """Numbers the streams of one simulation in the order of their first use; the default is 0."""

    def __init__(self) -> None:
        self._numbers = weakref.WeakKeyDictionary({torch.cpu._default_cpu_stream: 0})
        self._count = 0

    def current(self) -> int:
        return self.number(torch.cpu.current_stream())

    def number(self, stream: torch.cpu.Stream) -> int:
        if stream not in self._numbers:
            self._count += 1
            self._numbers[stream] = self._count
        return self._numbers[stream]
