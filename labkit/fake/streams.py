"""Streams and events of the simulated GPU.

They order nothing: whatever is asked for is done at once. What is current decides from which blocks
PyTorch's allocator serves a request, and that is kept, in ``torch.cpu``'s own place for it: FSDP,
whose mesh is of ``cpu`` here, takes its streams from there.

Limits: backward runs on the stream that is current when it is called, not on that of each forward.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn
from unittest import mock

import torch

from labkit.fake.users_code import refuse
from labkit.tracker import Streams


class FakeStreams(Streams):
    """Numbers the streams of one simulation in the order of their first use; the default is 0."""

    def __init__(self) -> None:
        self._numbers = weakref.WeakKeyDictionary({default_stream(): 0})
        self._count = 0

    def current(self) -> int:
        return self.number(torch.cpu.current_stream())

    def number(self, stream: torch.cpu.Stream) -> int:
        if stream not in self._numbers:
            self._count += 1
            self._numbers[stream] = self._count
        return self._numbers[stream]


class FakeEvent:
    """An event of CUDA's: what it waits for is done."""

    def query(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None:
        pass

    wait = record

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Any) -> NoReturn:
        refuse("asks for a time, and a simulation times nothing. Leave it to lab.measure.")


class FakeStream(torch.cpu.Stream):
    """A stream of CUDA's, with the methods that ``torch.cpu``'s lacks."""

    def __init__(self) -> None:
        self._entered: list[AbstractContextManager] = []

    def __enter__(self) -> "FakeStream":
        self._entered.append(torch.cpu.stream(self))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()


def default_stream(device: Any = None) -> torch.cpu.Stream:
    """Return the default stream."""
    return torch.cpu._default_cpu_stream


def set_stream(stream: torch.cpu.Stream | None) -> None:
    """Make ``stream`` current; None changes nothing."""
    if stream is not None:
        torch.cpu._current_stream = stream


def _use(tensor: torch.Tensor, stream: Any) -> None:
    """The tracker, which replaces this by its own, logs it."""


def stream_patches() -> Iterator[AbstractContextManager]:
    """Yield patches for the classes of streams and events, and for `Tensor.record_stream`."""
    default = FakeStream()
    for name in ("_default_cpu_stream", "_current_stream"):
        yield mock.patch.object(torch.cpu, name, default)
    for kind, fake in ((torch.cuda.Stream, FakeStream), (torch.cuda.Event, FakeEvent)):
        yield mock.patch.object(kind, "__new__", lambda _, *args, make=fake, **options: make())
    yield mock.patch.object(torch.Tensor, "record_stream", _use)
