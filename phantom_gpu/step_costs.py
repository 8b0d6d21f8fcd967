"""Count what a program on a phantom GPU would compute and move, operator by operator, by the same
formulas as any run (`gpumem.costs`).

Limits: of what ``torch.compile`` generates only the products that it leaves to libraries are seen.
Products of distributed tensors are not counted, nor are the scores that attention without a fused
kernel moves in its forward pass.
"""

import sys
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gpumem.costs import COLLECTIVES, COUNTED, flops_of, moved_bytes, sent_bytes, tensors_in
from phantom_gpu.report_records import StepWork

_PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
OTHER = "other"  # 8-bit numbers, for one


def copied_tensor(func: Any, args: tuple) -> torch.Tensor | None:
    """Return what a call of an operator copies, perhaps between devices; None if it is no copy."""
    if func is torch.ops.aten.copy_.default:
        return args[1]
    return args[0] if func is torch.ops.aten._to_copy.default else None


class Counted:
    """What was counted up to the ends of the first and the last step, and up to now."""

    def __init__(self) -> None:
        self._now: Counter[str] = Counter()
        self._failed = False
        self._at_ends: list[Counter[str]] = []
        self._ended = 0

    def count(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Add one call of an operator, which returned ``out``.

        An operator that cannot be counted ends the counting, never the program.
        """
        if self._failed:
            return
        try:
            self._add(func, args, kwargs, out)
        except Exception as error:
            self._failed = True
            print(f"labkit: a step's work is not counted: {func}: {error}", file=sys.stderr)

    def _add(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        if func.namespace in COLLECTIVES:
            self._now["sent"] += sent_bytes(func, args)
            return
        if func.namespace not in COUNTED or func.is_view:
            return
        tensors = list(tensors_in((args, out)))
        if not any(tensor.is_cuda for tensor in tensors):
            return
        source = copied_tensor(func, args)
        if source is not None and source.is_cuda != out.is_cuda:
            self._now["crossing"] += out.numel() * out.element_size()
            return
        self._now["moved"] += moved_bytes(func, args, kwargs, out)
        if not any(map(is_traceable_wrapper_subclass, tensors)):
            precision = _PRECISIONS.get(tensors[0].dtype, OTHER)
            self._now[precision] += flops_of(func, args, kwargs, out)

    def end_step(self) -> None:
        """Note that an optimizer step has ended."""
        self._at_ends = [*self._at_ends[:1], self._now.copy()]
        self._ended += 1

    def per_step(self) -> StepWork | None:
        """Return the average of all steps but the first; None if no other has ended, or an operator
        could not be counted."""
        if self._ended < 2 or self._failed:
            return None
        first, last = self._at_ends
        done = {what: (last[what] - first[what]) // (self._ended - 1) for what in last}
        return StepWork(
            flops={what: done[what] for what in (*_PRECISIONS.values(), OTHER) if done.get(what)},
            moved_bytes=done.get("moved", 0),
            crossing_bytes=done.get("crossing", 0),
            sent_bytes=done.get("sent", 0),
        )
