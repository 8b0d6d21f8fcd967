"""estimate(): what a training recipe takes on a GPU, without the GPU.

    lab.estimate("Llama-3.1-8B", gpu="rtx-4090", precision="bf16", lora=16, checkpointing=True)

The recipe's training step runs on fake tensors, and PyTorch's allocator is replayed over it. A
model whose layers repeat is traced with few of them and extended to its depth (`repeated_layers`).

Limits: those of `simulate`. The floor is a lower bound, not a promise that a schedule reaches it.
Host memory is what tensors take there: Python, PyTorch and CUDA take a few GiB beside them, and so
may weights while they are read from files.
"""

import copy
import re
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gpumem.estimation.model_building import possible_for
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.training import training
from gpumem.estimation.weight_shapes import shapes_of
from gpumem.fake_cuda.depth_extension import SHALLOW, SHARDED_DEPTHS, depths_of, extended_log
from gpumem.fake_cuda.process_group import fake_ranks
from gpumem.fake_cuda.step_extension import continued
from gpumem.hardware import catalogue, this_machine
from gpumem.hardware.catalogue import DEFAULT_GPU, Gpu
from gpumem.inputs import InputError, positive_int
from gpumem.models.catalogue import tower_depth
from gpumem.models.config import find_config
from gpumem.runs import Run
from gpumem.simulation import Log, run_of, simulated_log
from gpumem.torch_release import following, torch_release
from gpumem.trace import Category, Trace
from gpumem.units import as_printed, format_bytes

#: Accumulated batches that are traced where their number is odd; one more where it is even, since
#: two batches may take turns with the blocks of the largest tensors.
ACCUMULATED = 3
#: Assumed where no GPU is named: the first that can run the recipe. The L4 is what hosted
#: notebooks offer next after the T4, and it computes in bfloat16.
COMMON_GPUS = (DEFAULT_GPU, "l4")
MOST_HOST_BYTES = 1 << 50
#: Of the capacity: this near to it, other releases' rules are tried as well. Where rules differ,
#: the older one reserved up to 7 % more (docs/LOG.md, 2026-11-29).
NEAR = 0.1
#: Of what is reserved: kept outputs were seen to add up to 25 % (docs/LOG.md, 2026-11-30).
MOST_KEPT = 0.5
#: One of the releases that share rules for what is reserved, and what to call them.
RELEASES = {
    "2.8": "2.8 and older",
    "2.11": "2.9 to 2.11",
    "2.12": "2.12",
    "2.13": "2.13 and 2.14",
    "2.15": "2.15",
}
_BAR = 40  # characters


@dataclass(frozen=True)
class Estimate:
    """What one recipe takes on one GPU.

    Attributes:
        model, gpu, recipe: what was asked for.
        run: the simulated run, with its trace, its work and its host memory.
        floor_bytes: what no schedule of this recipe can avoid (see `floor_bytes`).
        exact: False if identical layers, or accumulated batches, were traced once and repeated.
        assumed: why this GPU was taken, in a sentence; None if it was named.
        host_limit_bytes: memory of the machine that holds all GPUs; None: not judged.
        torch: the release of PyTorch whose rules it follows, as "2.13".
        otherwise: releases (keys of ``RELEASES``) whose allocator gives another verdict, with the
            bytes that it reserves. Looked for within ``NEAR`` of the capacity.
        kept_outputs_bytes: what is reserved by a plain loop that keeps the model's outputs until
            the next ones are there, and its key-value cache: logits through backward and the next
            forward pass, and each 8-bit layer's input. None where that fits, too, or this does not.
    """

    model: str
    gpu: Gpu
    recipe: Recipe
    run: Run = field(repr=False)
    floor_bytes: int
    exact: bool
    assumed: str | None = None
    host_limit_bytes: int | None = None
    torch: str = ""
    otherwise: Mapping[str, int] = field(default_factory=dict)
    kept_outputs_bytes: int | None = None
    seconds_to_estimate: float = field(default=0.0, compare=False)

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes in blocks that tensors and workspaces use."""
        return self.run.peak_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes that PyTorch's allocator takes: this must fit."""
        return self.run.reserved_bytes

    @property
    def capacity_bytes(self) -> int:
        """What the GPU leaves the allocator, the CUDA context set aside."""
        return self.run.capacity_bytes

    @property
    def by_category(self) -> Mapping[str, int]:
        """What the allocated peak is made of; sums to it."""
        return self.run.by_category

    @property
    def host_short_bytes(self) -> int:
        """What the host has too little for all GPUs; 0 where its size was not given."""
        if self.host_limit_bytes is None:
            return 0
        return max(0, self.recipe.ranks * self.run.host_bytes - self.host_limit_bytes)

    @property
    def fits(self) -> bool:
        """Whether the GPU, and the host if its size was given, have the memory."""
        return self.run.fits and not self.host_short_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy, without the trace."""
        run = self.run
        return {
            "model": self.model,
            "gpu": self.gpu.key,
            "gpu_assumed": self.assumed,
            "torch": self.torch,
            "otherwise": dict(self.otherwise),
            "kept_outputs_bytes": self.kept_outputs_bytes,
            "recipe": self.recipe.to_dict(),
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "floor_bytes": self.floor_bytes,
            "by_category": {str(key): value for key, value in self.by_category.items()},
            "host_bytes": run.host_bytes,
            "host_limit_bytes": self.host_limit_bytes,
            "context_bytes": self.gpu.context_bytes,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            "failure": str(run.oom) if run.oom else None,
            "flops": run.flops,
            "moved_bytes": run.moved_bytes,
            "sent_bytes": run.sent_bytes,
            "exact": self.exact,
            "seconds_to_estimate": round(self.seconds_to_estimate, 3),
        }

    _repr_pretty_ = as_printed

    def __str__(self) -> str:
        """Write the verdict first, then what it rests on."""
        run = self.run
        lines = [f"{self.model} on {self.gpu.name}: {self._verdict()}"]
        lines += [f"  {line}" for line in (self.recipe, self.assumed, run.oom) if line]
        host = "in the computer's own memory"
        if self.recipe.ranks > 1:
            host += ", for each GPU"
        if self.host_limit_bytes:
            host += f", which has {format_bytes(self.host_limit_bytes)}"
        floor = ("floor", self.floor_bytes, "no schedule of this recipe gets below")
        lines += ["", *memory_lines(self, floor, ("host", run.host_bytes, host))]
        parts = {str(each): self.by_category.get(str(each), 0) for each in Category}
        lines += ["", "  At the allocated peak:", *part_lines(parts), ""]
        flops, moved = f"{run.flops / 1e12:.4g} TFLOP", f"{run.moved_bytes / 1e9:.4g} GB"
        lines.append(f"  A step computes {flops} and moves {moved} in the GPU's memory.")
        if run.sent_bytes:
            lines.append(f"  Each GPU sends {run.sent_bytes / 1e9:.4g} GB a step to the others.")
        if self.kept_outputs_bytes:
            kept = format_bytes(self.kept_outputs_bytes)
            lines += [
                "  This is for a loop that keeps neither outputs nor loss, such as Trainer's.",
                f"  A plain loop with `outputs = model(...)` keeps them, and reserves {kept}.",
                "  Write `loss = model(...).loss`, end each step with `del loss`, and set",
                "  `model.config.use_cache = False`.",
            ]
        elif self.recipe.quantize == "int8":
            lines += [
                "  Trainer drops the loss after backward. A loop of your own must, too, by",
                "  `loss = loss.detach()`: else bitsandbytes keeps each 8-bit layer's input, which",
                "  takes more than this.",
            ]
        how = "every layer was traced"
        if not self.exact:
            how = "identical layers were traced once and repeated"
        lines.append(f"  Simulated in {self.seconds_to_estimate:.1f} s: {how}.")
        lines.append(f"  The allocator's rules are those of PyTorch {self.torch}.")
        for release, nbytes in self.otherwise.items():
            fits = "does not fit" if self.run.fits else "fits"
            lines.append(
                f"  With PyTorch {RELEASES[release]} it reserves {format_bytes(nbytes)} and {fits}."
            )
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.host_short_bytes and self.run.fits:
            too_much = format_bytes(self.host_short_bytes)
            return f"does not fit the host's memory, {too_much} too much"
        if self.kept_outputs_bytes and self.fits:
            return f"{verdict(self)}, but only in a loop that keeps no outputs"
        return verdict(self)


# --- as text, for answering, too ------------------------------------------------------------------


def verdict(found: Any) -> str:
    """Say whether what was estimated fits the GPU, and by how much."""
    spare_bytes = found.capacity_bytes - found.peak_reserved_bytes
    if found.fits:
        return f"fits, with {format_bytes(spare_bytes)} to spare"
    if spare_bytes < 0:
        return f"does not fit, {format_bytes(-spare_bytes)} too much"
    return "does not fit"  # a cached block is too small to serve a request


def memory_lines(found: Any, *more: tuple[str, int, str]) -> list[str]:
    """Return lines with what an estimate takes of its GPU, and ``more`` names, bytes and texts."""
    known = found.gpu.context_known
    rows = [
        ("reserved", found.peak_reserved_bytes, "by PyTorch's allocator: this must fit"),
        ("allocated", found.peak_allocated_bytes, "of it, in blocks that tensors use"),
        ("capacity", found.capacity_bytes, "of the GPU, the CUDA context set aside"),
        ("context", found.gpu.context_bytes, f"for CUDA itself ({known}), beside the allocator"),
        *more,
    ]
    return [f"  {name:<13}{format_bytes(nbytes):>9}  {text}" for name, nbytes, text in rows]


def part_lines(parts: Mapping[str, int]) -> list[str]:
    """Return a line with a bar for each of ``parts`` that has bytes."""
    total = sum(parts.values())
    bars = {
        name: "█" * round(_BAR * nbytes / total) or "▏" for name, nbytes in parts.items() if nbytes
    }
    return [f"  {name:<13}{format_bytes(parts[name]):>9}  {bar}" for name, bar in bars.items()]


def estimate(
    model: Any,
    *,
    gpu: str | Gpu | None = None,
    recipe: Recipe | None = None,
    exact: bool = False,
    host_memory_bytes: int | None = None,
    torch: str | None = None,
    loops: bool = True,
    **fields: Any,
) -> Estimate:
    """Return what training ``model`` takes on ``gpu``.

    Args:
        model: a model of the table, a folder with a ``config.json``, a hub id when online, a
            transformers config. For a step of your own there is `simulate`.
        gpu: a name from the catalogue; by default the pretended GPU, else this machine's, else the
            first of ``COMMON_GPUS`` that can run the recipe.
        recipe: how it is trained; by default plain fp32 with AdamW.
        exact: trace every layer, even if they are identical.
        host_memory_bytes: memory of the machine that holds all GPUs, to be judged too.
        torch: the release of PyTorch that will train, as "2.10"; by default the installed one. See
            `gpumem.torch_release` for what it changes.
        loops: whether to see, too, if a plain loop that keeps its outputs still fits.
        **fields: fields of the recipe to change, ``precision="bf16"``.

    Raises:
        InputError: unknown model, GPU, field or release, a recipe that contradicts itself, or one
            that the GPU cannot run.
    """
    started = time.perf_counter()
    if host_memory_bytes is not None:
        positive_int(host_memory_bytes, "host_memory_bytes", most=MOST_HOST_BYTES)
    recipe = (recipe or Recipe()).but(**fields)
    assumed = None
    if gpu is None:
        gpu, assumed = assumed_gpu(recipe)
    gpu = catalogue.gpu(gpu)
    recipe.check(gpu)
    name, config = find_config(model)
    recipe = possible_for(config, recipe)
    with following(torch):
        found = recipe_log(config, recipe, gpu, exact=exact)
        run = run_of(found.log, gpu, name=name)
        followed = torch_release()
        kept_outputs_bytes = _of_kept_outputs(config, recipe, gpu, run) if loops else None
    return Estimate(
        model=name,
        gpu=gpu,
        recipe=recipe,
        run=run,
        floor_bytes=floor_bytes(run.trace, found.layer_bytes, accumulated=recipe.accumulate > 1),
        exact=found.exact,
        assumed=assumed,
        host_limit_bytes=host_memory_bytes,
        torch=followed,
        otherwise=other_verdicts(found.log, gpu, run),
        kept_outputs_bytes=kept_outputs_bytes,
        seconds_to_estimate=time.perf_counter() - started,
    )


def other_verdicts(log: Log, gpu: Gpu, run: Run) -> dict[str, int]:
    """Return what is reserved under the rules of releases that give another verdict than ``run``,
    by their keys in ``RELEASES``."""
    found: dict[str, int] = {}
    if abs(run.capacity_bytes - run.reserved_bytes) > NEAR * run.capacity_bytes:
        return found
    for release in RELEASES:
        with following(release):
            other = run_of(log, gpu, name=run.name)
        if other.fits != run.fits:
            found[release] = other.reserved_bytes
    return found


def _of_kept_outputs(config: Any, recipe: Recipe, gpu: Gpu, run: Run) -> int | None:
    """Return ``Estimate.kept_outputs_bytes``."""
    if not run.fits or (1 + MOST_KEPT) * run.reserved_bytes < run.capacity_bytes:
        return None
    kept = run_of(recipe_log(config, recipe, gpu, keeps_outputs=True).log, gpu, name=run.name)
    return None if kept.fits else kept.reserved_bytes


def assumed_gpu(recipe: Recipe) -> tuple[Gpu, str]:
    """Return the GPU for ``recipe`` where none is named, and why.

    An `InputError` says that none of ``COMMON_GPUS`` can run it.
    """
    if pretended := this_machine.pretended():
        return pretended, f"No GPU was named: {pretended.name} is pretended."
    if this_machine.machine().can_measure:
        here = this_machine.this_gpu()
        return here, f"No GPU was named: this machine has an {here.name}."
    for gpu in map(catalogue.gpu, COMMON_GPUS):
        with suppress(InputError):
            recipe.check(gpu)
            why = f"the {gpu.name} is the smallest common one that can run this"
            return gpu, f"No GPU was named: {why}."
    raise InputError(f"say which GPU: neither {' nor '.join(COMMON_GPUS)} can run this recipe")


# --- the trace of a recipe ------------------------------------------------------------------------


class RecipeLog(NamedTuple):
    """A recipe's log on a model, its `one_layer_bytes`, and whether every layer was traced."""

    log: Log
    layer_bytes: int
    exact: bool


def recipe_log(
    config: Any, recipe: Recipe, gpu: Gpu, *, exact: bool = False, keeps_outputs: bool = False
) -> RecipeLog:
    """Return the log of two optimizer steps, of three where GPUs share a model. ``keeps_outputs``
    as for `training`. Errors as for `estimate`.

    From the second accumulated batch on all are identical: unless the log is to be ``exact``, three
    or four stand for all of them, and the work of the others is added.
    """
    if recipe.accumulate > ACCUMULATED and not exact:
        fewer, found = (
            recipe_log(config, recipe.but(accumulate=count), gpu, keeps_outputs=keeps_outputs)
            for count in (ACCUMULATED - 1, ACCUMULATED)
        )
        one_batch = found.log.step_work - fewer.log.step_work
        step_work = found.log.step_work + one_batch * (recipe.accumulate - ACCUMULATED)
        log = replace(found.log, parameters={}, step_work=step_work)
        return RecipeLog(log, found.layer_bytes, exact=False)
    with fake_ranks(recipe.ranks, 0, as_cuda=True) if recipe.ranks > 1 else nullcontext():

        def log_of(config: Any, layers: int | None) -> Log:
            experiment = training(config, recipe, keeps_outputs=keeps_outputs)
            return simulated_log(experiment, gpu=gpu, layers=layers)

        repeated = None if exact else repeated_layers(config, log_of, ranks=recipe.ranks)
        log = repeated[0] if repeated else log_of(config, None)
    layer_trace = repeated[1] if repeated else log.trace
    if recipe.ranks > 1:
        # Streams' blocks may only find their places in the second step, and grow in the third.
        log = replace(log, trace=continued({1: log.trace}, (1, 1, 1)))
        layer_trace = continued({1: layer_trace}, (1, 1, 1))
    return RecipeLog(log, one_layer_bytes(layer_trace), exact=repeated is None)


LogOf = Callable[[Any, int | None], Log]


def repeated_layers(config: Any, log_of: LogOf, *, ranks: int = 1) -> tuple[Log, Trace] | None:
    """Return the log extended from few of the decoder's layers, and the trace of the deeper few.

    ``log_of(config, layers)`` traces the model of a config with that many layers in its decoder.
    None where the layers do not repeat.
    """
    layers, period = config.get_text_config().num_hidden_layers, shapes_of(config).period
    if not period:
        return None
    # Some gradients are summed in the first layer alone, which then shows from the third layer on.
    depths_to_try = SHARDED_DEPTHS[:1] if ranks > 1 else (SHALLOW, SHALLOW + 1)
    traced: dict[int, Trace] = {}

    def log_with_layers(count: int) -> Log:
        log, traced[count] = _repeated_tower(config, log_of, count, depths_to_try[0] + 1)
        return log

    for fewest in depths_to_try:
        # What is computed once for each kind of layer needs one of each.
        depths = depths_of(layers, max(fewest, period), period)
        extended = extended_log(log_with_layers, layers, depths=depths, check=False)
        if extended is not None:
            return replace(extended.log, parameters={}), traced[depths[1]]
    return None


def _repeated_tower(config: Any, log_of: LogOf, layers: int, fewest: int) -> tuple[Log, Trace]:
    """Return the log with ``layers`` layers in the decoder, and what was traced for it.

    A vision tower's log is extended from ``fewest`` of its layers and one more.
    """

    def log_with_tower(depth: int) -> Log:
        other = copy.deepcopy(config)
        other.vision_config.num_hidden_layers = depth
        return log_of(other, layers)

    depth = tower_depth(config)
    # The last layer's result may not be used, as LLaVA's: one layer more shows the others.
    depths = depths_of(depth, fewest, period=1)
    tower = extended_log(log_with_tower, depth, depths=depths, check=False)
    if tower is not None:
        return tower.log, tower.deeper.trace
    log = log_of(config, layers)
    return log, log.trace


# --- the floor ------------------------------------------------------------------------------------

_LASTING = (Category.WEIGHTS, Category.BUFFERS, Category.OPTIMIZER, Category.UNATTRIBUTED)
_LAYER = re.compile(r"(.*?\.\d+)(\.|$)")


def floor_bytes(trace: Trace, layer_bytes: int, *, accumulated: bool = False) -> int:
    """Return the bytes that no schedule of the traced recipe can avoid.

    What lasts beyond the last step (weights, buffers, optimizer state, workspaces), the largest
    gradient (all of them where they are ``accumulated``), and ``layer_bytes``.
    """
    lasting = sum(s.nbytes for s in trace.live_at(len(trace.events) - 1) if s.category in _LASTING)
    here = [s for s in trace.storages if s.device == trace.device]
    gradients = [s.nbytes for s in here if s.category is Category.GRADIENTS]
    if accumulated:
        gradients = trace.timeline().bytes_by_category.get(Category.GRADIENTS, ())
    return lasting + max(gradients, default=0) + layer_bytes


def one_layer_bytes(trace: Trace) -> int:
    """Return the most that one layer saves for backward in one pass, with weights fetched for it.

    A layer is what a number in the module path names, as in ``model.layers.3``; where there is
    none, every module is one.
    """
    freed = {event.storage for event in trace.events if event.change_bytes < 0}
    held: set[int] = set()  # by the layer that runs
    passing, layer, most = 0, "", 0
    for index, storage, change_bytes in trace.changes():
        number = trace.events[index].storage
        if number not in freed:
            continue  # what is never freed lasts
        found = _LAYER.match(storage.module)
        owner = found[1] if found else storage.module
        if change_bytes > 0:
            if owner not in ("", layer) or not layer:  # recomputed layers are not called by name
                held, passing, layer = set(), 0, owner
            if storage.category in (Category.ACTIVATIONS, Category.WEIGHTS):
                held.add(number)
        if number in held:  # a chunk of a loss is gone before the next one
            passing += change_bytes
            most = max(most, passing)
    return most
