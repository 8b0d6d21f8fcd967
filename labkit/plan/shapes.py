"""The shapes of a model's weights, counted on ``meta``, where a model takes no memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_MOST_KNOWN = 64
_known: dict[tuple[type, str], "Shapes"] = {}


@dataclass(frozen=True)
class Shapes:
    """The weights of one model.

    Attributes:
        weights: the shape of each weight tensor, by name.
        linear: (rows, columns) of the linear layers other than the output, by name: those that
            adapters join and bitsandbytes quantizes.
        in_layers: number of weights in the decoder's layers.
    """

    weights: Mapping[str, tuple[int, ...]]
    linear: Mapping[str, tuple[int, int]]
    in_layers: int

    @cached_property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(prod(shape) for shape in self.weights.values())

    @cached_property
    def largest(self) -> int:
        """Number of weights in the largest tensor."""
        return max(prod(shape) for shape in self.weights.values())

    @cached_property
    def in_linear(self) -> int:
        """Number of weights in linear layers other than the output."""
        return sum(rows * columns for rows, columns in self.linear.values())

    def adapters(self, rank: int) -> int:
        """Return the number of weights in LoRA adapters of ``rank`` on every linear layer."""
        return rank * sum(rows + columns for rows, columns in self.linear.values())


def shapes_of(config: "PreTrainedConfig") -> Shapes:
    """Build the model of ``config`` once and count its weights."""
    key = (type(config), config.to_json_string())
    if key not in _known:
        from torch.nn import Linear
        from transformers.pytorch_utils import Conv1D

        from labkit.models.catalogue import layers_of, model

        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        built = model(config, device="meta")
        layers, output = layers_of(built), built.get_output_embeddings()
        linear = {}
        for name, module in built.named_modules():
            if isinstance(module, Linear | Conv1D) and module is not output:
                shape = tuple(module.weight.shape)
                # GPT-2's Conv1D holds the transpose.
                linear[name] = shape if isinstance(module, Linear) else shape[::-1]
        _known[key] = Shapes(
            weights={name: tuple(p.shape) for name, p in built.named_parameters()},
            linear=linear,
            in_layers=sum(p.numel() for p in layers.parameters()) if layers is not None else 0,
        )
    return _known[key]
