"""fits(): which ways of training fit a model on a GPU, looked up in a table.

    lab.fits("Llama-3.1-8B", gpu="rtx-4090", batch_size=2, seq_len=1024)

`labkit.fitting.table` says what is exact and what lies between points. The same lookup runs in the
page ``fit.html`` of the site.

Limits: NVIDIA's GPUs, and the batches of the table. The table was simulated for an A100, float16
for a T4. On Hopper and Blackwell the larger workspaces of cuBLAS are added; what else differs
between GPUs hardly changes allocated bytes, but what is reserved by up to 10 % (docs/LOG.md).
"""

import math
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from labkit.allocator.workspaces import DEFAULT_BYTES, workspace_bytes
from labkit.course.results import result_folders
from labkit.fitting.table import MORE_RESERVED, MORE_SEEN, Answer, FitTable, answer
from labkit.hardware import catalogue
from labkit.hardware.bound import least_seconds
from labkit.hardware.catalogue import Gpu
from labkit.plan.candidates import changes
from labkit.plan.recipe import Recipe
from labkit.support.files import read_file
from labkit.values import GIB, InputError, one_of, positive_int

if TYPE_CHECKING:
    from pandas import DataFrame

FILE = "fits.json.gz"
_PRECISIONS = {"fp32": "FP32", "amp-bf16": "AMP BF16", "amp-fp16": "AMP FP16", "bf16": "BF16"}
_OPTIMIZERS = {
    "adamw": "AdamW",
    "fused-adamw": "fused AdamW",
    "adamw8bit": "8-bit AdamW",
    "adafactor": "Adafactor",
}
#: It fits; it does unless more is reserved, as may be; it does only without cached blocks; it does
#: not.
VERDICTS = ("fits", "near", "tight", "no")
#: What fits and takes so many times as long as the fastest that does comes behind the others.
SLOW = 4
_SHOWN = ("reserved", "allocated", "host")
_ADAPTERS = {None: "LoRA", "nf4": "QLoRA", "nf4-double": "QLoRA, double quantization"}


class Found(NamedTuple):
    """One way at one batch on one GPU. ``verdict``: one of ``VERDICTS``. ``answer`` has whole
    bytes, with what this GPU's cuBLAS takes."""

    recipe: Recipe
    verdict: str
    answer: Answer
    seconds_per_token: float


@cache
def table() -> FitTable:
    """Return the course's own table.

    Raises:
        InputError: the file is missing or damaged.
    """
    paths = [folder / FILE for folder in result_folders() if (folder / FILE).exists()]
    if not paths:
        raise InputError(
            f"there is no {FILE} among the results: `labkit fits --rebuild` computes it"
        )
    return read_file(paths[0], FitTable.from_dict, "a table of fits")


def gpus() -> list[Gpu]:
    """Return the GPUs of the catalogue that the table speaks of."""
    return [gpu for gpu in catalogue.gpus() if gpu.compute_capability]


def more_workspace_bytes(gpu: Gpu) -> int:
    """Return what cuBLAS takes on ``gpu`` beyond the GPUs of the table, for its two threads."""
    return 2 * (workspace_bytes(gpu) - DEFAULT_BYTES)


def techniques(recipe: Recipe) -> list[str]:
    """Return what a way adds to its kind of training to take less memory."""
    added = {
        "checkpointing": recipe.checkpointing,
        "chunked loss": recipe.chunked_loss,
        "optimizer in backward": recipe.optimizer_in_backward,
        f"{recipe.offload} on the CPU": recipe.offload != "none",
        "eager attention": recipe.attention == "eager",
        f"FSDP2 over {recipe.ranks}": recipe.ranks > 1,
    }
    return [name for name, on in added.items() if on]


def name_of_way(recipe: Recipe) -> str:
    """Return how people call a way to train: ``"LoRA, AMP BF16; checkpointing"``."""
    kind = [_ADAPTERS[recipe.quantize] if recipe.lora else "All weights"]
    kind.append(_PRECISIONS[recipe.precision])
    if not recipe.lora:
        kind.append(_OPTIMIZERS[recipe.optimizer])
    return "; ".join(", ".join(words) for words in (kind, techniques(recipe)) if words)


def find(
    model: str,
    gpu: str | Gpu,
    *,
    batch_size: int = 1,
    seq_len: int = 2048,
    gpus: int = 1,
    host_memory_bytes: int | None = None,
) -> list[Found]:
    """Return every way of the table, the best first. Arguments and errors as `fits`."""
    gpu = catalogue.gpu(gpu)
    if gpu.compute_capability is None:
        raise InputError(f"the table speaks of NVIDIA's GPUs: lab.estimate(..., gpu={gpu.key!r})")
    positive_int(batch_size, "batch_size")
    positive_int(seq_len, "seq_len")
    known = table()
    entry = known.models[one_of(model, known.models, "model of the table")]
    found = []
    for recipe, rows in zip(known.recipes, entry.ways, strict=True):
        fp16 = recipe.precision == "amp-fp16"
        on_this_gpu = not fp16 if gpu.bf16_native else "bf16" not in recipe.precision
        if not rows or recipe.ranks != gpus or not on_this_gpu:
            continue
        looked_up = answer(rows, known.tokens, entry.longest, batch_size, seq_len)
        if looked_up is not None:
            if model in known.outdated:
                looked_up = looked_up._replace(exact=False, known=False)
            recipe = recipe.but(batch_size=batch_size, seq_len=seq_len)
            found.append(_judged(recipe, looked_up, gpu, host_memory_bytes or math.inf))
    fitting = [each.seconds_per_token for each in found if each.verdict in ("fits", "near")]
    slow = SLOW * min(fitting, default=math.inf)
    return sorted(found, key=lambda each: _rank(each, slow))


def _judged(recipe: Recipe, found: Answer, gpu: Gpu, host_limit_bytes: float) -> Found:
    more, limit_bytes = more_workspace_bytes(gpu), gpu.budget_bytes
    values = {name: round(value) for name, value in found.values.items()}
    values |= {name: values[name] + more for name in ("allocated", "reserved", "floor")}
    more_reserved = MORE_SEEN if found.known else MORE_RESERVED
    if values["allocated"] > limit_bytes or recipe.ranks * values["host"] > host_limit_bytes:
        verdict = "no"
    elif values["reserved"] > limit_bytes:
        verdict = "tight"
    elif values["reserved"] * (1 + more_reserved) > limit_bytes:
        verdict = "near"
    else:
        verdict = "fits"
    work = {recipe.precision: values["flops"]}
    seconds = least_seconds(gpu, work, values["moved"], values["link"], values["sent"])
    here = found._replace(values=values, least=found.least + more, most=found.most + more)
    return Found(recipe, verdict, here, seconds / (recipe.tokens * recipe.ranks))


def _rank(found: Found, slow: float) -> tuple:
    """Sort what fits first, by changes, bound and techniques, and behind it what takes ``slow``
    seconds a token or more; then what is nearest to fitting."""
    verdict, reserved_bytes = VERDICTS.index(found.verdict), found.answer.values["reserved"]
    if verdict > VERDICTS.index("near"):
        return verdict, reserved_bytes
    tenth = round(math.log(found.seconds_per_token, 1.1))  # bounds that near are equal
    way = found.recipe
    late = found.seconds_per_token >= slow
    return verdict, late, len(changes(way)), tenth, len(techniques(way)), reserved_bytes


def fits(
    model: str,
    gpu: str | Gpu,
    *,
    batch_size: int = 1,
    seq_len: int = 2048,
    gpus: int = 1,
    host_memory_bytes: int | None = None,
) -> "DataFrame":
    """Return which ways of training ``model`` fit on ``gpu``, as a table, the best first.

    Args:
        model: a model that the table has.
        gpu: a GPU of NVIDIA in the catalogue.
        batch_size, seq_len: rows, and tokens in each; of each GPU.
        gpus: 1, or how many share the model: 2, 4 or 8.
        host_memory_bytes: memory of the computer that holds all GPUs; None: not judged.

    Returns:
        A row for each way, its index: does it fit, GiB that it reserves, allocates and takes of the
        host, a lower bound of the seconds that 1,000 tokens take, what it changes, and whether this
        batch was simulated or lies between two that were: then bytes are about right, as they are
        of a model whose points wait to be computed again.

    Raises:
        InputError: an unknown model or GPU, or a batch that the table does not reach.
    """
    from pandas import DataFrame

    found = find(
        model,
        gpu,
        batch_size=batch_size,
        seq_len=seq_len,
        gpus=gpus,
        host_memory_bytes=host_memory_bytes,
    )
    if not found:
        raise InputError(
            f"the table has no {batch_size} × {seq_len} tokens for {model} on {gpus} such GPUs, or "
            "none that any GPU could hold: lab.estimate computes it"
        )
    rows = [
        {
            "way": name_of_way(each.recipe),
            "fits": each.verdict,
            **{f"{name}, GiB": round(each.answer.values[name] / GIB, 2) for name in _SHOWN},
            "1,000 tokens, s ≥": float(f"{1000 * each.seconds_per_token:.3g}"),
            "changes": "; ".join(changes(each.recipe)) or "nothing",
            "known": "simulated" if each.answer.known else "about",
        }
        for each in found
    ]
    return DataFrame(rows).set_index("way")  # which pandas does not cut
