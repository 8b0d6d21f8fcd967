"""Which recipes advice tries: configurations, and on each of them levels of memory techniques.

A *configuration* says what is trained and how exactly: precision, optimizer, adapters. Its *levels*
add techniques that leave the result as it is, the cheapest first.

"The same training": the weights and the state that a step leaves for the next are those of AdamW in
float32. An 8-bit optimizer rounds the state, so it changes the training; mixed precision rounds
products alone, and https://arxiv.org/abs/1710.03740 reached float32's accuracy with it.

Limits: adapters of one rank on all linear layers. Where the GPU computes in bfloat16, amp-fp16 is
left out: it takes the same memory and needs a scaler. Techniques are combined as in the levels
only; weights and optimizer are offloaded with AdamW alone, as the other optimizers exist to avoid
that.
"""

import contextlib
import itertools
from typing import Any

from gpumem.estimation.known_techniques import KNOWN
from gpumem.estimation.recipe import LORA_RANK, Recipe
from gpumem.estimation.weight_shapes import Shapes
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError
from gpumem.units import GIB

_ADAPTER_BYTES = 4  # of one number: PEFT stores adapters in float32


# --- what is tried --------------------------------------------------------------------------------


def configurations(gpu: Gpu, seq_len: int, only: str | None) -> list[Recipe]:
    """Return the configurations that ``gpu`` can run, batch 1, those that change least first."""
    precisions = ("amp-bf16", "bf16") if gpu.bf16_native else ("amp-fp16",)
    tried: list[dict[str, Any]] = []
    if only != "lora":
        tried = [{"precision": precisions[0]}, {}]
        for precision, optimizer in itertools.product(precisions, _OPTIMIZER_CHANGES):
            if optimizer != "fused-adamw":  # a technique: see levels
                tried.append({"precision": precision, "optimizer": optimizer})
    if only != "full":
        lora = {"precision": precisions[0], "lora": LORA_RANK}
        tried += [{**lora, "quantize": kind} for kind in (None, "int8", "nf4-double")]
    found = dict.fromkeys(_possible(Recipe(seq_len=seq_len), tried, gpu))
    return sorted(found, key=lambda recipe: len(changes(recipe)))


def levels(configuration: Recipe, gpu: Gpu, gpus: int) -> list[Recipe]:
    """Return ``configuration`` with more and more techniques, the cheapest first."""
    full, optimizer = configuration.lora is None, configuration.optimizer
    plain = {"chunked_loss": True, "optimizer": optimizer}
    fused = {**plain, "optimizer": "fused-adamw"} if full and optimizer == "adamw" else plain
    free = fused
    if gpus == 1 and full and configuration.precision != "amp-fp16":
        free = {**plain, "optimizer_in_backward": True}  # it has no gradients either
    on_host = {**plain, "checkpointing": True}
    shared = {**fused, "ranks": gpus}  # one model for all, in place of one for each
    tried: list[dict[str, Any]] = [{}, free, {**free, "checkpointing": True}]
    if gpus > 1:
        tried += [shared, {**shared, "checkpointing": True}]
    if not gpu.unified:  # otherwise the host's memory is the GPU's
        tried.append({**free, "offload": "activations"})
        if full and optimizer == "adamw":  # the others have little to offload
            tried.append({**on_host, "offload": "optimizer"})
        if gpus > 1:
            tried.append({**on_host, "ranks": gpus, "offload": "weights"})
        elif optimizer == "adamw":  # DDP takes no model on two devices
            tried.append({**on_host, "offload": "weights"})
    return _possible(configuration, tried, gpu)


def _possible(recipe: Recipe, tried: list[dict[str, Any]], gpu: Gpu) -> list[Recipe]:
    """Return ``recipe`` with each change of ``tried`` that fits it and that ``gpu`` can do."""
    found = []
    for change in tried:
        with contextlib.suppress(InputError):
            changed = recipe.but(**change)
            changed.check(gpu)
            found.append(changed)
    return found


# --- what is known without a simulation -----------------------------------------------------------


def least_bytes(recipe: Recipe, shapes: Shapes, gpus: int = 1) -> int:
    """Return a lower bound of what ``recipe`` takes of one GPU, whatever the batch.

    Weights and optimizer state that live there, and all trained gradients (the largest alone where
    the optimizer steps in backward). With several GPUs a share of all that, or DDP's buckets too.
    """
    if recipe.ranks > 1:
        if recipe.offload == "weights":
            return 0
        return least_bytes(recipe.but(ranks=1), shapes) // recipe.ranks
    width = recipe.weights_dtype.itemsize
    here = shapes.parameters - (shapes.in_layers if recipe.offload == "weights" else 0)
    if recipe.lora:
        bits = {None: 8 * width, "int8": 8, "nf4": 4, "nf4-double": 4}[recipe.quantize]
        return (here - shapes.in_linear) * width + shapes.in_linear * bits // 8
    states = {"adamw": 2 * width, "fused-adamw": 2 * width, "adamw8bit": 2}.get(recipe.optimizer, 0)
    if recipe.offload == "optimizer":
        states = 0
    gradients = shapes.largest if recipe.optimizer_in_backward else here
    return here * (width + states) + gradients * width + bucket_bytes(recipe, shapes, gpus)


def bucket_bytes(recipe: Recipe, shapes: Shapes, gpus: int) -> int:
    """Return the size of DDP's buckets: a second copy of every gradient, for the whole training.

    With ``gradient_as_bucket_view`` the two are one from the second step on, but the first step
    still has both. Source: the documentation of ``DistributedDataParallel``.
    """
    return 0 if gpus == 1 or recipe.ranks > 1 else _trained_bytes(recipe, shapes)


def _trained_bytes(recipe: Recipe, shapes: Shapes) -> int:
    if recipe.lora:
        return shapes.adapters(recipe.lora) * _ADAPTER_BYTES
    return shapes.parameters * recipe.weights_dtype.itemsize


def link_bytes(recipe: Recipe, shapes: Shapes, sent_bytes: int) -> int:
    """Return the bytes that cross between host and GPU in one step.

    ``sent_bytes`` are those of the activations that the step moves to the host.
    """
    width = recipe.weights_dtype.itemsize
    if recipe.offload == "activations":
        return 2 * sent_bytes
    if recipe.offload == "optimizer":  # gradients go, weights come
        return 2 * _trained_bytes(recipe, shapes)
    if recipe.offload == "weights" and recipe.ranks > 1:  # the same with this GPU's shares
        fetched = 2 * shapes.parameters * width // recipe.ranks
        return fetched + _trained_bytes(recipe, shapes) // recipe.ranks
    if recipe.offload == "weights":  # fetched for forward and for backward; gradients go back
        return shapes.in_layers * width * (2 if recipe.lora else 3)
    return 0


# --- as text --------------------------------------------------------------------------------------

_OPTIMIZER_CHANGES = {
    "adamw": (),
    "fused-adamw": (),
    "adamw8bit": KNOWN["8bit-adam"].changes,
    "paged-adamw8bit": KNOWN["8bit-adam"].changes,
    "adafactor": KNOWN["adafactor"].changes,
    "sgd": KNOWN["sgd"].changes,
}


def changes(recipe: Recipe, shapes: Shapes | None = None) -> tuple[str, ...]:
    """Say what ``recipe`` trains otherwise than AdamW on float32 weights, a sentence each."""
    found = []
    if recipe.lora:
        [adapters] = KNOWN["lora"].changes
        if shapes:
            share = shapes.adapters(recipe.lora) / shapes.parameters
            adapters += f", {share:.1%} of the parameters"
        found.append(adapters)
        if recipe.quantize:
            bits = 8 if recipe.quantize == "int8" else 4
            found.append(f"the frozen weights are rounded to {bits} bits")
    elif recipe.precision == "bf16":
        found += KNOWN["bf16"].changes
    return (*found, *_OPTIMIZER_CHANGES[recipe.optimizer])


def costs(recipe: Recipe, crossing_bytes: int, sent_bytes: int = 0) -> tuple[str, ...]:
    """Say what ``recipe`` pays for its memory without training otherwise, a sentence each."""
    found = []
    if recipe.ranks > 1:
        found.append(
            f"one model for all {recipe.ranks} GPUs: each sends {sent_bytes / GIB:.3g} GiB a step "
            "to the others"
        )
    if recipe.precision.startswith("amp-"):
        products = "float16 (losses are scaled)" if recipe.precision == "amp-fp16" else "bfloat16"
        trained = "adapters" if recipe.lora else "weights"
        found.append(f"products in {products}; {trained} and their updates stay float32")
    if recipe.checkpointing:
        more = 50 if recipe.lora else 33  # one forward more, beside backward's one or two
        found.append(f"every layer's forward runs twice: up to +{more} % arithmetic")
    if recipe.chunked_loss:
        found.append("the logits are computed twice, a piece at a time")
    if recipe.optimizer_in_backward:
        found.append(KNOWN["step-in-backward"].besides)
    if recipe.optimizer == "paged-adamw8bit":
        found.append("the optimizer state is in host memory whenever the GPU is short")
    crossing = {
        "activations": "activations cross the PCIe link twice",
        "optimizer": "the CPU does the step; gradients and weights cross the PCIe link",
        "weights": "the CPU does the step; weights cross the PCIe link twice, gradients once",
    }
    if recipe.lora:
        crossing["weights"] = "weights cross the PCIe link twice"
    if recipe.offload != "none":
        found.append(f"{crossing[recipe.offload]}: {crossing_bytes / GIB:.3g} GiB a step")
    return tuple(found)
