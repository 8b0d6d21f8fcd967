"""Whose model: a name of our table, a folder with a ``config.json``, or a hub id when online.

Only the configuration is read, as JSON, and only architectures that transformers itself brings are
built: no code and no weights ever come with it. Sizes are bounded, so that a hostile file costs an
error message and nothing more.

Limits: text decoders that transformers can train as causal language models. A configuration's
``quantization_config`` and data type are left out: a recipe says both.
"""

import copy
import dataclasses
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.memory import InputError, one_of
from labkit.models import MODELS, config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MOST_FILE_BYTES = 1 << 20
#: What no published decoder passes: layers, experts, vocabulary, any width.
MOST_LAYERS, MOST_EXPERTS, MOST_VOCABULARY, MOST_WIDTH = 1000, 4096, 1 << 22, 1 << 18
#: The largest whole number that any field may hold.
MOST = 1 << 40
_MOST_PATH = 1000
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
# A recipe says these, or they change what a forward pass returns, or they describe a classifier.
_NOT_OURS = {
    "quantization_config", "dtype", "torch_dtype", "auto_map", "attn_implementation",
    "experts_implementation", "gradient_checkpointing", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states", "is_encoder_decoder", "num_labels", "id2label",
    "label2id", "problem_type", "chunk_size_feed_forward",
}  # fmt: skip
# Read by every class, though fields of none.
_READ_APART = {"rope_scaling", "per_layer_config"}


def find_config(source: "str | Path | PreTrainedConfig") -> "tuple[str, PreTrainedConfig]":
    """A name to show, and a fresh config, for whatever the user called a model.

    Args:
        source: a model of the table; a folder that holds a ``config.json``, or that file; a hub
            id ``"owner/name"``, which is asked for when online; or a config already made.

    Raises:
        InputError: nothing of the kind is there, it cannot be read, or it is no decoder that can
            be built.
    """
    from transformers import PreTrainedConfig

    if isinstance(source, PreTrainedConfig):
        made = _checked(copy.deepcopy(source), "the config")
        return type(source).__name__.removesuffix("Config"), made
    if not isinstance(source, str | Path):
        raise InputError(
            "a model is a name, a folder, a file or a transformers config, "
            f"not a value of type {type(source).__name__[:60]}"
        )
    text = str(source)
    if not text.strip():
        raise InputError("say which model: a name of the table, a folder, or a hub id")
    if len(text) > _MOST_PATH or not text.isprintable():
        raise InputError("a model's name or path is one line of at most 1000 characters")
    if text.lower().replace("_", "-") in {name.lower() for name in MODELS}:
        name = one_of(text, MODELS, "model")
        return name, config(name)
    path = _existing(text)
    if path is not None:
        return (path.resolve().parent.name or text)[:100], _from_file(path)
    if _HUB_ID.fullmatch(text):
        return text, _from_file(_download(text))
    nearest = text if len(text) <= 60 else text[:60] + "…"
    one_of(nearest, MODELS, "model")  # refuses, and names the nearest
    raise InputError(f"unknown model {nearest!r}")


def _existing(text: str) -> Path | None:
    """The config file that ``text`` names by itself or by its folder; None if nothing is there."""
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return path / "config.json"
        return path if path.is_file() else None
    except (OSError, RuntimeError) as error:  # a name too long, no permission; no such user
        raise InputError(f"{_short(text)} cannot be looked up: {_last_line(error)}") from error


def _download(hub_id: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub_id, "config.json"))
    except Exception as error:  # its client raises a dozen kinds: offline, not there, not allowed
        reason = str(error).strip().partition("\n")[0][:160]
        raise InputError(
            f"no folder {hub_id[:80]!r} here, and its config.json could not be had from the hub "
            f"({type(error).__name__}: {reason})"
        ) from error


def _from_file(path: Path) -> "PreTrainedConfig":
    name = _short(str(path))
    try:
        if not path.is_file():
            raise InputError(f"there is no {path.name[:40]} in {_short(str(path.parent))}")
        if path.stat().st_size > MOST_FILE_BYTES:
            raise InputError(f"{name} has more than {MOST_FILE_BYTES} bytes: no model's config has")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name} cannot be read as text: {_last_line(error)}") from error
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not valid JSON: {_last_line(error)}") from error
    return config_from_dict(record, what=name)


def config_from_dict(record: Any, *, what: str = "the config") -> "PreTrainedConfig":
    """A config from the content of a ``config.json``; nothing in it is trusted.

    Raises:
        InputError: not an object, an unknown architecture, or sizes that cannot be.
    """
    from transformers import CONFIG_MAPPING

    if not isinstance(record, Mapping):
        raise InputError(f"{what} must be an object, not {type(record).__name__}")
    kind = record.get("model_type")
    if not isinstance(kind, str):
        raise InputError(f"{what} has no 'model_type': it is no transformers config")
    if kind not in CONFIG_MAPPING:
        raise InputError(f"{what} has the model_type {kind[:60]!r}, which transformers lacks")
    _refuse_sizes(record, what)
    try:
        with _quiet():
            fields = _own_fields(CONFIG_MAPPING[kind], record)
            made = CONFIG_MAPPING[kind].from_dict({**fields, "use_cache": False})
    except Exception as error:  # a class's own checks raise whatever they like
        raise InputError(f"{what} cannot be a {kind} model: {_last_line(error)}") from error
    return _checked(made, what)


def _own_fields(kind: type, record: Mapping[Any, Any]) -> dict[str, Any]:
    """What of ``record`` may be set: nothing that would replace a method of the class."""
    own = {field.name for field in dataclasses.fields(kind)}
    allowed = own | set(kind.attribute_map) | _READ_APART
    return {
        key: value
        for key, value in record.items()
        if isinstance(key, str) and key not in _NOT_OURS and not key.startswith("_")
        and (key in allowed or not hasattr(kind, key))
    }  # fmt: skip


def _refuse_sizes(record: Mapping[Any, Any], what: str) -> None:
    """Refuse numbers by which a config's own class would build lists without end.

    Raises:
        InputError: a number of layers or experts, or any whole number, that no model has.
    """
    waiting: list[tuple[str, Any, int]] = [("", record, MOST)]
    while waiting:
        field, value, most = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(str(key)[:60], item, _most(str(key))) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            # GPT-Neo repeats what a list says as often as a number in it says.
            waiting += [(field, item, min(most, MOST_VOCABULARY)) for item in value]
        elif isinstance(value, int) and abs(value) > most:
            raise InputError(f"{what}: {field!r} must not hold a number beyond {most}")


def _most(field: str) -> int:
    if field.endswith(("layers", "n_layer")):
        return MOST_LAYERS
    return MOST_EXPERTS if field.endswith("experts") else MOST


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says about fields that are not ours to mend."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _checked(made: "PreTrainedConfig", what: str) -> "PreTrainedConfig":
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = made.model_type
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(f"{what} is of the type {kind[:60]!r}, which is no causal language model")
    bounds = {
        "num_hidden_layers": MOST_LAYERS, "vocab_size": MOST_VOCABULARY, "hidden_size": MOST_WIDTH,
        "intermediate_size": 4 * MOST_WIDTH, "num_attention_heads": MOST_WIDTH,
    }  # fmt: skip
    for field, most in bounds.items():
        value = getattr(made, field, None)
        if value is None and field == "intermediate_size":
            continue  # GPT-2 derives it
        if type(value) is not int or not 1 <= value <= most:
            shown = value if type(value) is int and abs(value) <= MOST else type(value).__name__
            raise InputError(
                f"{what}: {field} must be a whole number from 1 to {most}, not {shown}"
            )
    made.use_cache = False
    return made


def _short(path: str) -> str:
    """The end of a long path, which says more than its beginning."""
    return path if len(path) <= 120 else "…" + path[-120:]


def _last_line(error: BaseException) -> str:
    """The reason that an error gives: transformers' checks put it last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:160]
