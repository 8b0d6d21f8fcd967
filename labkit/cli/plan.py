"""``labkit estimate | advise | models | gpus``: what a training run takes, and what to train with.

The first two exit with 0 if something fits, 1 if nothing does, 2 for bad input.

Limits: what libraries print while a model is built goes to standard error.
"""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.cli.tables import add_recipe_options, print_table, recipe_fields
from labkit.values import InputError, format_bytes

_EXIT = "exit code: 0 if it fits, 1 if it does not, 2 for bad input"
_MODEL = "a model of the table, a folder with config.json, or a hub id"


def add_commands(commands: Any) -> None:
    """Add the commands to the parser's ``commands``."""
    common = argparse.ArgumentParser(add_help=False)
    text = "memory of the machine that holds the GPUs, as 64GiB: what needs more does not fit"
    common.add_argument("--host-memory", type=size, metavar="SIZE", help=text)
    common.add_argument("model", metavar="MODEL", help=_MODEL)
    common.add_argument("--json", action="store_true", help="print everything found as JSON")
    _add_estimate(commands, common)
    _add_advise(commands, common)
    models = commands.add_parser("models", help="list the models that labkit knows by name")
    models.set_defaults(action=_models)
    gpus = commands.add_parser("gpus", help="list the GPUs that labkit knows by name")
    gpus.set_defaults(action=_gpus)


def _add_estimate(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "estimate",
        help="say what training a model takes on a GPU, without the GPU",
        epilog=_EXIT,
        parents=[common],
    )
    add_recipe_options(parser)
    option = parser.add_argument
    smallest = "this machine's, else the smallest common one that can run the recipe"
    option("--gpu", metavar="NAME", help=f"a GPU of the catalogue (default: {smallest})")
    option("--recipe", metavar="FILE.json", help="start from a recipe in a file")
    option("--exact", action="store_true", help="trace every layer, even if identical")
    parser.set_defaults(action=_estimate)


def _add_advise(commands: Any, common: argparse.ArgumentParser) -> None:
    parser = commands.add_parser(
        "advise",
        help="say how to train a model on a GPU, and write the script",
        epilog=_EXIT,
        parents=[common],
    )
    option = parser.add_argument
    several = "how many of them, each with a copy of the model or sharing it (default: 1)"
    option("--gpu", required=True, metavar="NAME", help="a GPU of the catalogue")
    option("--gpus", type=int, default=1, metavar="N", help=several)
    option("--seq-len", type=int, metavar="N", help="tokens per sequence (default: 1024)")
    option("--write", metavar="FILE.py", help="write a script for the best recipe")
    only = parser.add_mutually_exclusive_group()
    for kind, trained in {"full": "every weight", "lora": "adapters"}.items():
        help = f"only recipes that train {trained}"
        only.add_argument(f"--{kind}", dest="only", action="store_const", const=kind, help=help)
    parser.set_defaults(action=_advise)


def size(text: str) -> int:
    """Return the bytes that ``64GiB`` or ``22 GB`` means."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?) ?(?:([KMGT])(I?))?B?", text.upper())
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 64GiB, not {text[:40]!r}")
    power = " KMGT".index(found[2] or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


# --- commands -------------------------------------------------------------------------------------


def _estimate(options: argparse.Namespace) -> int:
    from labkit.plan.estimate import estimate
    from labkit.plan.recipe import Recipe
    from labkit.support.files import read_file

    recipe = None
    if options.recipe is not None:
        recipe = read_file(Path(options.recipe), Recipe.from_dict, "a recipe")
    with _one_sentence(options.model):
        found = estimate(
            options.model,
            gpu=options.gpu,
            recipe=recipe,
            exact=options.exact,
            host_memory_bytes=options.host_memory,
            **recipe_fields(options),
        )
    print(_as_text(found, options))
    return 0 if found.fits else 1


def _advise(options: argparse.Namespace) -> int:
    from labkit.plan.advice import advise

    if options.write is not None and Path(options.write).exists():
        raise InputError(f"{options.write} exists: name another file for the script")
    with _one_sentence(options.model):
        advice = advise(
            options.model,
            options.gpu,
            gpus=options.gpus,
            seq_len=options.seq_len,
            only=options.only,
            host_memory_bytes=options.host_memory,
        )
    print(_as_text(advice, options))
    if options.write is not None and advice.fitting:
        print(f"Script: {advice.write(options.write)}", file=sys.stderr)
    return 0 if advice.fitting else 1


def _models(_: argparse.Namespace) -> int:
    from labkit.models.catalogue import MODELS

    rows = []
    for info in sorted(MODELS.values(), key=lambda info: info.parameters):
        text = info.config.get("text_config", info.config)
        layers = text["n_layer" if info.model_type == "gpt2" else "num_hidden_layers"]
        rows.append((info.name, f"{info.parameters / 1e9:.3g}", str(layers), info.license))
    print_table(("Model", "Parameters, 10⁹", "Layers", "Licence"), rows)
    return 0


def _gpus(_: argparse.Namespace) -> int:
    from labkit.hardware.catalogue import gpus

    rows = []
    for gpu in gpus():
        generation = ".".join(map(str, gpu.compute_capability or ("–",)))
        bf16 = "yes" if gpu.bf16_native else "no"
        rows.append((gpu.key, gpu.name, format_bytes(gpu.usable_bytes), generation, bf16))
    print_table(("--gpu", "GPU", "Memory", "Compute capability", "bf16"), rows)
    return 0


def _as_text(found: Any, options: argparse.Namespace) -> str:
    return json.dumps(found.to_dict(), ensure_ascii=False) if options.json else str(found)


@contextlib.contextmanager
def _one_sentence(model: str) -> Iterator[None]:
    """Turn what libraries raise into one sentence; print their output to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except InputError as error:
        raise InputError(" ".join(str(error).split())) from error
    except Exception as error:  # a config may make transformers raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(f"{model} cannot be simulated: {reason}") from error
