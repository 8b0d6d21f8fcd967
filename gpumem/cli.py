"""``labkit estimate | advise | models | gpus``: what training or answering takes, and how to train.

The first two exit with 0 if something fits, 1 if nothing does, 2 for bad input.

Limits: what libraries print while a model is built goes to standard error. Where the output is no
terminal, tables are 160 characters wide.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpumem import inputs
from gpumem.inputs import InputError
from gpumem.units import format_bytes

_EXIT = "exit code: 0 if it fits, 1 if it does not, 2 for bad input"
GPU_HELP = "one that `labkit gpus` lists, or its memory and compute capability, as 24GiB:8.9"
_MODEL = "a model of the table, a folder with config.json, or a hub id"
WIDTH_WITHOUT_TERMINAL = 160
_RECIPE_HELP = {
    "batch_size": "sequences in one forward pass",
    "seq_len": "tokens per sequence",
    "accumulate": "forward and backward passes per step",
    "ranks": "GPUs that share the model, each with its own batch",
    "lora": "train adapters of this rank",
    "precision": "fp32, amp-fp16, amp-bf16 or bf16; with --serve fp32, fp16 or bf16",
    "optimizer": "adamw, fused-adamw, sgd, adafactor, adamw8bit or paged-adamw8bit",
    "attention": "eager, sdpa or flash; with --serve eager or sdpa",
    "quantize": "frozen weights as nf4, nf4-double or int8; needs --lora or --serve",
    "offload": "what lives in host memory: none, activations, optimizer or weights",
    "lora_targets": "the layers that get adapters, separated by commas",
    "optimizer_in_backward": "update each weight as soon as its gradient is there",
    "checkpointing": "recompute each layer's activations in backward",
    "chunked_loss": "compute the logits a piece of the batch at a time",
}

_SERVING_COUNTS = ("users", "prompt_tokens", "new_tokens")
_SERVING_OPTIONS = {
    "--users": ("users", "with --serve: conversations at the same time (default: 1)"),
    "--prompt": ("prompt_tokens", "with --serve: tokens of each prompt (default: 2048)"),
    "--new": ("new_tokens", "with --serve: tokens of each answer (default: 512)"),
    "--cache": ("cache", "with --serve: dynamic (default), static or paged, vLLM's"),
    "--kv-dtype": ("kv_dtype", "with --serve: fp8, of the cache's numbers (default: the model's)"),
    "--padded": ("padded", "with --serve: prompts of different lengths, padded to the longest"),
}
#: Fields that a recipe and `Serving` share.
_SHARED = ("precision", "quantize", "attention")


def add_commands(commands: Any) -> None:
    """Add the commands to the parser's ``commands``."""
    common = argparse.ArgumentParser(add_help=False)
    text = "memory of the machine that holds the GPUs, as 64GiB: what needs more does not fit"
    common.add_argument("--host-memory", type=size, metavar="SIZE", help=text)
    text = "the PyTorch that will train, as 2.10 (default: the installed one)"
    common.add_argument("--torch", metavar="RELEASE", help=text)
    common.add_argument("model", metavar="MODEL", help=_MODEL)
    common.add_argument("--json", action="store_true", help="print everything found as JSON")
    planning = {"epilog": _EXIT, "parents": [common]}

    text = "say what training a model, or answering with it, takes on a GPU, without the GPU"
    estimate = commands.add_parser("estimate", help=text, **planning)
    estimate.set_defaults(action=_estimate)
    add_recipe_options(estimate)
    option = estimate.add_argument
    smallest = "this machine's, else the smallest common one that can run the recipe"
    option("--gpu", metavar="NAME", help=f"{GPU_HELP} (default: {smallest})")
    option("--recipe", metavar="FILE.json", help="start from a recipe in a file")
    option("--exact", action="store_true", help="trace every layer, even if identical")
    _add_serving_options(estimate)

    text = "say how to train a model on a GPU, and write the script; or how to answer with it"
    advise = commands.add_parser("advise", help=text, **planning)
    advise.set_defaults(action=_advise)
    option = advise.add_argument
    several = "how many of them, each with a copy of the model or sharing it (default: 1)"
    option("--gpu", required=True, metavar="NAME", help=GPU_HELP)
    option("--gpus", type=int, default=1, metavar="N", help=several)
    option("--seq-len", type=int, metavar="N", help="tokens per sequence (default: 1024)")
    option("--write", metavar="FILE.py", help="write a script for the best recipe")
    only = advise.add_mutually_exclusive_group()
    for kind, trained in {"full": "every weight", "lora": "adapters"}.items():
        help = f"only recipes that train {trained}"
        only.add_argument(f"--{kind}", dest="only", action="store_const", const=kind, help=help)
    _add_serving_options(advise)
    for name in _SHARED:
        help = "with --serve: as `labkit estimate` takes it"
        option(f"--{name}", default=argparse.SUPPRESS, metavar="KIND", help=help)

    models = commands.add_parser("models", help="list the models that labkit knows by name")
    models.set_defaults(action=_models)
    gpus = commands.add_parser("gpus", help="list the GPUs that labkit knows by name")
    gpus.set_defaults(action=_gpus)


def _add_serving_options(parser: argparse.ArgumentParser) -> None:
    help = "answering, not training: the options below"
    parser.add_argument("--serve", action="store_true", help=help)
    for flag, (field, help) in _SERVING_OPTIONS.items():
        kind: dict[str, Any] = {"metavar": "KIND"}
        if field in _SERVING_COUNTS:
            kind = {"metavar": "N", "type": int}
        elif field == "padded":
            kind = {"action": "store_true"}
        parser.add_argument(flag, dest=field, default=argparse.SUPPRESS, help=help, **kind)


def size(text: str) -> int:
    """Return the bytes that an option's ``64GiB`` or ``22 GB`` means."""
    try:
        return inputs.size(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# --- commands -------------------------------------------------------------------------------------


def _estimate(options: argparse.Namespace) -> int:
    if (serving := _serving_fields(options)) is not None:
        return _serve(options, serving)
    from gpumem.estimation.estimate import estimate
    from gpumem.estimation.recipe import Recipe
    from gpumem.files import read_file

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
            torch=options.torch,
            **recipe_fields(options),
        )
    print(_as_text(found, options))
    return 0 if found.fits else 1


def _serving_fields(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the fields of `Serving` that were given; None if it is training that was asked for."""
    given = {
        name: value
        for name, value in vars(options).items()
        if value is not None and value is not False
    }
    flags = {field: flag for flag, (field, _) in _SERVING_OPTIONS.items()}
    if not options.serve:
        if options.action is _advise:  # a recipe's, too, have no place there
            flags |= {name: f"--{name}" for name in _SHARED}
        if names := [name for name in flags if name in given]:
            raise InputError(f"{flags[names[0]]} belongs to answering: say --serve too")
        return None
    training = [name for name in given if name in _RECIPE_HELP and name not in _SHARED]
    training += [name for name in ("recipe", "exact", "host_memory", "write") if name in given]
    training += [given["only"]] if "only" in given else []
    if training:
        raise InputError(f"--{training[0].replace('_', '-')} is for training: leave out --serve")
    return {name: value for name, value in given.items() if name in flags or name in _SHARED}


def _serve(options: argparse.Namespace, fields: dict[str, Any]) -> int:
    from gpumem.estimation.serving import serve

    with _one_sentence(options.model):
        found = serve(options.model, gpu=options.gpu, torch=options.torch, **fields)
        text = str(found)
        if options.json:
            limits = ("most_users", "longest_prompt_tokens")
            more = {name: getattr(found, name)() for name in limits}
            text = json.dumps(found.to_dict() | more, ensure_ascii=False)
    print(text)
    return 0 if found.fits else 1


def _advise(options: argparse.Namespace) -> int:
    if (serving := _serving_fields(options)) is not None:
        from gpumem.estimation.serving_advice import advise_serving

        asked = {"gpus": options.gpus, "torch": options.torch, **serving}
        with _one_sentence(options.model):
            advice = advise_serving(options.model, options.gpu, **asked)
        print(_as_text(advice, options))
        return 0 if advice.fits or advice.options else 1
    from gpumem.estimation.advice import advise

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
            torch=options.torch,
        )
    print(_as_text(advice, options))
    if options.write is not None and advice.fitting:
        print(f"Script: {advice.write(options.write)}", file=sys.stderr)
    return 0 if advice.fitting else 1


def _models(_: argparse.Namespace) -> int:
    from gpumem.models.catalogue import MODELS

    rows = []
    for info in sorted(MODELS.values(), key=lambda info: info.parameters):
        text = info.config.get("text_config", info.config)
        layers = text["n_layer" if info.model_type == "gpt2" else "num_hidden_layers"]
        rows.append((info.name, f"{info.parameters / 1e9:.3g}", str(layers), info.license))
    print_table(("Model", "Parameters, 10⁹", "Layers", "Licence"), rows)
    return 0


def _gpus(_: argparse.Namespace) -> int:
    from gpumem.hardware.catalogue import gpus

    rows = []
    for gpu in gpus():
        generation = ".".join(map(str, gpu.compute_capability or ("–",)))
        bf16 = "yes" if gpu.bf16_native else "no"
        memory = (
            format_bytes(gpu.usable_bytes),
            f"{format_bytes(gpu.context_bytes)}, {gpu.context_known}",
        )
        rows.append((gpu.key, gpu.name, *memory, generation, bf16))
    print_table(("--gpu", "GPU", "Memory", "CUDA context", "Compute capability", "bf16"), rows)
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
        if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
            raise  # the command says which extra brings it
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise InputError(f"{model} cannot be simulated: {reason}") from error


# --- for other commands, too ----------------------------------------------------------------------


def add_recipe_options(
    parser: argparse.ArgumentParser, names: Iterable[str] = _RECIPE_HELP
) -> None:
    """Add options for fields of a recipe; one that is not given leaves the recipe as it is."""
    for name in names:
        options: dict[str, Any] = {"metavar": "KIND"}
        if name in ("batch_size", "seq_len", "accumulate", "ranks", "lora"):
            options = {"metavar": "N", "type": int}
        elif name in ("optimizer_in_backward", "checkpointing", "chunked_loss"):
            options = {"action": "store_true"}
        elif name == "lora_targets":
            options["type"] = lambda text: tuple(text.split(","))
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, default=argparse.SUPPRESS, help=_RECIPE_HELP[name], **options)


def recipe_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return those of ``options`` that are fields of a recipe."""
    return {name: value for name, value in vars(options).items() if name in _RECIPE_HELP}


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table as wide as the terminal at most; long texts take more lines."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table

    columns = [Column(name, overflow="fold") for name in header]
    table = Table(*columns, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
    Console(width=width, markup=False, highlight=False).print("", table, "", sep="\n")
