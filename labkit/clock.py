"""When something worked: spans of time, noted as methods are called.

    clock = Clock()
    clock.watch(stage, forward_one_chunk="forward", backward_one_chunk="backward")
    ...                                   # the stage works
    clock.lap()                           # the next step's spans go into a list of their own
    gantt({"last step": {"stage 0": clock.laps[-2]}})

Times are those of the machine's monotonic clock, one for all its processes, so that spans of
several ranks can be drawn beside each other.

Limits: a GPU is waited for before and after each watched call, or the work would not have been done
when its time is noted. That keeps the program from running ahead of the GPU, so what is watched may
be slower for it. Other GPUs than this process's own are waited for where a call's arguments or its
result are on them.
"""

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from labkit.memory import InputError


class Span(NamedTuple):
    """Work of one ``kind`` between two moments, in seconds; ``text`` is written on it."""

    kind: str
    start: float
    stop: float
    text: str = ""


class Clock:
    """Notes when watched methods run.

    Args:
        path: where each ``lap`` stores all laps so far, for another process to `read`.

    Attributes:
        laps: one list of spans per lap, each in the order in which they ended; the last is open.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.laps: list[list[Span]] = [[]]
        self._path = path

    def watch(self, owner: Any, *, text: str | None = None, **kinds: str) -> None:
        """From now on note each call of some of an object's methods.

        Args:
            owner: the object; only its own methods are replaced, not its class's.
            text: what is written on the spans; None: the first argument of a call, where that is
                a whole number (the number of a micro-batch, say).
            **kinds: for each method's name what its spans are called, ``forward="forward"``.

        Raises:
            InputError: the owner has no such method.
        """
        for method in kinds:
            if not callable(getattr(owner, method, None)):
                raise InputError(f"{type(owner).__name__} has no method {method!r} to watch")
        for method, kind in kinds.items():
            setattr(owner, method, self._watched(getattr(owner, method), kind, text))

    def _watched(self, work: Callable[..., Any], kind: str, text: str | None) -> Callable[..., Any]:
        @functools.wraps(work)
        def watched(*arguments: Any, **named: Any) -> Any:
            _wait_for((arguments, named))  # what came before is not this call's work
            start = time.monotonic()
            out = work(*arguments, **named)
            _wait_for(out)
            first = arguments[0] if arguments else None
            words = str(first) if text is None and type(first) is int else text or ""
            self.laps[-1].append(Span(kind, start, time.monotonic(), words))
            return out

        return watched

    def lap(self) -> None:
        """Close this lap: what follows belongs to the next."""
        if self._path:
            waiting = Path(f"{self._path}.part")
            waiting.write_text(json.dumps(self.laps), encoding="utf-8")
            os.replace(waiting, self._path)
        self.laps.append([])

    @staticmethod
    def read(path: str | Path) -> list[list[Span]]:
        """The closed laps that a clock stored.

        Raises:
            InputError: the file is not one of those.
        """
        try:
            laps = json.loads(Path(path).read_text(encoding="utf-8"))
            return [[Span(*span) for span in lap] for lap in laps]
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{path} holds no laps: {error}") from None


def _wait_for(tree: Any) -> None:
    """Wait for this process's GPU, and for each other one that a tensor of ``tree`` is on."""
    import torch  # here: figures read spans without it
    from torch.utils._pytree import tree_leaves

    from labkit import hardware

    hardware.cuda_memory.synchronize()
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
