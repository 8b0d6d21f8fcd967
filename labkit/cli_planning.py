"""``labkit estimate`` and ``labkit advise``: what a training run takes, and what to train with.

Both exit with 0 if something fits, 1 if nothing does, 2 for bad input.

Limits: an experiment of the user's own is their code: it is run, and what it prints goes to
standard error.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from labkit.memory import InputError

COMMANDS = ("estimate", "advise")
_MOST_RECIPE_BYTES = 1 << 16
_EXIT = "exit code: 0 if it fits, 1 if it does not, 2 for bad input"
_MODEL = "a model of the table, a folder with config.json, or a hub id"


def add_commands(commands: Any) -> None:
    """Add both commands to the parser's ``commands``."""
    _add_estimate(commands)
    _add_advise(commands)


def _add_estimate(commands: Any) -> None:
    parser = commands.add_parser(
        "estimate", help="say what training a model takes on a GPU, without the GPU", epilog=_EXIT
    )
    parser.add_argument(
        "model", metavar="MODEL", help=f"{_MODEL}; or FILE.py:FUNCTION, an experiment of your own"
    )
    parser.add_argument("--gpu", metavar="NAME", help="a card of the catalogue (default: t4)")
    numbers = {
        "--batch-size": "sequences in one forward pass",
        "--seq-len": "tokens per sequence",
        "--accumulate": "forward and backward passes per step",
        "--ranks": "GPUs that share the model, each with its own batch",
    }
    for flag, text in numbers.items():
        parser.add_argument(flag, type=_whole, metavar="N", help=text)
    choices = {
        "--precision": "fp32, amp-fp16, amp-bf16 or bf16",
        "--optimizer": "adamw, sgd, adafactor, adamw8bit or paged-adamw8bit",
        "--attention": "eager, sdpa or flash",
        "--quantize": "frozen weights as nf4, nf4-double or int8; needs --lora",
        "--offload": "what lives in host memory: none, activations, optimizer or weights",
    }
    for flag, text in choices.items():
        parser.add_argument(flag, metavar="KIND", help=text)
    parser.add_argument("--lora", type=_whole, metavar="RANK", help="train adapters of this rank")
    parser.add_argument("--lora-targets", metavar="NAME,...", help="the layers that get adapters")
    switches = {
        "--optimizer-in-backward": "update each weight as soon as its gradient is there",
        "--checkpointing": "recompute each layer's activations in backward",
        "--chunked-loss": "compute the logits a piece of the batch at a time",
    }
    for flag, text in switches.items():
        parser.add_argument(flag, action="store_true", default=None, help=text)
    parser.add_argument("--recipe", metavar="FILE.json", help="start from a recipe in a file")
    parser.add_argument(
        "-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), dest="parameters",
        help="an argument of your own experiment; may be given several times",
    )  # fmt: skip
    parser.add_argument("--exact", action="store_true", help="trace every layer, though alike")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(action=_estimate)


def _add_advise(commands: Any) -> None:
    parser = commands.add_parser(
        "advise", help="say how to train a model on a GPU, and write the script", epilog=_EXIT
    )
    parser.add_argument("model", metavar="MODEL", help=_MODEL)
    parser.add_argument("--gpu", required=True, metavar="NAME", help="a card of the catalogue")
    parser.add_argument("--gpus", type=_whole, default=1, metavar="N",
                        help="so many of them, each with the model or sharing it "
                        "(default: 1)")  # fmt: skip
    parser.add_argument("--seq-len", type=_whole, metavar="N", help="tokens per sequence "
                        "(default: 1024)")  # fmt: skip
    kind = parser.add_mutually_exclusive_group()
    for name, text in {"full": "train every weight", "lora": "train adapters"}.items():
        kind.add_argument(f"--{name}", dest="only", action="store_const", const=name,
                          help=f"only recipes that {text}")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print everything tried as JSON")
    parser.add_argument("--write", metavar="FILE.py", help="write a script for the best recipe")
    parser.set_defaults(action=_advise)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 1, not {text[:40]!r}"
        ) from None


# --- commands -------------------------------------------------------------------------------------

_FIELDS = ("batch_size", "seq_len", "accumulate", "precision", "optimizer", "attention",
           "quantize", "offload", "lora", "lora_targets", "optimizer_in_backward",
           "checkpointing", "chunked_loss", "ranks")  # fmt: skip


def _estimate(options: argparse.Namespace) -> int:
    from labkit.estimates import argument_value, estimate
    from labkit.planning_text import estimate_text

    given = {name: getattr(options, name) for name in _FIELDS}
    fields = {name: value for name, value in given.items() if value is not None}
    if "lora_targets" in fields:
        fields["lora_targets"] = tuple(fields["lora_targets"].split(","))
    recipe = _recipe(Path(options.recipe)) if options.recipe is not None else None
    parameters = {name: argument_value(value) for name, value in options.parameters}
    with _one_sentence(options.model):
        found = estimate(options.model, gpu=options.gpu, recipe=recipe, exact=options.exact,
                         parameters=parameters, **fields)  # fmt: skip
    _print(found, estimate_text, as_json=options.json)
    return 0 if found.fits else 1


def _advise(options: argparse.Namespace) -> int:
    from labkit.advice import advise
    from labkit.planning_text import advice_text

    if options.write is not None and Path(options.write).exists():
        raise InputError(f"{options.write} exists: name another file for the script")
    with _one_sentence(options.model):
        advice = advise(options.model, options.gpu, gpus=options.gpus, seq_len=options.seq_len,
                        only=options.only)  # fmt: skip
    _print(advice, advice_text, as_json=options.json)
    if options.write is not None and advice.fitting:
        path = advice.write(options.write)
        print(f"Script: {path}", file=sys.stderr)
    return 0 if advice.fitting else 1


def _recipe(path: Path) -> Any:
    from labkit.recipes import Recipe

    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}")
    if path.stat().st_size > _MOST_RECIPE_BYTES:
        raise InputError(f"{path} has more than {_MOST_RECIPE_BYTES} bytes: that is no recipe")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error
    return Recipe.from_dict(record)


def _print(found: Any, write: Callable[[Any], str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.to_dict(), ensure_ascii=False))
    else:
        print(write(found))


@contextlib.contextmanager
def _one_sentence(model: str) -> Iterator[None]:
    """Whatever other people's code raises as one sentence; what it prints, on standard error."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except InputError as error:
        raise InputError(" ".join(str(error).split())) from error
    except (Exception, SystemExit) as error:  # a config or a file of anybody's
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"{model} cannot be simulated: {type(error).__name__}"
            + (f": {reason}" if reason else "")
        ) from error
