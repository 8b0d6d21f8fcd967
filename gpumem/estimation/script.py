"""A recipe as a stand-alone training script: transformers, PEFT, bitsandbytes and a plain loop.

The script has what its recipe needs and nothing else, and imports nothing of labkit. It trains on a
text file and saves the model, or its adapters. The text is in the templates beside this file.

Where GPUs share the model, ``torchrun`` starts the script, on one machine or on many. Every rank
has the model without memory; rank 0 alone reads the weights, and the others get their parts of
them. A checkpoint is written in parts, too, and a run that is started again continues after its
last complete one, with as many ranks as there are then.

Limits: text alone is trained on, no images. The learning rate is constant, and a starting point:
what suits depends on the model and the text. Nothing is evaluated. On one GPU there is no
checkpoint; a sharded one is never removed, and loading it runs what its ``.metadata`` holds, a
pickle: the script's heading says so.
"""

import inspect
import json
import re
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from gpumem.estimation import techniques
from gpumem.estimation.model_building import adapter_targets, possible_for
from gpumem.estimation.recipe import CHUNK_TOKENS, Recipe
from gpumem.inputs import InputError
from gpumem.models import catalogue
from gpumem.models.catalogue import MODELS, image_tokens
from gpumem.models.config import find_config
from gpumem.models.precisions import autocast_dtype
from gpumem.units import format_bytes

_HUB_PAGE = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)")


def write_script(
    path: str | Path, recipe: Recipe, *, model: Any, needed_bytes: int | None = None, gpu: str = ""
) -> Path:
    """Write the script of ``recipe`` to ``path``, a new file, or raise `OSError`. Other arguments
    and errors as for `script`."""
    text = script(recipe, model=model, needed_bytes=needed_bytes, gpu=gpu)
    with Path(path).open("x", encoding="utf-8") as file:
        file.write(text)
    return Path(path)


def script(recipe: Recipe, *, model: Any, needed_bytes: int | None = None, gpu: str = "") -> str:
    """Return the text of a script that trains by ``recipe``.

    Args:
        recipe: how to train.
        model: what the script loads by default: a model of the table, a folder, a hub id. For a
            config, which has no weights, the script requires ``--model``.
        needed_bytes: what the recipe is expected to take on ``gpu``, for the heading.
        gpu: the GPU's name.

    Raises:
        InputError: the model is trained on images too.
    """
    rate = 2e-4 if recipe.lora else 2e-5
    if recipe.optimizer == "sgd":
        rate = 1e-2
    packages = ["torch", "transformers"]
    if recipe.lora:
        packages.append("peft")
    if "8bit" in recipe.optimizer or recipe.quantize:
        packages.append("bitsandbytes")
    if recipe.quantize:
        packages.append("accelerate")
    name, config = find_config(model)
    recipe = possible_for(config, recipe)
    if image_tokens(config):
        raise InputError(f"a script reads a text file, and {name[:80]} is trained on images too")
    attention, targets = "eager" if recipe.attention == "eager" else "sdpa", None
    if recipe.lora:
        model_on_meta = catalogue.model(config, device="meta", attention=attention)
        targets = adapter_targets(model_on_meta, recipe)
    loss = "model(input_ids=ids, labels=ids).loss"
    if recipe.chunked_loss:
        loss = "chunked_loss(model, ids)"
    plain_name = re.sub(r"[^\w ./:-]", "", name)  # a folder's may end a docstring
    environment = Environment(
        loader=PackageLoader(__package__),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    # A name from anybody's JSON is quoted text in the script, never code.
    environment.filters["quoted"] = partial(json.dumps, ensure_ascii=False)
    template = "train_sharded.py.j2" if recipe.ranks > 1 else "train.py.j2"
    text = environment.get_template(template).render(
        recipe=recipe,
        title=fill(f'"""Train {plain_name}: {recipe}.', 98),
        expected=f" Expected on {gpu}: {format_bytes(needed_bytes)}." if needed_bytes else "",
        packages=packages,
        model=weights_of(model, name),
        rate=rate,
        dtype=recipe.weights_dtype,
        autocast=autocast_dtype(recipe.precision),
        attention=attention,
        targets=targets,
        optimizer=techniques.OPTIMIZERS[recipe.optimizer],
        fused=", fused=True" if recipe.optimizer == "fused-adamw" else "",
        loss=loss,
        changes_logits=techniques.CHANGES_LOGITS,
        sources=_sources(recipe),
        chunk_tokens=CHUNK_TOKENS,
    )
    return _spaced(text)


def _sources(recipe: Recipe) -> str:
    """Return the source of the techniques that ``recipe`` needs, as a script has it."""
    used: list[Any] = []
    if recipe.chunked_loss:
        used += [techniques.chunked_loss, techniques.output_layer]
    if recipe.optimizer_in_backward:
        used.append(techniques.step_in_backward)
    if recipe.offload == "activations":
        used.append(techniques.activations_on_host)
    if recipe.offload == "optimizer":
        used.append(techniques.HostOptimizer)
    if recipe.offload == "weights" and recipe.ranks == 1:
        used.append(techniques.FetchedLayer)
    text = "\n\n".join(inspect.getsource(each) for each in used)
    return text.replace("InputError", "SystemExit")  # which prints its message


def _spaced(text: str) -> str:
    """Leave two empty lines around functions and classes, one between other parts."""
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = re.sub(r"\n+(?=^(?:def|class) )", "\n\n\n", text, flags=re.MULTILINE)
    text = re.sub(
        r"^((?:def|class) .*(?:\n+(?:    |\)).*)*)\n+", r"\1\n\n\n", text, flags=re.MULTILINE
    )
    return text.strip("\n") + "\n"


def weights_of(model: Any, name: str) -> str | None:
    """Return where the weights of ``model``, called ``name``, are: a hub id or a folder.

    A bare config has none, nor has a model that nobody published: None.
    """
    if not isinstance(model, str | Path):
        return None
    if name in MODELS and str(model).lower() == name.lower():
        page = _HUB_PAGE.search(MODELS[name].source)
        return page[1] if page else None
    path = Path(model).expanduser()
    if path.is_file():
        path = path.resolve().parent
    return str(path) if path.exists() else str(model)
