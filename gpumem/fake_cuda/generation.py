"""transformers' ``generate`` on fake tensors: its own code runs, and what it asks is answered.

No row meets an end token, so that each gets as many tokens as were asked for, which takes the most
memory; no prompt is padded. A phantom GPU answers the same. On a GPU experts are computed another
way once the prompt is read (``_optimize_model_for_decode``), and so they are here.

Source: transformers 5.13 to 5.23, ``generation/utils.py``, ``generation/stopping_criteria.py``.

Limits: greedy decoding and sampling. Beam search and assisted decoding ask for other values, and
are refused.
"""

import importlib
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

#: What a question is about, by the operator whose result is asked for.
_ANSWERS = {
    torch.ops.aten.all.default: True,  # is no token of the prompt padding? But see `has_padding`
    torch.ops.aten.any.default: False,  # is one, or is one an end token?
}
GENERATION = "transformers.generation."


def _no_tensor() -> None:
    """Stand for a reference to none."""


class Generation:
    """What `generate` is told. ``finished``: whether the rows have the length asked for."""

    def __init__(self) -> None:
        self.finished = False
        self._asked_of: tuple[Any, bool] = (_no_tensor, False)

    def saw(self, func: Any, args: tuple, out: Any) -> None:
        """Note that an operator gave ``out`` for ``args``, which may be asked for next."""
        if func is torch.ops.aten.eq.Scalar and hasattr(args[0], "has_padding"):
            out.has_padding = True
        if func in _ANSWERS:
            # A strong reference would keep the tensor in memory for longer than `generate` does.
            answer = _ANSWERS[func] and not hasattr(args[0], "has_padding")
            self._asked_of = weakref.ref(out), answer

    def answer(self, tensor: torch.Tensor) -> bool | None:
        """Return what the library is told of ``tensor``; None where that is not known."""
        (known, answer), self._asked_of = self._asked_of, (_no_tensor, False)
        if known() is tensor:
            return answer
        # Is a token padding? Are all rows finished?
        answer, self.finished = self.finished, False
        return answer if tensor.dtype is torch.bool else None


@contextmanager
def fake_generation(*, as_cuda: bool) -> Iterator[Generation]:
    """Inside, ``generate`` runs on fake tensors as on CUDA."""
    told = Generation()
    criteria = importlib.import_module("transformers.generation.stopping_criteria")
    utils = importlib.import_module("transformers.generation.utils")
    of_length = criteria.MaxLengthCriteria.__call__

    def length_reached(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        told.finished = input_ids.shape[-1] >= self.max_length
        return of_length(self, input_ids, *args, **kwargs)

    @contextmanager
    def experts_for_decode(model: Any) -> Iterator[None]:
        before = model.get_experts_implementation()
        model.set_experts_implementation(
            {key: "batched_mm" if kind == "grouped_mm" else kind for key, kind in before.items()}
        )
        try:
            yield
        finally:
            model.set_experts_implementation(before)

    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(criteria.MaxLengthCriteria, "__call__", length_reached)
        )
        if as_cuda and hasattr(utils.GenerationMixin, "_optimize_model_for_decode"):
            stack.enter_context(
                mock.patch.object(
                    utils.GenerationMixin, "_optimize_model_for_decode", experts_for_decode
                )
            )
        yield told
