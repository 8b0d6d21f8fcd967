"""What a script on a phantom GPU gets where the Hugging Face hub, or its cache, has nothing for it.

- A model's ``config.json`` comes from gpumem's own table, with a sentence that says so.
- A tokenizer is stood in for by one of the same vocabulary's size; see `tokenizer_stand_in`.
- A data set cannot be stood in for: the error says what to do.

Limits: only what transformers and datasets look for themselves. Both are changed once the script
has imported them.
"""

import functools
import json
import os
import socket
import sys
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from gpumem.files import cache_folder, write_atomic
from phantom_gpu.report_records import STOOD_IN

CONNECT_SECONDS = 3.0
_SAID: set[str] = set()


def say(about: str, sentence: str) -> None:
    """Print the first sentence about a model or tokenizer, and of several ranks on the first."""
    if about not in _SAID and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"labkit: {sentence}", file=sys.stderr)
    _SAID.add(about)


def is_hub_id(name: Any) -> bool:
    """Return whether ``name`` means a repository of the hub, and no file or folder here."""
    return isinstance(name, str) and name.count("/") < 2 and not os.path.exists(name)


def after_constants(module: Any) -> None:
    """Take the hub as unreachable if it does not answer: its client would try for minutes."""
    if module.HF_HUB_OFFLINE or getproxies():
        return
    address = urlsplit(module.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname, port), CONNECT_SECONDS).close()
    except OSError:
        module.HF_HUB_OFFLINE = True


def after_files(module: Any) -> None:
    """Have transformers find in labkit's table the ``config.json`` that it cannot get elsewhere."""
    several = hasattr(module, "cached_files")  # not before 4.50, where there is one file at a time
    plain = module.cached_files if several else module.cached_file

    @functools.wraps(plain)
    def cached_files(path_or_repo_id, filenames, **options):
        name = path_or_repo_id
        try:
            return plain(name, filenames, **options)
        except OSError as error:
            if not is_hub_id(name) or filenames not in ("config.json", ["config.json"]):
                raise
            path = _config_of_table(name, error)
        return [path] if several else path

    setattr(module, plain.__name__, cached_files)


def _config_of_table(name: str, error: OSError) -> str:
    """Return a file with the table's ``config.json`` of a model that is not here."""
    from transformers.models.auto import modeling_auto as auto

    from gpumem.models.catalogue import hub_config

    config = hub_config(name)
    if config is None:
        raise OSError(
            f"{name} is not on this machine, and labkit's table has no such model: name a "
            "folder with its config.json instead, or fetch that file into the hub's cache "
            f"with `hf download {name} config.json`"
        ) from error
    say(
        name,
        f"{name} is not on this machine: its architecture is that of labkit's table, its "
        "weights are zeros",
    )
    kind = config["model_type"]
    trained_as = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)  # TRL looks it up
    trained_as = trained_as or auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    if trained_as:  # or transformers is too old for this model, and will say so
        config["architectures"] = [trained_as]
    config["torch_dtype"] = config["dtype"]  # its name before 4.56
    path = cache_folder() / "hub" / name / "config.json"
    write_atomic(path, json.dumps(config))
    return str(path)


def after_tokenizers(module: Any) -> None:
    """Have transformers' tokenizers stood in for where none of their files is here.

    transformers itself goes on with an empty vocabulary for some models, without a word.
    """
    kind = module.PreTrainedTokenizerBase
    from_files, from_name = kind._from_pretrained.__func__, kind.from_pretrained.__func__

    def replaced(name, options):
        from phantom_gpu.tokenizer_stand_in import stand_in

        tokenizer = stand_in(name, **options)
        say(
            f"the tokenizer of {name}",
            f"the tokenizer of {name} is not on this machine: another one stands in for it, which "
            "makes up to a quarter more tokens of English or code",
        )
        STOOD_IN.append(name)
        return tokenizer

    @functools.wraps(from_files)
    def from_files_here(cls, resolved_vocab_files, pretrained_model_name_or_path, *args, **options):
        name = pretrained_model_name_or_path
        here = any(resolved_vocab_files.values()) or options.get("gguf_file")
        if here or not cls.vocab_files_names:
            return from_files(cls, resolved_vocab_files, name, *args, **options)
        return replaced(name, options)

    @functools.wraps(from_name)
    def from_name_here(cls, pretrained_model_name_or_path, *args, **options):
        name = pretrained_model_name_or_path
        try:
            return from_name(cls, name, *args, **options)
        except OSError as error:  # 4.48 does not go on without files
            if "Can't load tokenizer" not in str(error):
                raise
            return replaced(name, options)

    kind._from_pretrained = classmethod(from_files_here)
    kind.from_pretrained = classmethod(from_name_here)


def after_datasets(module: Any) -> None:
    """Have datasets say what to do where it cannot reach the hub."""
    plain = module.dataset_module_factory

    @functools.wraps(plain)
    def factory(path, *args, **options):
        try:
            return plain(path, *args, **options)
        except ConnectionError as error:
            raise ConnectionError(
                f"the data set {path} is not on this machine and the hub cannot be reached: load "
                "files that are here, or rows made up in the script, as only their number and "
                "lengths matter"
            ) from error

    module.dataset_module_factory = factory
