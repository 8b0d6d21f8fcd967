"""estimate(): what a training recipe takes on a GPU, without the GPU.

    lab.estimate("Llama-3.1-8B", gpu="rtx-4090", precision="bf16", lora=16, checkpointing=True)

The recipe's own training step runs on fake tensors, and PyTorch's allocator is replayed over it.
A model of alike layers is traced with one and with two of them and extended to its depth
(`labkit.depth`), which gives the same log as tracing all of it; ``exact`` does trace all of it.

Limits: those of `simulate`. The floor is a bound from below, not a promise that a schedule
reaches it.
"""

import ast
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from labkit import hardware
from labkit.catalogue import Gpu
from labkit.depth import DEEPER, SHALLOW, SHARDED_DEPTHS, extend, repeats
from labkit.experiment import name_of
from labkit.fake_ranks import fake_ranks
from labkit.memory import Category, InputError, Run, Trace
from labkit.model_source import find_config
from labkit.recipes import Recipe
from labkit.simulate import Log, run_of, simulated_log
from labkit.worlds import DEFAULT_GPU

#: Accumulated batches that are traced.
ACCUMULATED = 3


@dataclass(frozen=True)
class Estimate:
    """What one recipe, or one experiment of the user's own, takes on one GPU.

    Attributes:
        model: what was asked for.
        gpu: the card's name in the catalogue.
        recipe: None for an experiment of the user's own.
        parameters: the arguments of such an experiment.
        peak_allocated_bytes: most bytes in blocks that tensors and workspaces use.
        peak_reserved_bytes: most bytes that PyTorch's allocator holds; what must fit.
        floor_bytes: what no schedule of this recipe can avoid (see `floor_bytes`).
        by_category: what the allocated peak is made of; sums to it.
        host_bytes: most bytes in host memory.
        context_bytes: what CUDA takes beside the allocator.
        capacity_bytes: what the card leaves the allocator, the context set aside.
        fits: whether the reserved bytes fit.
        failure: the first request that fails, in a sentence; None if all fit.
        flops, moved_bytes: of one optimizer step.
        sent_bytes: what one step of one GPU sends to the others that share the model.
        exact: False if identical layers, or accumulated batches, were traced once and repeated.
        seconds_to_estimate: how long this took.
        run: the simulated run, with its trace.
    """

    model: str
    gpu: str
    recipe: Recipe | None
    parameters: Mapping[str, Any]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    floor_bytes: int
    by_category: Mapping[str, int]
    host_bytes: int
    context_bytes: int
    capacity_bytes: int
    fits: bool
    failure: str | None
    flops: int | None
    moved_bytes: int | None
    sent_bytes: int
    exact: bool
    seconds_to_estimate: float
    run: Run = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy, without the run."""
        plain = {f: getattr(self, f) for f in self.__dataclass_fields__ if f != "run"}
        plain["recipe"] = self.recipe.to_dict() if self.recipe else None
        plain["parameters"] = dict(self.parameters)
        plain["by_category"] = {str(key): value for key, value in self.by_category.items()}
        plain["seconds_to_estimate"] = round(self.seconds_to_estimate, 3)
        return plain


def estimate(
    model: Any,
    *,
    gpu: str | Gpu | None = None,
    recipe: Recipe | None = None,
    exact: bool = False,
    parameters: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Estimate:
    """What training ``model`` takes on ``gpu``.

    Args:
        model: a model of the table, a folder with a ``config.json``, a hub id when online, a
            transformers config; or an experiment of your own: the function, or
            ``"FILE.py:FUNCTION"``, whose file is then run.
        gpu: a name from the catalogue; by default a T4.
        recipe: how it is trained; by default plain fp32 with AdamW.
        exact: trace every layer, also where they are alike.
        parameters: arguments of an experiment of your own.
        **fields: fields of the recipe to change, ``precision="bf16"``.

    Raises:
        InputError: unknown model, GPU or field, a recipe that contradicts itself, or one that the
            card cannot run.
    """
    started = time.perf_counter()
    card = hardware.gpu(gpu or DEFAULT_GPU)
    experiment = _own_experiment(model)
    if experiment is not None:
        if recipe is not None or fields:
            name = "recipe" if recipe is not None else next(iter(fields))
            raise InputError(
                f"{name} is for models by name: your own experiment takes its own arguments "
                "(parameters={...}, on the command line -p NAME VALUE)"
            )
        name, whole = name_of(experiment), True
        log = simulated_log(experiment, card=card, **(parameters or {}))
        layer_bytes = one_layer_bytes(log.trace)
    else:
        if parameters:
            raise InputError("parameters are for an experiment of your own: name the recipe's "
                             f"fields instead of {next(iter(parameters))!r}")  # fmt: skip
        recipe = (recipe or Recipe()).but(**fields)
        recipe.check(card)
        name, config = find_config(model)
        log, layer_bytes, whole = recipe_log(config, recipe, card, exact=exact)
    run = run_of(log, card, name=name)
    return Estimate(
        model=name,
        gpu=card.key,
        recipe=recipe,
        parameters={} if recipe else log.parameters,
        peak_allocated_bytes=run.peak_bytes,
        peak_reserved_bytes=run.reserved_bytes,
        floor_bytes=floor_bytes(
            run.trace, layer_bytes, accumulated=recipe is not None and recipe.accumulate > 1
        ),
        by_category=run.by_category,
        host_bytes=run.host_bytes,
        context_bytes=card.context_bytes,
        capacity_bytes=card.budget_bytes,
        fits=run.fits,
        failure=str(run.oom) if run.oom else None,
        flops=run.flops,
        moved_bytes=run.moved_bytes,
        sent_bytes=run.sent_bytes,
        exact=whole,
        seconds_to_estimate=time.perf_counter() - started,
        run=run,
    )


class RecipeLog(NamedTuple):
    """A recipe's log on a model; what one layer of it keeps (`one_layer_bytes`); whether every
    layer was traced for it."""

    log: Log
    layer_bytes: int
    exact: bool


def recipe_log(config: Any, recipe: Recipe, card: Gpu, *, exact: bool = False) -> RecipeLog:
    """The log of two optimizer steps. Errors as for `estimate`.

    From the second accumulated batch on all are alike: unless it is to be ``exact``, three stand
    for all of them, and the work of the others is added.
    """
    if recipe.accumulate > ACCUMULATED and not exact:
        fewer = recipe_log(config, recipe.but(accumulate=ACCUMULATED - 1), card)
        found = recipe_log(config, recipe.but(accumulate=ACCUMULATED), card)
        work = _extrapolated(fewer.log, found.log, recipe.accumulate - ACCUMULATED)
        return RecipeLog(Log({}, found.log.trace, *work), found.layer_bytes, False)
    if recipe.ranks == 1:
        return _log_of(config, recipe, card, exact, (SHALLOW, DEEPER))
    with fake_ranks(recipe.ranks, 0, as_cuda=True):
        return _log_of(config, recipe, card, exact, SHARDED_DEPTHS)


def _log_of(
    config: Any, recipe: Recipe, card: Gpu, exact: bool, depths: tuple[int, int]
) -> RecipeLog:
    experiment, layers = recipe.experiment(config), config.num_hidden_layers
    if not exact and layers > depths[1] and repeats(config):
        deeper = simulated_log(experiment, card=card, layers=depths[1])
        # Second, for the first trace of a process holds what libraries make once.
        shallow = simulated_log(experiment, card=card, layers=depths[0])
        trace = extend(shallow.trace, deeper.trace, layers, depths=depths)
        if trace is None:
            deeper = simulated_log(experiment, card=card, layers=depths[1])
            trace = extend(shallow.trace, deeper.trace, layers, depths=depths)
        if trace is not None:
            work = _extrapolated(shallow, deeper, layers - depths[1])
            return RecipeLog(Log({}, trace, *work), one_layer_bytes(deeper.trace), False)
    log = simulated_log(experiment, card=card)
    return RecipeLog(log, one_layer_bytes(log.trace), True)


def _extrapolated(less: Log, more: Log, times: int) -> list[int]:
    """Work of a step that has ``times`` times more than ``more`` what it has more than ``less``."""
    return [m + times * (m - fewer) for fewer, m in zip(less[2:], more[2:], strict=True)]


# --- the floor ------------------------------------------------------------------------------------

_LASTING = (Category.WEIGHTS, Category.BUFFERS, Category.OPTIMIZER, Category.UNATTRIBUTED)
_LAYER = re.compile(r"(.*?\.\d+)(\.|$)")


def floor_bytes(trace: Trace, layer_bytes: int, *, accumulated: bool = False) -> int:
    """The bytes that no schedule of the traced recipe can avoid.

    What lasts beyond the last step (weights, buffers, optimizer state, workspaces), the largest
    gradient (all of them where they are ``accumulated``), and ``layer_bytes``.
    """
    lasting = sum(s.nbytes for s in trace.live_at(len(trace.events) - 1) if s.category in _LASTING)
    gradients = trace.timeline().bytes_by_category.get(Category.GRADIENTS, ())
    if not accumulated:
        gradients = [s.nbytes for s in trace.storages
                     if s.category is Category.GRADIENTS and s.device == trace.device]  # fmt: skip
    return lasting + max(gradients, default=0) + layer_bytes


def one_layer_bytes(trace: Trace) -> int:
    """The most that one layer keeps for backward in one pass, with weights fetched for it.

    A layer is what a number in the module path names, as in ``model.layers.3``; where there is
    none, every module is one.
    """
    freed = {event.storage for event in trace.events if event.change_bytes < 0}
    passing, layer, most = 0, "", 0
    for index, storage, change_bytes in trace.changes():
        if change_bytes <= 0 or trace.events[index].storage not in freed:
            continue  # what is never freed lasts
        found = _LAYER.match(storage.module)
        owner = found[1] if found else storage.module
        if owner not in ("", layer) or not layer:  # a recomputed layer is not called by its name
            passing, layer = 0, owner
        if storage.category in (Category.ACTIVATIONS, Category.WEIGHTS):
            passing += change_bytes
            most = max(most, passing)
    return most


# --- an experiment of the user's own --------------------------------------------------------------

_FILE = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


def _own_experiment(model: Any) -> Callable | None:
    """The user's function, if ``model`` is one or names one."""
    if callable(model) and not isinstance(model, type):
        return model
    found = _FILE.fullmatch(model) if isinstance(model, str) else None
    if found is None:
        if isinstance(model, str) and model.endswith(".py"):
            raise InputError(f"say which function of {model} is the experiment: {model}:NAME")
        return None
    path = Path(found[1]).expanduser()
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}")
    module = _imported(path)
    function = getattr(module, found[2], None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        raise InputError(f"{path} has no function {found[2]!r}; it has {', '.join(names[:20])}")
    return function


def _imported(path: Path) -> Any:
    """The user's file as a module, as ``python FILE`` would find what it imports beside it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises is theirs to read, in a sentence
        raise InputError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    return module


def argument_value(text: str) -> Any:
    """``"8"``, ``"0.5"``, ``"True"``, ``"None"`` as Python means them; anything else is text."""
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
    return value if isinstance(value, int | float | bool | str | None) else text
