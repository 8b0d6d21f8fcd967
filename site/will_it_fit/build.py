"""Compute the table of `will_it_fit.table`: every model, every way to train it, growing batches;
and what answering takes.

    python -m will_it_fit.build [MODEL ...]

Each point is what `labkit estimate` says of one recipe where memory has no end: PyTorch's allocator
replayed over the traced step. Points are stored after each way, and what is stored or in the table
already is not computed again: the same command goes on where it was interrupted.

Limits: float16 is simulated for a T4, which has no flash kernels, everything else for an A100.
The first point of a row that takes more than any GPU has is its last.
"""

import argparse
import contextlib
import gc
import gzip
import json
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumem.allocator.replay import Replay, replay
from gpumem.allocator.workspaces import with_workspaces
from gpumem.estimation.estimate import floor_bytes, recipe_log
from gpumem.estimation.generation import Serving
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.recipes_to_try import LORA_RANK, least_bytes, link_bytes
from gpumem.estimation.search import bytes_to_host
from gpumem.estimation.serving import serve
from gpumem.estimation.weight_shapes import shapes_of
from gpumem.files import read_file, write_atomic
from gpumem.hardware import catalogue
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError, one_of, read_record
from gpumem.models.catalogue import MODELS, image_tokens
from gpumem.models.config import find_config
from gpumem.processes import ends_in_order
from gpumem.trace import Category, Phase, Trace
from gpumem.units import GIB
from will_it_fit.table import (
    FILE,
    PARTS,
    PHASES,
    TOKENS,
    USUAL_LENGTH,
    FitTable,
    ModelPoints,
    PagedPoint,
    Point,
    Row,
    ServedModel,
    ServedPoint,
    allocated_of,
    paged_servings,
    row_shape,
    servings,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: More than any GPU of the catalogue that runs CUDA has, with and without bfloat16.
MOST_BYTES, MOST_FP16_BYTES = 192 * GIB, 32 * GIB
#: Tokens in a row at most, and the lengths that have points of their own where length matters.
MOST_LENGTH = 16384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
#: Up to this share, memory and traffic are said not to depend on the length of rows.
ALIKE = 0.01
RANKS = (2, 4, 8)
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes")
#: The day of the last change to labkit that moves a number of the table, and which of that day, and
#: those of the change before it; to be set with each. `moved` says which ways the last one moves.
RULES, RULES_BEFORE = "2026-11-30, 1", "2026-11-28, 1"
#: The same of the part about answering.
SERVING_RULES = "2026-11-30, 2"
_OWN = "labkit's rules of"
WORK_FOLDER = Path("build", "fits")
_PHASE_NAMES = {
    Phase.SETUP: "setup",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "step",
    Phase.OTHER: "step",
}
#: All but the toy that lessons train.
TRAINED = [name for name, info in MODELS.items() if info.parameters > 50e6]
_FRUGAL = {"checkpointing": True, "chunked_loss": True}
#: What every kind of training is tried with.
_COMMON: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointing": True},
    _FRUGAL,
    {**_FRUGAL, "optimizer_in_backward": True},
)
#: And the kinds that most people choose from.
_MORE: tuple[dict[str, Any], ...] = (
    {"chunked_loss": True},
    {"chunked_loss": True, "offload": "activations"},
    {**_FRUGAL, "offload": "optimizer"},
    {**_FRUGAL, "offload": "weights"},
    {"attention": "eager"},
)
#: What is shared by several GPUs, as it is and with all that saves memory.
_SHARED = tuple(
    {**level, "ranks": ranks} for ranks in RANKS for level in (_COMMON[0], _FRUGAL, _MORE[3])
)
#: Where AdamW's kernel is fused: only with what saves memory on the GPUs themselves.
_FUSED_SHARED = tuple({**_FRUGAL, "ranks": ranks} for ranks in RANKS)
_LORA = {"precision": "amp-bf16", "lora": LORA_RANK}
_FP16_LORA = {"precision": "amp-fp16", "lora": LORA_RANK}
#: The kinds, each with its levels beside the common ones.
_KINDS: tuple[tuple[dict[str, Any], tuple[dict[str, Any], ...]], ...] = (
    ({"precision": "fp32"}, (_MORE[2],)),
    ({"precision": "fp32", "optimizer": "fused-adamw"}, ()),
    ({"precision": "amp-bf16"}, _MORE + _SHARED),
    ({"precision": "amp-bf16", "optimizer": "fused-adamw"}, _FUSED_SHARED),
    ({"precision": "amp-bf16", "optimizer": "adamw8bit"}, ()),
    ({"precision": "bf16"}, _MORE + _SHARED),
    ({"precision": "bf16", "optimizer": "fused-adamw"}, _FUSED_SHARED),
    ({"precision": "bf16", "optimizer": "adamw8bit"}, ()),
    ({"precision": "bf16", "optimizer": "adafactor"}, ()),
    ({"precision": "amp-fp16"}, (_MORE[2],)),
    ({"precision": "amp-fp16", "optimizer": "fused-adamw"}, ()),
    ({"precision": "amp-fp16", "optimizer": "adamw8bit"}, ()),
    (_LORA, _MORE + _SHARED),
    ({**_LORA, "quantize": "nf4"}, ()),
    ({**_LORA, "quantize": "nf4-double"}, _MORE),
    (_FP16_LORA, ()),
    ({**_FP16_LORA, "quantize": "nf4-double"}, ()),
)


def ways() -> list[Recipe]:
    """Return the recipes of the table, for one sequence of one batch."""
    found = []
    for kind, more in _KINDS:
        for level in _COMMON + more:
            # Adapters have next to no gradients and optimizer state to be rid of; and a step in
            # backward copies one weight at a time, fused or not.
            idle = level.get("optimizer_in_backward") or level.get("offload") == "optimizer"
            if idle and ("lora" in kind or kind.get("optimizer") == "fused-adamw"):
                continue
            with contextlib.suppress(InputError):  # it contradicts itself
                found.append(Recipe(**kind, **level))
    return found


def moved(way: Recipe) -> bool:
    """Return whether the last change of ``RULES`` moves the points of a way."""
    return way.quantize is not None


def simulated_gpu(recipe: Recipe) -> Gpu:
    """Return the GPU for which a recipe is simulated, with memory that does not end."""
    gpu = catalogue.gpu("t4" if recipe.precision == "amp-fp16" else "a100-80gb")
    return replace(gpu, usable_bytes=1 << 60)


def point(config: "PreTrainedConfig", recipe: Recipe) -> Point:
    """Simulate one point. Errors as for `gpumem.estimation.estimate.estimate`."""
    gpu = simulated_gpu(recipe)
    found = recipe_log(config, recipe, gpu)
    trace = with_workspaces(found.log.trace, gpu)
    played = replay(trace)
    work, parts = found.log.step_work, played.by_category
    return Point(
        **_phase_peaks(trace, played),
        reserved=played.peak_reserved_bytes,
        floor=floor_bytes(trace, found.layer_bytes),
        host=trace.peak("cpu").total_bytes,
        **{name: parts.get(Category(name), 0) for name in PARTS},
        flops=work.flops,
        moved=work.moved_bytes,
        sent=work.sent_bytes,
        link=link_bytes(recipe, shapes_of(config), bytes_to_host(trace)),
    )


def _phase_peaks(trace: Trace, played: Replay) -> dict[str, int]:
    """Return the most that was allocated in each phase; nothing happens in another one."""
    peaks = dict.fromkeys(PHASES, 0)
    for index, allocated_bytes in zip(played.indices, played.highest_bytes, strict=True):
        name = _PHASE_NAMES[trace.events[index].phase]
        peaks[name] = max(peaks[name], allocated_bytes)
    return peaks


def most_bytes(recipe: Recipe) -> int:
    """Return more than any GPU on which the page would try a recipe has."""
    return MOST_FP16_BYTES if recipe.precision == "amp-fp16" else MOST_BYTES


def way_rows(
    config: "PreTrainedConfig", way: Recipe, point_of: Callable[[Recipe], Point]
) -> tuple[Row, ...] | None:
    """Return the points of one way; None if this model cannot be trained so."""
    longest = longest_of(config)
    lengths = [each for each in LENGTHS if image_tokens(config) < each <= longest]
    try:
        if least_bytes(way, shapes_of(config), way.ranks) > most_bytes(way):
            return (Row(0, (None,) * len(TOKENS)),)
        if image_tokens(config):  # each row has one
            return tuple(_row(way, each, longest, point_of) for each in lengths)
        usual = _row(way, 0, longest, point_of)
        reached = [
            tokens
            for tokens, found in zip(TOKENS, usual.points, strict=True)
            if found and tokens <= longest and allocated_of(found) <= most_bytes(way)
        ]
        if not reached:
            return (usual,)
        # Does it matter how as many tokens as possible are divided?
        tokens = reached[-1]
        at = usual.points[TOKENS.index(tokens)]
        rows = 1 if tokens > USUAL_LENGTH else 4
        divided = point_of(way.but(batch_size=rows, seq_len=tokens // rows))
        for name in (*PHASES, "moved"):
            if not math.isclose(getattr(at, name), getattr(divided, name), rel_tol=ALIKE):
                return tuple(_row(way, each, longest, point_of) for each in lengths)
        return (usual,)
    except InputError:
        return None


def _row(way: Recipe, seq_len: int, longest: int, point_of: Callable[[Recipe], Point]) -> Row:
    """Return a row of points; the first that takes more than any GPU has is the last."""
    points: list[Point | None] = [None] * len(TOKENS)
    for index, tokens in enumerate(TOKENS):
        rows, length = row_shape(tokens, seq_len, longest)
        if not rows:
            continue
        points[index] = found = point_of(way.but(batch_size=rows, seq_len=length))
        if allocated_of(found) > most_bytes(way):
            break
    return Row(seq_len, tuple(points))


def longest_of(config: "PreTrainedConfig") -> int:
    """Return how many tokens a row may have."""
    return min(config.get_text_config().max_position_embeddings, MOST_LENGTH)


# --- answering ------------------------------------------------------------------------------------


def served_model(name: str) -> ServedModel:
    """Compute what answering with a model takes."""
    config = find_config(name)[1]
    text = config.get_text_config()
    return ServedModel(
        positions=text.max_position_embeddings,
        points=tuple(served_point(config, serving) for serving in servings()),
        paged=tuple(paged_point(config, *kind) for kind in paged_servings()),
    )


def served_point(config: "PreTrainedConfig", serving: Serving) -> ServedPoint | None:
    """Return what one batch takes where memory has no end; None if the model cannot answer so, or
    no GPU holds its weights."""
    if _too_large(config, serving):
        return None
    gpu = replace(catalogue.gpu("a100-80gb"), usable_bytes=1 << 60)
    try:
        found = serve(config, gpu=gpu, serving=serving)
    except InputError:
        return None
    return ServedPoint(
        reserved=found.peak_reserved_bytes,
        allocated=found.peak_allocated_bytes,
        weights=found.parts.get(str(Category.WEIGHTS), 0),
        cached=found.parts.get(str(Category.CACHE), 0),
        activations=found.parts.get(str(Category.ACTIVATIONS), 0),
        first=found.first_cache_bytes,
        last=found.cache_bytes,
        read=found.read_bytes,
    )


def paged_point(config: "PreTrainedConfig", gpu: str, serving: Serving) -> PagedPoint | None:
    """Return what vLLM's arithmetic needs on a kind of GPU; None as for `served_point`."""
    if _too_large(config, serving):
        return None
    try:
        found = serve(config, gpu=gpu, serving=serving, prompt_tokens=1, new_tokens=1)
    except InputError:
        return None
    return PagedPoint(
        found.weights_bytes, found.activations_bytes, found.cache_bytes_per_token, found.read_bytes
    )


def _too_large(config: "PreTrainedConfig", serving: Serving) -> bool:
    bits = {None: 16, "int8": 8, "nf4": 4}[serving.quantize]
    return shapes_of(config).parameters * bits // 8 > MOST_BYTES


# --- all of it ------------------------------------------------------------------------------------


def rebuild(
    path: Path,
    models: Sequence[str] = (),
    *,
    work: Path = WORK_FOLDER,
    processes: int = 2,
    report: Callable[[str], None] = print,
) -> FitTable:
    """Compute what is missing of the table, write it to ``path`` and return it.

    Args:
        path: the table. What is in one that is there is kept, if the same packages computed it:
            remove it, and ``work``, to compute everything again. What older rules of labkit gave is
            kept until it is computed again; where ``RULES_BEFORE`` gave it, only `moved` ways are.
        models: names of the table of models, in the order wanted; empty: all that are not toys.
        work: a folder with one file per model and the points that are done.
        processes: how many models are computed at the same time.
        report: called with a line for what is kept and for each model that is complete.

    Raises:
        InputError: an unknown model, another ending than ``.gz``, a file that cannot be read, or a
            process that was killed.
    """
    if path.suffix != ".gz":
        raise InputError(f"the table is packed: write it to {path}.gz")
    names = [one_of(name, MODELS, "model") for name in models] or [*TRAINED]
    table = read_file(path, FitTable.from_dict, "a table of fits") if path.exists() else None
    done: dict[str, ModelPoints] = {}
    served: dict[str, ServedModel] = {}
    outdated: dict[str, set[Recipe]] = {}
    if table and {**table.versions, _OWN: RULES} == _versions():
        rules, waiting = table.versions[_OWN], set(ways())
        if rules == RULES_BEFORE:
            waiting = {way for way in waiting if moved(way)}
        for name in set(table.models) & set(MODELS):
            model = table.models[name]
            known = dict(zip(table.recipes, model.ways, strict=True))
            done[name] = model._replace(ways=tuple(known.get(way, ()) for way in ways()))
        if table.serving_rules == SERVING_RULES:
            served = {name: each for name, each in table.serving.items() if name in MODELS}
        for name in done:
            outdated[name] = {table.recipes[number] for number in table.outdated.get(name, ())}
            if rules != RULES:
                outdated[name] |= waiting
    kept = {
        name: [
            () if way in outdated[name] else rows
            for way, rows in zip(ways(), model.ways, strict=True)
        ]
        for name, model in done.items()
    }
    missing = [name for name in names if () in kept.get(name, [()])]
    complete = {name for name, each in served.items() if len(each.points) == len(servings())}
    unserved = [name for name in names if name not in complete]
    report(f"{len(names) - len({*missing, *unserved})} of {len(names)} models are there already")
    pool = ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),
        initializer=gc.set_threshold,  # collecting garbage less often saves an eighth of the time
        initargs=(20_000, 20, 50),
        max_tasks_per_child=1,  # PyTorch keeps what it knows of every shape: gigabytes an hour
    )
    with pool:
        # Answering first: it takes minutes, and training hours.
        waiting = {pool.submit(served_model, n): (n, served) for n in unserved}
        waiting |= {pool.submit(model_points, n, work, kept.get(n)): (n, done) for n in missing}
        try:
            for count, future in enumerate(as_completed(waiting), 1):
                name, part = waiting[future]
                part[name] = future.result()
                if part is done:
                    outdated.pop(name, None)
                table = _table(done, outdated, served)
                text = json.dumps(asdict(table), separators=(",", ":"))
                write_atomic(path, gzip.compress(text.encode(), mtime=0))
                what = "training" if part is done else "answering"
                report(f"{name}, {what} ({count} of {len(waiting)})")
        except BrokenProcessPool as error:
            reason = "a process was killed, perhaps for lack of memory: the same command goes on"
            raise InputError(reason) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # or it begins with the next model
            for worker in active_children():  # or they go on for as long as their models take
                worker.terminate()
            raise
    return table


def _versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES} | {_OWN: RULES}


def _table(
    models: Mapping[str, Any],
    outdated: Mapping[str, Collection[Recipe]],
    served: Mapping[str, ServedModel],
) -> FitTable:
    ordered = sorted(models, key=lambda name: (MODELS[name].parameters, name))
    numbers = {
        name: [n for n, way in enumerate(ways()) if way in outdated.get(name, ())]
        for name in ordered
    }
    usual = Recipe().to_dict()
    record = {
        "ways": [{k: v for k, v in w.to_dict().items() if v != usual[k]} for w in ways()],
        "models": {name: models[name] for name in ordered},
        "versions": _versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "tokens": TOKENS,
        "outdated": {name: waiting for name, waiting in numbers.items() if waiting},
        "serving": {name: served[name] for name in sorted(served)},
        "serving_rules": SERVING_RULES,
    }
    return FitTable.from_dict(record)


@dataclass(frozen=True)
class _Work:
    """The points of a model by their recipes, and the packages that they were computed with."""

    versions: dict[str, str]
    points: dict[str, Point]


def model_points(
    name: str, work: Path, kept: Sequence[tuple[Row, ...] | None] | None = None
) -> ModelPoints:
    """Compute what neither ``kept``, rows by way, nor ``work`` has of a model, and store it there
    after each way."""
    config = find_config(name)[1]
    path = work / f"{name}.json"
    found: dict[str, Point] = {}
    if path.exists():
        what = "a model's points"
        stored = read_file(path, lambda record: read_record(_Work, record, what), what)
        found = stored.points if stored.versions == _versions() else {}

    def point_of(recipe: Recipe) -> Point:
        if str(recipe) not in found:
            found[str(recipe)] = point(config, recipe)
        return found[str(recipe)]

    rows = []
    for way, known in zip(ways(), kept or [()] * len(ways()), strict=True):
        before = len(found)
        rows.append(known if known != () else way_rows(config, way, point_of))
        if len(found) > before:
            write_atomic(path, json.dumps(asdict(_Work(_versions(), found))))
    return ModelPoints(shapes_of(config).parameters, longest_of(config), tuple(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute what the course's own table lacks; return the exit code."""
    parser = argparse.ArgumentParser(description="Compute what the table of fits lacks, in hours.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="of the table (default: all)")
    try:
        with ends_in_order():
            rebuild(FILE, parser.parse_args(arguments).models)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
