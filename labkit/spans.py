"""Record when methods run: spans of time, one list per training step.

    recorder = SpanRecorder()
    recorder.watch(stage, forward_one_chunk="forward", backward_one_chunk="backward")
    ...                                   # the stage works
    recorder.lap()                        # the spans of the next step go into a new list
    gantt({"last step": {"stage 0": recorder.laps[-2]}})

`in_slots` keeps the order of what several devices did, and replaces the seconds by given lengths.

Times are of the machine's monotonic clock, which all its processes share.

Limits: each watched call waits for the GPU before and after, so that its work is done when the time
is recorded: the program cannot run ahead of the GPU. Only the current GPU is waited for.
"""

import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Work of one ``kind`` between two moments, in seconds; ``text`` is written on it."""

    kind: str
    start: float
    stop: float
    text: str = ""


class SpanRecorder:
    """Record when watched methods run.

    ``laps`` has a list of spans per lap, in the order in which they ended; the last is open. With
    a ``path`` each `lap` writes all laps so far there, for another process to `read`.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.laps: list[list[Span]] = [[]]
        self._path = path

    def watch(self, owner: Any, **kinds: str) -> None:
        """Record each call of some of an object's methods from now on.

        Args:
            owner: the object; its class stays as it is.
            **kinds: for each method's name what its spans are called, ``forward="forward"``. The
                first argument of a call is written on its span where it is an int (the number of
                a micro-batch, say).
        """
        for method, kind in kinds.items():
            setattr(owner, method, self._watched(getattr(owner, method), kind))

    def _watched(self, work: Callable[..., Any], kind: str) -> Callable[..., Any]:
        from gpumem.hardware.cuda import cuda_memory  # here: figures read spans without PyTorch

        @functools.wraps(work)
        def watched(*arguments: Any, **named: Any) -> Any:
            cuda_memory.synchronize()  # what came before is not this call's work
            start = time.monotonic()
            result = work(*arguments, **named)
            cuda_memory.synchronize()
            numbered = arguments and isinstance(arguments[0], int)
            text = str(arguments[0]) if numbered else ""
            self.laps[-1].append(Span(kind, start, time.monotonic(), text))
            return result

        return watched

    def lap(self) -> int:
        """Close this lap, so that what follows belongs to the next. Return how many are closed."""
        if self._path:
            Path(self._path).write_text(json.dumps(self.laps), encoding="utf-8")
        self.laps.append([])
        return len(self.laps) - 1

    @staticmethod
    def read(path: str | Path) -> list[list[Span]]:
        """Return the closed laps that a recorder wrote to ``path``."""
        laps = json.loads(Path(path).read_text(encoding="utf-8"))
        return [[Span(*span) for span in lap] for lap in laps]


def in_slots(
    rows: Mapping[str, Iterable[Span]], lengths: Mapping[str, float]
) -> dict[str, list[Span]]:
    """Return recorded spans as if each kind took a given time, and sending none.

    Each device keeps its order. A span begins when its device is free and the span of the same
    ``text`` (the number of a micro-batch) that began before it, on whichever device, is done.

    Args:
        rows: for each device its spans, of one clock.
        lengths: for each kind of span how long it takes.
    """
    spans = sorted((span.start, row, span) for row in rows for span in rows[row])
    placed: dict[str, list[Span]] = {row: [] for row in rows}
    free, arrived = dict.fromkeys(rows, 0.0), dict.fromkeys((s.text for *_, s in spans), 0.0)
    for _, row, span in spans:
        start = max(free[row], arrived[span.text])
        free[row] = arrived[span.text] = stop = start + lengths[span.kind]
        placed[row].append(Span(span.kind, start, stop, span.text))
    return placed
