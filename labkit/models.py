"""Models by name, at any size, with random weights; precisions; activation checkpointing.

    model = lab.model("Llama-3.1-8B", device=device, dtype=torch.bfloat16, layers=4)
    for ids in lab.batches(device=device, batch_size=4, seq_len=512):
        loss = model(input_ids=ids, labels=ids).loss

A model is built from its published config, on the device it will run on, and works on fake
tensors. ``models.toml`` beside this file lists the models with parameter counts and sources. The
text (``corpus``, ``batches``) and the one model with real weights (``pretrained``) have modules
of their own and are found here too.

Limits: text-only decoders. The weights are random, so memory and time are those of the real
model, and the loss is not. Only the fields of a config that decide shape and arithmetic are in
the table. transformers is imported when the first model is built, not before.
"""

import copy
import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from labkit.experiment import PRECISIONS
from labkit.memory import InputError, one_of, positive_int
from labkit.small_model import WEIGHTS, cache_folder, model_folder
from labkit.text import batches, corpus
from labkit.tracker import is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "ATTENTIONS", "MODELS", "PRECISIONS", "PRETRAINED", "ModelInfo", "autocast", "autocast_dtype",
    "batches", "cache_folder", "checkpointing", "config", "corpus", "dtype_of", "layers_of",
    "model", "model_info", "parameter_count", "pretrained",
]  # fmt: skip

#: Attention implementations: the plain form, and PyTorch's fused ``scaled_dot_product_attention``.
ATTENTIONS = ("sdpa", "eager")


@dataclass(frozen=True)
class ModelInfo:
    """One model of the table.

    Attributes:
        name: how lessons call it.
        model_type: its architecture, as transformers calls it.
        parameters: how many parameters the published model has.
        license: of the published weights.
        source: title and address of the page that gives them.
        config: the fields of its config that decide its shape, read-only.
        note: small print.
    """

    name: str
    model_type: str
    parameters: int
    license: str
    source: str
    config: Mapping[str, Any]
    note: str = ""


def _read_table() -> dict[str, ModelInfo]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {
        name: ModelInfo(name=name, **{**row, "config": MappingProxyType(row["config"])})
        for name, row in table.items()
    }


MODELS: Mapping[str, ModelInfo] = MappingProxyType(_read_table())


def model_info(name: str) -> ModelInfo:
    """The table's entry for ``name`` (capitals are forgiven).

    Raises:
        InputError: no such model; the message names the nearest and all of them.
    """
    return MODELS[one_of(name, MODELS, "model")]


def config(name: str, *, layers: int | None = None, **overrides: Any) -> "PreTrainedConfig":
    """A fresh transformers config of the model, yours to change.

    Args:
        name: a model of the table.
        layers: number of layers, instead of the published one.
        **overrides: other config fields, ``hidden_size=512``.

    Raises:
        InputError: unknown model or field, a field of the wrong kind, or sizes that do not go
            together.
    """
    from transformers import CONFIG_MAPPING

    info = model_info(name)
    # transformers changes what it is given: it gets copies.
    fields = {**copy.deepcopy(dict(info.config)), "use_cache": False}
    return _changed(CONFIG_MAPPING[info.model_type], info.name, fields, layers, overrides)


def _changed(
    kind: type, name: str, fields: dict[str, Any], layers: int | None, overrides: dict[str, Any]
) -> "PreTrainedConfig":
    from huggingface_hub.errors import StrictDataclassError

    synonyms = kind.attribute_map
    if layers is not None:
        overrides["num_hidden_layers"] = positive_int(layers, "layers", most=1000)
    known = sorted((set(kind().to_dict()) | set(synonyms)) - _NOT_SHAPE)
    for field, value in overrides.items():
        field = one_of(field, known, f"config field of {name}")
        field = synonyms.get(field, field)
        published = fields.get(field)
        if type(published) is int and not field.endswith("_token_id"):
            positive_int(value, field)
        fields[field] = value
        if field == "num_hidden_layers":
            # Lists with one entry for each layer are made again.
            made_again = [k for k, v in fields.items() if _is_per_layer(k, v, published)]
            fields = {k: v for k, v in fields.items() if k not in made_again}
    try:
        made = kind(**fields)
        groups = getattr(made, "num_key_value_heads", None) or 1
        if made.num_attention_heads % groups:
            raise ValueError(f"the attention heads do not share {groups} key-value heads evenly")
        return made
    except (StrictDataclassError, TypeError, ValueError, ZeroDivisionError) as error:
        changed = ", ".join(f"{key}={value!r}" for key, value in overrides.items())
        reason = str(error).strip().rpartition("\n")[2].strip()
        raise InputError(f"{name} cannot have {changed or 'these sizes'}: {reason}") from error


def _is_per_layer(field: str, value: Any, layers: Any) -> bool:
    return field == "layer_types" or (isinstance(value, list) and len(value) == layers)


# What model() sets itself, or what says nothing about the model.
_NOT_SHAPE = {
    "dtype", "architectures", "model_type", "transformers_version", "_name_or_path", "id2label",
    "label2id", "problem_type", "return_dict", "is_encoder_decoder", "chunk_size_feed_forward",
    "pretraining_tp",
}  # fmt: skip


def model(
    name: "str | PreTrainedConfig",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    layers: int | None = None,
    attention: str = "sdpa",
    **overrides: Any,
) -> "PreTrainedModel":
    """A model by name, randomly initialised on ``device``, in training mode, without KV cache.

    Args:
        name: a model of the table, ``"Llama-3.2-1B"``, or a transformers config (it is copied).
        device: where its weights are created.
        dtype: of its weights; ``dtype_of(precision)`` gives it.
        layers: cut (or raise) the number of layers.
        attention: ``"sdpa"`` or ``"eager"``.
        **overrides: other fields of its config, ``hidden_size=512``.

    Returns:
        A transformers model: ``model(input_ids=ids, labels=ids).loss`` for ``ids`` of shape
        [batch, sequence], int64. The loss shifts the labels itself.

    Raises:
        InputError: unknown model, device, attention or field; a dtype that cannot be trained.
    """
    from transformers import AutoModelForCausalLM

    attention = one_of(attention, ATTENTIONS, "attention")
    if not isinstance(dtype, torch.dtype) or dtype not in _WEIGHT_DTYPES:
        names = ", ".join(map(str, _WEIGHT_DTYPES))
        raise InputError(f"unknown dtype {dtype!r} for weights. Known: {names}.")
    if isinstance(name, str):
        settings = config(name, layers=layers, **overrides)
    else:
        kind = type(name)
        settings = _changed(kind, kind.__name__, name.to_dict(), layers, overrides)
    with _device(device):
        try:
            built = AutoModelForCausalLM.from_config(
                settings, dtype=dtype, attn_implementation=attention
            )
        except _UNBUILDABLE as error:
            if is_out_of_memory(error):
                raise
            what = name if isinstance(name, str) else type(name).__name__
            reason = str(error).strip().partition("\n")[0][:160]
            raise InputError(
                f"{what} cannot be built with this config: {type(error).__name__}: {reason}"
            ) from error
    built.loss_type = "ForCausalLM"  # GPT-2's class name does not say so, and a warning would
    return built.train()


# What transformers' classes raise over a config that nobody checked.
_UNBUILDABLE = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
                RuntimeError, TypeError, ValueError)  # fmt: skip
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"unknown device {device!r}: 'cpu' or 'cuda' would do") from error


def layers_of(model: "PreTrainedModel") -> torch.nn.ModuleList | None:
    """The decoder's layers: the list that is as long as the config says; None if there is none."""
    depth = model.config.num_hidden_layers
    lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth)
    return next(lists, None)


def parameter_count(name: str, *, layers: int | None = None, **overrides: Any) -> int:
    """How many parameters the model has when built, without building it anywhere.

    Raises:
        InputError: unknown model or field.
    """
    built = model(name, device="meta", layers=layers, **overrides)
    return sum(parameter.numel() for parameter in built.parameters())


#: The models whose real weights the course uses.
PRETRAINED = ("SmolLM2-135M",)


def pretrained(
    name: str = "SmolLM2-135M",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """A small model with its real weights, trainable, and its tokenizer; works offline.

    The model is built as ``model(name)`` builds it, then filled, so that it takes the same
    memory. In a simulation it stays empty, as every fake tensor is. The first call on a machine
    may convert the weights for about 20 s; ``labkit/small_model.py`` says where they come from.

    Raises:
        InputError: unknown model, device or dtype, or no source for the weights (it says what to
            install).
    """
    name = one_of(name, PRETRAINED, "pretrained model")
    built = model(name, device=device, dtype=dtype)
    built.generation_config.use_cache = True  # off for training; answering is slow without
    simulated = detect_fake_mode() is not None
    # Finding and reading files is no part of an experiment: no tracker counts it.
    with _disable_current_modes(), unset_fake_temporarily():
        from transformers import AutoTokenizer

        folder = model_folder()
        if not simulated:
            _fill(built, folder / WEIGHTS)
        return built, AutoTokenizer.from_pretrained(folder)


def _fill(built: "PreTrainedModel", weights: Path) -> None:
    from safetensors.torch import load_file

    missing, unexpected = built.load_state_dict(load_file(weights), strict=False)
    # The output layer shares the embedding's matrix, which files hold once.
    if unexpected or set(missing) - {"lm_head.weight"}:
        names = ", ".join([*unexpected, *missing][:3])
        raise InputError(f"{weights} does not hold this model's weights: see {names}")


# --- precision -------------------------------------------------------------------------------

_WEIGHTS_IN = {
    "fp32": torch.float32,
    "amp-fp16": torch.float32,
    "amp-bf16": torch.float32,
    "bf16": torch.bfloat16,
}
_AUTOCAST_TO = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of the *weights* under ``precision``: autocast keeps them in float32.

    Raises:
        InputError: not one of ``PRECISIONS``.
    """
    return _WEIGHTS_IN[one_of(precision, PRECISIONS, "precision")]


def autocast_dtype(precision: str) -> torch.dtype | None:
    """What autocast computes in under ``precision``; None for the precisions without it.

    Raises:
        InputError: not one of ``PRECISIONS``.
    """
    return _AUTOCAST_TO.get(one_of(precision, PRECISIONS, "precision"))


def autocast(device: torch.device | str, precision: str) -> AbstractContextManager[Any]:
    """``torch.autocast`` for the ``amp-`` precisions, nothing for the others.

    Raises:
        InputError: unknown device or precision.
    """
    dtype = autocast_dtype(precision)
    return nullcontext() if dtype is None else torch.autocast(_device(device).type, dtype=dtype)


# --- activation checkpointing -----------------------------------------------------------------


def checkpointing(model: torch.nn.Module, on: bool = True) -> None:
    """Switch a transformers model's own checkpointing on or off: every layer is recomputed.

    transformers 5.23 renamed the switch and warns about the old name, which older releases need.
    The reentrant form of ``torch.utils.checkpoint`` is never used. Training mode only.

    Raises:
        InputError: the model has no such switch.
    """
    verb = "enable" if on else "disable"
    for stem in ("activation_checkpointing", "gradient_checkpointing"):
        switch = getattr(model, f"{stem}_{verb}", None)
        if switch is not None:
            return switch({"use_reentrant": False}) if on else switch()
    raise InputError(
        f"{type(model).__name__} has no checkpointing switch; "
        "call torch.utils.checkpoint.checkpoint on its layers instead"
    )
