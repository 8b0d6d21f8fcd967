"""Whose model: a name of our table, a folder with a ``config.json``, or a hub id when online.

Only the configuration is read, as JSON, and only architectures that transformers itself brings are
built: no code and no weights ever come with it.

Limits: text decoders that transformers can train as causal language models, and those with a vision
tower whose images are a fixed number of tokens (``image_seq_length``). A configuration's
``quantization_config`` is left out: a recipe says it.
"""

import copy
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumem.inputs import InputError, shown
from gpumem.models.catalogue import (
    MODELS,
    causal_class,
    config,
    image_tokens,
    last_line,
    model_info,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MOST_LAYERS = 1000
#: What no published decoder passes.
_BOUNDS = {
    "num_hidden_layers": MOST_LAYERS,
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 18,
    "num_attention_heads": 1 << 18,
}
#: Not trained to name the next token, though a language model could be built of the same config.
_OTHER_HEADS = ("Classification", "QuestionAnswering", "MultipleChoice")
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
# A recipe says these, or they name code, or they change what a forward pass returns.
_NOT_OURS = {"quantization_config", "auto_map", "attn_implementation", "gradient_checkpointing"}
_NOT_OURS |= {"return_dict", "output_attentions", "output_hidden_states"}


def find_config(source: "str | Path | PreTrainedConfig") -> "tuple[str, PreTrainedConfig]":
    """Return a name to show, and a fresh config, for whatever the user called a model.

    Args:
        source: a model of the table; a folder that holds a ``config.json``, or that file; a hub
            id ``"owner/name"``, which is asked for when online; or a config already made.

    Raises:
        InputError: nothing of the kind is there, it cannot be read, or it is no decoder that can
            be built.
    """
    from transformers import PreTrainedConfig

    if isinstance(source, PreTrainedConfig):
        name = type(source).__name__.removesuffix("Config")
        return name, _checked(copy.deepcopy(source), "the config")
    if not isinstance(source, str | Path) or re.search(r"\.py(:|$)", str(source)):
        raise InputError(
            f"a model is a name, a folder or a config, not {shown(source)}: `labkit phantom` runs "
            "your script, lab.simulate a step that is written as a function"
        )
    text = str(source)
    if text.lower().replace("_", "-") not in map(str.lower, MODELS):
        path = os.path.expanduser(text)
        file = Path(path, "config.json") if os.path.isdir(path) else Path(path)
        if os.path.isdir(path) or os.path.isfile(path):
            return file.resolve().parent.name or text, _from_file(file)
        if _HUB_ID.fullmatch(text):
            return text, _from_file(_download(text))
    name = model_info(text).name
    return name, config(name)


def find_generator(source: "str | Path | PreTrainedConfig") -> "tuple[str, PreTrainedConfig]":
    """Return what `find_config` does, of a model that writes; an `InputError` for an encoder too,
    whose class for language models is one for decoders made of it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    name, made = find_config(source)
    encodes = made.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if encodes and getattr(made, "is_decoder", None) is False:
        raise InputError(
            f"{name} is an encoder ({made.model_type!r}): it fills in masked tokens and writes no "
            "answer. Run what you do with it with `labkit phantom`"
        )
    return name, made


def _download(hub_id: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub_id, "config.json"))
    except Exception as error:  # its client raises a dozen kinds: offline, not there, not allowed
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise InputError(
            f"no folder {hub_id[:80]!r} here, and its config.json could not be had from the hub "
            f"({reason})"
        ) from error


def _from_file(path: Path) -> "PreTrainedConfig":
    if not path.is_file():
        raise InputError(f"there is no {path.name} in {path.parent}")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {last_line(error)}") from error
    return config_from_dict(record, what=str(path))


def config_from_dict(record: Any, *, what: str = "the config") -> "PreTrainedConfig":
    """Return a config from the content of a ``config.json``. Errors as for `find_config`."""
    from transformers import CONFIG_MAPPING

    kind = record.get("model_type") if isinstance(record, Mapping) else None
    if not isinstance(kind, str):
        raise InputError(f"{what} is no object with a 'model_type', so no transformers config")
    if kind not in CONFIG_MAPPING:
        raise InputError(f"{what} has the model_type {shown(kind)}, which transformers lacks")
    fields = {}
    for name, value in record.items():
        # The class makes lists that are as long as these say.
        if name.endswith(("layers", "n_layer")) and isinstance(value, int) and value > MOST_LAYERS:
            raise InputError(f"{what}: {name} must be at most {MOST_LAYERS}, not {shown(value)}")
        if name not in _NOT_OURS and not name.startswith("_"):
            fields[name] = value
    try:
        made = CONFIG_MAPPING[kind].from_dict(fields)
    except Exception as error:  # a class's own checks raise whatever they like
        raise InputError(f"{what} cannot be a {kind} model: {last_line(error)}") from error
    return _checked(made, what)


def _checked(made: "PreTrainedConfig", what: str) -> "PreTrainedConfig":
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = made.model_type
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not image_tokens(made):
        raise InputError(
            f"{what} is of the type {kind!r}, which is no causal language model: run your script "
            "with `labkit phantom`, or give its step as a function to lab.simulate"
        )
    heads = getattr(made, "architectures", None) or []
    if heads and all(str(head).endswith(_OTHER_HEADS) for head in heads):
        raise InputError(
            f"{what} is a {shown(heads[0])}, and only language models are known here: run your "
            "script with `labkit phantom`, or give its step as a function to lab.simulate"
        )
    # BartForCausalLM and Llama4ForCausalLM are decoders of what such a config describes.
    trains_all = causal_class(made).config_class is type(made) and not made.is_encoder_decoder
    if (made.is_encoder_decoder or made.sub_configs) and not trains_all:
        raise InputError(
            f"{what} is of the type {kind!r}, and its causal language model is the decoder alone: "
            "its other parts would be left out. Run your script with `labkit phantom`, or give its "
            "step as a function to lab.simulate"
        )
    text = made.get_text_config()
    for field, most in _BOUNDS.items():
        value = getattr(text, field, None)
        if type(value) is not int or not 1 <= value <= most:
            raise InputError(
                f"{what}: {field} must be a whole number from 1 to {most}, not {shown(value)}"
            )
    text.use_cache = False
    return made
