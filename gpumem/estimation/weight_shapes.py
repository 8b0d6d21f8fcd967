"""The shapes of a model's weights, counted on ``meta``, where a model takes no memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import torch

from gpumem.models import catalogue

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

#: In the names of a language model's modules where a vision tower stands beside it.
LANGUAGE = ".language_model."
_known: dict[tuple[type, str], "Shapes"] = {}


@dataclass(frozen=True)
class Shapes:
    """The weights of one model.

    Attributes:
        weights: the shape of each weight tensor, by name.
        linear: (rows, columns) of the linear layers other than the output, by name: those that
            bitsandbytes quantizes. Experts are none: each of their tensors holds all of a layer's.
        in_layers: number of weights in the decoder's layers.
        period: after how many layers the decoder's repeat, the first one aside; 0: they do not, or
            a vision tower's are not identical.
    """

    weights: Mapping[str, tuple[int, ...]]
    linear: Mapping[str, tuple[int, int]]
    in_layers: int
    period: int

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

    @cached_property
    def adapted(self) -> Mapping[str, tuple[int, int]]:
        """Those of ``linear`` that adapters join: beside a vision tower, the language model's."""
        inside = {name: shape for name, shape in self.linear.items() if LANGUAGE in name}
        return inside or self.linear

    def adapters(self, rank: int) -> int:
        """Return the number of weights in LoRA adapters of ``rank`` on all that they join."""
        return rank * sum(rows + columns for rows, columns in self.adapted.values())


def linear_layers(model: "PreTrainedModel") -> dict[str, torch.nn.Module]:
    """Return the linear layers of ``model`` other than the output, by name."""
    from transformers.pytorch_utils import Conv1D

    kinds, output = torch.nn.Linear | Conv1D, model.get_output_embeddings()
    return {n: m for n, m in model.named_modules() if isinstance(m, kinds) and m is not output}


def has_experts(model: torch.nn.Module) -> bool:
    """Return whether one tensor of ``model`` holds several experts' weights."""
    return any(parameter.dim() == 3 for parameter in model.parameters())


def shapes_of(config: "PreTrainedConfig") -> Shapes:
    """Build the model of ``config`` once and count its weights."""
    key = (type(config), config.to_json_string())
    if key not in _known:
        built = catalogue.model(config, device="meta")
        layers, linear = catalogue.layers_of(built), {}
        for name, module in linear_layers(built).items():
            shape = tuple(module.weight.shape)
            # GPT-2's Conv1D holds the transpose.
            linear[name] = shape if isinstance(module, torch.nn.Linear) else shape[::-1]
        _known[key] = Shapes(
            weights={name: tuple(p.shape) for name, p in built.named_parameters()},
            linear=linear,
            in_layers=sum(p.numel() for p in layers.parameters()) if layers is not None else 0,
            period=_period(config, layers or (), catalogue.tower_layers_of(built) or ()),
        )
    return _known[key]


def _period(
    config: "PreTrainedConfig", layers: Sequence[torch.nn.Module], tower: Sequence[torch.nn.Module]
) -> int:
    fields = config.get_text_config().to_dict().values()
    # The same weights may have another attention, or positions in some layers only.
    lists = [field for field in fields if isinstance(field, list) and len(field) == len(layers)]
    lists.append([_signature(layer) for layer in layers][1:])
    if any(_signature(layer) != _signature(tower[0]) for layer in tower):
        return 0
    periods = range(1, len(layers) // 2)
    return next((p for p in periods if all(each[p:] == each[:-p] for each in lists)), 0)


def _signature(layer: torch.nn.Module) -> list[tuple]:
    parts = [(name, type(part).__name__) for name, part in layer.named_modules()]
    return parts + [(name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters()]
