"""What the commands of `labkit` share: tables on the terminal, the end of a run, recipe options.

Limits: where the output is no terminal, tables are 160 characters wide.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

WIDTH_WITHOUT_TERMINAL = 160

_RECIPE_HELP = {
    "batch_size": "sequences in one forward pass",
    "seq_len": "tokens per sequence",
    "accumulate": "forward and backward passes per step",
    "ranks": "GPUs that share the model, each with its own batch",
    "lora": "train adapters of this rank",
    "precision": "fp32, amp-fp16, amp-bf16 or bf16",
    "optimizer": "adamw, fused-adamw, sgd, adafactor, adamw8bit or paged-adamw8bit",
    "attention": "eager, sdpa or flash",
    "quantize": "frozen weights as nf4, nf4-double or int8; needs --lora",
    "offload": "what lives in host memory: none, activations, optimizer or weights",
    "lora_targets": "the layers that get adapters, separated by commas",
    "optimizer_in_backward": "update each weight as soon as its gradient is there",
    "checkpointing": "recompute each layer's activations in backward",
    "chunked_loss": "compute the logits a piece of the batch at a time",
}


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


def announce(outcome: Any) -> None:
    """Print how a lesson went, beside the progress bars."""
    from tqdm import tqdm

    how = f"{outcome.seconds:.1f} s, {outcome.host_peak} of host memory"
    tqdm.write(f"{outcome.status}  {outcome.name}  ({how})")
    for problem in outcome.problems:
        tqdm.write(f"        {problem}")


def finish(course: Any) -> int:
    """Write the report of a `labkit.course.runner.Course`, print tables, return the exit code."""
    from labkit.course import outcomes, report

    found = [outcomes.stored_result(outcome, course.folder) for outcome in course.outcomes]
    rows = list(report.verdict_rows([result for result in found if result]))
    if rows:
        print_table(report.VERDICT_COLUMNS, rows)
    print_table(
        ("Lesson", "Status", "Seconds", "Host memory, peak"),
        [(o.name, o.status, f"{o.seconds:.1f}", o.host_peak) for o in course.outcomes],
    )
    print(f"Report: {report.report(course.folder, course.outcomes).resolve()}")
    if course.interrupted:
        print("Stopped by Ctrl-C. Finished lessons are kept.")
        return 130
    return 0 if course.passed else 1


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
