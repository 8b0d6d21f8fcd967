"""Models by name, at any size, with random weights; activation checkpointing.

    model = lab.model("Llama-3.1-8B", device=device, dtype=torch.bfloat16, layers=4)
    for ids in lab.batches(device=device, batch_size=4, seq_len=512):
        loss = model(input_ids=ids, labels=ids).loss

``models.toml`` beside this file lists the models with parameter counts and sources.
Limits: decoders of text, some with a vision tower whose images are a fixed number of tokens. The
weights are random, so memory and time are those of the real model, and the loss is not.
transformers is imported when the first model is built, not before.
"""

import copy
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from gpumem.inputs import InputError, one_of, positive_int
from gpumem.models.precisions import _device
from gpumem.models.pretrained import WEIGHTS, model_folder
from gpumem.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

#: Attention implementations: the plain form, and PyTorch's fused ``scaled_dot_product_attention``.
ATTENTIONS = ("sdpa", "eager")
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class ModelInfo:
    """One model of the table: its architecture as transformers calls it, its published number of
    parameters and their dtype, its licence, their source, and the fields of its config that decide
    shapes."""

    name: str
    model_type: str
    parameters: int
    dtype: str
    license: str
    source: str
    config: dict[str, Any]


_TABLE = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
for _row in _TABLE.values():  # TOML has no null, and transformers has other defaults
    _row["config"] = {k: None if v == "null" else v for k, v in _row["config"].items()}
MODELS = {name: ModelInfo(name=name, **row) for name, row in _TABLE.items()}


def model_info(name: str) -> ModelInfo:
    """Return the table's entry for ``name``, case-insensitive.

    Raises:
        InputError: no such model; the message names the nearest and all of them.
    """
    return MODELS[one_of(name, MODELS, "model")]


def hub_config(hub_id: str) -> dict[str, Any] | None:
    """Return the table's ``config.json`` for a model that the hub knows as ``hub_id``, if any.

    Who publishes it does not matter, nor whether it is the base model, a chat model, or in
    transformers' format: ``"meta-llama/Llama-2-7b-chat-hf"`` is Llama-2-7B.
    """
    wanted = _plain(hub_id)
    for info in MODELS.values():
        if wanted in (_plain(info.name), _plain(info.source)):
            fields = copy.deepcopy(info.config)
            return {**fields, "model_type": info.model_type, "dtype": info.dtype}
    return None


def _plain(hub_id: str) -> str:
    """Return the last part of a hub's address, without what does not change the architecture."""
    words = hub_id.rpartition("/")[2].lower().split("-")
    return "-".join(w for w in words if w not in {"meta", "instruct", "base", "hf", "it", "chat"})


def config(name: str, *, layers: int | None = None, **overrides: Any) -> "PreTrainedConfig":
    """Return a fresh config of a model of the table. Arguments and errors as for `model`."""
    from transformers import CONFIG_MAPPING

    info = model_info(name)
    # transformers changes what it is given: it gets copies.
    fields = copy.deepcopy(info.config)
    fields.get("text_config", fields)["use_cache"] = False
    return _changed(CONFIG_MAPPING[info.model_type], info.name, fields, layers, overrides)


def _changed(
    kind: type, name: str, fields: dict[str, Any], layers: int | None, overrides: dict[str, Any]
) -> "PreTrainedConfig":
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    synonyms = kind.attribute_map
    if layers is not None:
        overrides["num_hidden_layers"] = positive_int(layers, "layers", most=1000)
    known = sorted({*kind().to_dict(), *synonyms})
    if text := fields.get("text_config"):  # beside a vision tower: what only it has is for it
        inner = {field: overrides.pop(field) for field in [*overrides] if field not in known}
        text = _changed(CONFIG_MAPPING[text["model_type"]], name, text, None, inner)
        fields["text_config"] = text.to_dict()
    for field, value in overrides.items():
        field = one_of(field, known, f"config field of {name}")
        field = synonyms.get(field, field)
        if field == "num_hidden_layers":
            depth = fields.get(field)
            for key, entries in list(fields.items()):
                if isinstance(entries, list) and len(entries) == depth:
                    del fields[key]  # for more layers the class makes the list again
                    if isinstance(value, int) and value < depth:
                        fields[key] = entries[:value]
        fields[field] = value
    try:
        return kind(**fields)
    except (StrictDataclassError, TypeError, ValueError, ZeroDivisionError) as error:
        changed = ", ".join(f"{key}={value!r}" for key, value in overrides.items())
        reason = last_line(error)
        raise InputError(f"{name} cannot have {changed or 'these sizes'}: {reason}") from error


def last_line(error: BaseException) -> str:
    """Return the reason that an error gives: transformers' checks put it last."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()[:160]


def model(
    name: "str | PreTrainedConfig",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    layers: int | None = None,
    attention: str = "sdpa",
    **overrides: Any,
) -> "PreTrainedModel":
    """Return a model, randomly initialised on ``device``, in training mode, without KV cache.

    Args:
        name: a model of the table, ``"Llama-3.2-1B"``, or a transformers config (it is copied).
        device, dtype: of its weights; ``dtype_of(precision)`` gives the dtype.
        layers: cut (or raise) the number of layers.
        attention: ``"sdpa"`` or ``"eager"``; always eager where transformers has nothing else for
            this model.
        **overrides: other fields of its config, ``hidden_size=512``.

    Returns:
        A transformers model: ``model(input_ids=ids, labels=ids).loss`` for ``ids`` of shape
        [batch, sequence], int64. The loss shifts the labels itself. With a vision tower,
        ``layers`` and fields are those of the text decoder, and images are handed over as
        ``pixel_values``: each is as many of the tokens as ``model.config.image_seq_length``.

    Raises:
        InputError: unknown model, device, attention or field; a dtype that cannot be trained.
    """
    attention = one_of(attention, ATTENTIONS, "attention")
    if dtype not in _WEIGHT_DTYPES:
        names = ", ".join(map(str, _WEIGHT_DTYPES))
        raise InputError(f"unknown dtype {dtype!r} for weights. Known: {names}.")
    if isinstance(name, str):
        settings = config(name, layers=layers, **overrides)
    else:
        kind = type(name)
        settings = _changed(kind, kind.__name__, name.to_dict(), layers, overrides)
    if not has_fused_attention(settings):
        attention = "eager"
    auto = _auto_class(settings)
    with _device(device):
        try:
            built = auto.from_config(settings, dtype=dtype, attn_implementation=attention)
        except Exception as error:  # its classes raise whatever they like over sizes that clash
            if is_out_of_memory(error):
                raise
            raise InputError(
                f"{settings.model_type} cannot be built with this config: "
                f"{type(error).__name__}: {last_line(error)}"
            ) from error
    built.loss_type = "ForCausalLM"  # GPT-2's class name does not say so, and a warning would
    return built.train()


def _auto_class(settings: "PreTrainedConfig") -> type:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if image_tokens(settings) else AutoModelForCausalLM


def causal_class(settings: "PreTrainedConfig") -> type:
    """Return the class that `model` builds; an `InputError` says that there is none."""
    known = _auto_class(settings)._model_mapping
    if type(settings) not in known:
        raise InputError(f"transformers has no causal language model for {type(settings).__name__}")
    return known[type(settings)]


def has_fused_attention(settings: "PreTrainedConfig") -> bool:
    """Return whether transformers calls ``scaled_dot_product_attention`` for such a model: Gemma-2
    caps its scores, gpt-oss adds to them, and neither can leave them to a fused kernel."""
    return causal_class(settings)._supports_sdpa


def layers_of(model: "PreTrainedModel") -> torch.nn.ModuleList | None:
    """Return the decoder's layers, the list as long as the config says; None if there is none."""
    return _list_of(model.get_decoder(), model.config.get_text_config().num_hidden_layers)


def tower_layers_of(model: "PreTrainedModel") -> torch.nn.ModuleList | None:
    """Return the layers of a vision tower; None if there is none."""
    depth = tower_depth(model.config)
    return _list_of(model.get_encoder(modality="image"), depth) if depth else None


def _list_of(module: torch.nn.Module, length: int) -> torch.nn.ModuleList | None:
    lists = (m for m in module.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == length)
    return next(lists, None)


def tower_depth(config: "PreTrainedConfig") -> int:
    """Return how many layers a vision tower has; 0 without one."""
    return getattr(getattr(config, "vision_config", None), "num_hidden_layers", 0)


def image_tokens(config: "PreTrainedConfig") -> int:
    """Return how many tokens of text an image takes the place of; 0 without a vision tower."""
    return getattr(config, "image_seq_length", 0) if hasattr(config, "vision_config") else 0


def pretrained(
    name: str = "SmolLM2-135M",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Return a small model with its real weights, trainable, and its tokenizer; works offline.

    The model is built as ``model(name)`` builds it, then filled, so that it takes the same
    memory. In a simulation it stays empty, as every fake tensor is. The first call on a machine
    may convert the weights for about 20 s; `gpumem.models.pretrained` says where they come from.

    Raises:
        InputError: unknown model, device or dtype, or no source for the weights (it says what to
            install).
    """
    name = one_of(name, ["SmolLM2-135M"], "pretrained model")
    built = model(name, device=device, dtype=dtype)
    built.generation_config.use_cache = True  # off for training; answering is slow without
    simulated = detect_fake_mode() is not None
    # Finding and reading files is no part of an experiment: no tracker counts it.
    with _disable_current_modes(), unset_fake_temporarily():
        from safetensors.torch import load_model
        from transformers import AutoTokenizer

        folder = model_folder()
        if not simulated:
            load_model(built, folder / WEIGHTS)
        return built, AutoTokenizer.from_pretrained(folder)


# --- activation checkpointing -----------------------------------------------------------------


def checkpointing(model: torch.nn.Module, on: bool = True) -> None:
    """Switch a transformers model's own checkpointing on or off: every layer is recomputed.

    The reentrant form of ``torch.utils.checkpoint`` is never used. Training mode only.

    Raises:
        InputError: the model has no such switch.
    """
    # transformers 5.23 renamed the switch and warns about the old name, which older releases need.
    verb, arguments = ("enable", [{"use_reentrant": False}]) if on else ("disable", [])
    for stem in ("activation_checkpointing", "gradient_checkpointing"):
        if switch := getattr(model, f"{stem}_{verb}", None):
            return switch(*arguments)
    raise InputError(
        f"{type(model).__name__} has no checkpointing switch; "
        "call torch.utils.checkpoint.checkpoint on its layers instead"
    )
