"""A recipe as an experiment, the same for a real run and for a simulation.

A batch is rows of ``seq_len`` tokens. Where the model has a vision tower, each row begins with one
image: as many of its tokens as an image takes are placeholders, and its pixels are random.

Limits: tokens come from the course's corpus where the vocabulary has room for its bytes, else they
are random. Experts' shapes do not depend on which of them a router chooses.
"""

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpumem.estimation.model_building import build_model, possible_for
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.techniques import (
    HostOptimizer,
    Loss,
    activations_on_host,
    optimizer_of,
    shard,
    step_in_backward,
)
from gpumem.experiment import first_line
from gpumem.inputs import InputError
from gpumem.models import precisions
from gpumem.models.catalogue import image_tokens
from gpumem.models.config import find_config
from gpumem.models.text import batches
from gpumem.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_BYTES = 256  # what the corpus needs of a vocabulary


def training(
    model: "str | Path | PreTrainedConfig", recipe: Recipe, *, keeps_outputs: bool = False
) -> Callable[..., Iterator]:
    """Return the experiment that trains ``model`` by ``recipe``.

    Args:
        model: a model of the table, a folder with a ``config.json``, a hub id when online, or a
            transformers config.
        recipe: how it is trained.
        keeps_outputs: train as a plain loop does that says ``outputs = model(...)``: they live
            until the next ones are there, and ``use_cache`` is on. Trainer's loop does neither.

    Returns:
        ``experiment(device, layers=None)``: ``layers`` builds the model with another depth.

    Raises:
        InputError: unknown model, or a library that the recipe needs is missing. The experiment
            itself raises it where the model cannot be built or trained so.
    """
    name, config = find_config(model)
    recipe = possible_for(config, recipe)
    import_libraries(recipe)
    config.get_text_config().use_cache = keeps_outputs and not recipe.checkpointing

    def experiment(device: torch.device, layers: int | None = None) -> Iterator[torch.Tensor]:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if recipe.ranks not in (1, ranks):
            raise InputError(
                f"this recipe shares a model among {recipe.ranks} ranks, not {ranks}: "
                f"simulate(..., ranks={recipe.ranks})"
            )
        with refusing(name):
            model = build_model(config, recipe, device, layers)
            job = _Job(model, recipe, device, keeps_outputs=keeps_outputs)
        flash = recipe.attention == "flash"
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if flash else nullcontext():
            for ids in _tokens(config, recipe, device):
                with refusing(name):
                    loss = job.add(ids, **images_for(config, ids))
                if job.ready:
                    job.step()
                    yield loss

    experiment.__name__ = f"{name}: {recipe}"[:200]
    return experiment


def import_libraries(recipe: Recipe) -> None:
    """Import what the recipe needs: a simulation prepares bitsandbytes only if it is imported."""
    names = ["peft"] if recipe.lora else []
    if recipe.quantize or recipe.optimizer.endswith("8bit"):
        names.append("bitsandbytes")
    logging.disable(logging.WARNING)  # bitsandbytes warns of missing optional kernels
    try:
        for name in names:
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"this recipe needs {error.name}: pip install {error.name}") from error
    finally:
        logging.disable(logging.NOTSET)


# `simulate` explains the last two.
_NOT_THE_MODEL = (InputError, DataDependentOutputException, DynamicOutputShapeException)


@contextmanager
def refusing(name: str, what: str = "trained by this recipe") -> Iterator[None]:
    """Turn a model's errors into a sentence; out-of-memory errors pass."""
    try:
        yield
    except Exception as error:  # a first pass may raise anything if a config's sizes clash
        if isinstance(error, _NOT_THE_MODEL) or is_out_of_memory(error):
            raise
        raise InputError(
            f"{name} cannot be {what}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _tokens(config: Any, recipe: Recipe, device: torch.device) -> Iterator[torch.Tensor]:
    rows, columns = recipe.batch_size, recipe.seq_len
    known = config.get_text_config().vocab_size
    if image_tokens(config):
        known = min(known, config.image_token_id)
    # A simulation does not need the text, and reading millions of bytes takes long.
    if known >= _BYTES and detect_fake_mode() is None:
        seed = dist.get_rank() if recipe.ranks > 1 else 0  # each rank has separate rows
        yield from batches(device=device, batch_size=rows, seq_len=columns, seed=seed)
    while True:
        yield torch.randint(known, (rows, columns), device=device)


def images_for(config: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Put an image's placeholders after the first token of each row of ``ids``; return pixels."""
    places, length = image_tokens(config), ids.shape[1]
    if not places:
        return {}
    if length <= places:
        raise InputError(f"{length} tokens are too few: an image takes {places}, and text follows")
    ids[:, 1 : 1 + places] = config.image_token_id
    size = config.vision_config.image_size
    return {"pixel_values": torch.rand((len(ids), 3, size, size), device=ids.device)}


# --- the step --------------------------------------------------------------------------------


class _Job:
    """One training run: what happens with a batch, and at a step."""

    def __init__(
        self, model: torch.nn.Module, recipe: Recipe, device: torch.device, *, keeps_outputs: bool
    ) -> None:
        self.model, self.recipe, self.device = model, recipe, device
        self.loss = Loss(model, recipe, keeps_outputs=keeps_outputs)
        if recipe.ranks > 1:
            shard(self.loss, recipe, device)  # what no unit of the model has
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.gathered = 0
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "amp-fp16")
        self.optimizer = None
        if recipe.optimizer_in_backward:
            self.in_backward = [optimizer_of(recipe, [p]) for p in self.trained]
            for parameter, optimizer in zip(self.trained, self.in_backward, strict=True):
                step_in_backward(parameter, optimizer)
        elif recipe.offload == "optimizer":
            self.optimizer = HostOptimizer(self.trained, partial(optimizer_of, recipe))
        else:
            self.optimizer = optimizer_of(recipe, self.trained)

    @property
    def ready(self) -> bool:
        return self.gathered == self.recipe.accumulate

    def add(self, ids: torch.Tensor, **images: torch.Tensor) -> torch.Tensor:
        """Run forward and backward of one batch; return its loss."""
        with ExitStack() as stack:
            if self.recipe.offload == "activations":
                stack.enter_context(activations_on_host(self.model))
            if self.recipe.ranks == 1:  # sharded units are gathered in bfloat16
                stack.enter_context(precisions.autocast(self.device, self.recipe.precision))
            loss = self.loss(ids, **images)
        self.scaler.scale(loss / self.recipe.accumulate).backward()
        self.gathered += 1
        return loss.detach()

    def step(self) -> None:
        self.gathered = 0
        if self.optimizer is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
