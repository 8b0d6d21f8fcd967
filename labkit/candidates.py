"""Which recipes advice tries: ways to train, and on each of them a ladder of memory savers.

A *way* says what is trained and how exactly: precision, optimizer, adapters. A *rung* of its ladder
adds savers that leave the result as it is, those that cost least first. `least_bytes` bounds from
below, by arithmetic alone, what a rung takes; a rung that it rules out needs no simulation.

Source of "the same training" for mixed precision: the weights and their updates stay in float32,
and https://arxiv.org/abs/1710.03740 reached float32's accuracy with unchanged hyper-parameters.

Limits: adapters of one rank on all linear layers. Where the card computes in bfloat16, amp-fp16 is
left out: it takes the same memory and needs a scaler. Savers are combined as on the rungs only;
weights and optimizer are offloaded with AdamW alone, the others being there to avoid that.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from labkit import models
from labkit.catalogue import Gpu
from labkit.memory import GIB, InputError, format_bytes
from labkit.recipes import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LORA_RANK = 16
_HELD_STATES = {"adamw": 2, "adamw8bit": 2}  # per weight: two like it, or two single bytes
#: GB per second and direction of 16 lanes, by the PCI Express generation: 8, 16 and 32 GT/s with
#: 128b/130b coding, https://pcisig.com/specifications.
_LINK_GB_PER_S = {3: 15.75, 4: 31.5, 5: 63.0}


class Sizes(NamedTuple):
    """Numbers of weights: all; in the layers; of the largest tensor; in linear layers other than
    the output (which adapters join and bitsandbytes quantises); in adapters of `LORA_RANK`."""

    parameters: int
    in_layers: int
    largest: int
    linear: int
    adapters: int


def sizes_of(config: "PreTrainedConfig") -> Sizes:
    """Count the weights of a model, built on ``meta``, where it takes no memory.

    Raises:
        InputError: it cannot be built.
    """
    from transformers.pytorch_utils import Conv1D

    model = models.model(config, device="meta")
    parameters = list(model.parameters())
    output = model.get_output_embeddings()
    linear = [
        module.weight
        for module in model.modules()
        if isinstance(module, _linear_types(Conv1D)) and module is not output
    ]
    layers = models.layers_of(model)
    return Sizes(
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in layers.parameters()) if layers is not None else 0,
        max(p.numel() for p in parameters),
        sum(weight.numel() for weight in linear),
        LORA_RANK * sum(sum(weight.shape) for weight in linear),
    )


def _linear_types(conv: type) -> tuple[type, ...]:
    import torch

    return torch.nn.Linear, conv


# --- what is tried --------------------------------------------------------------------------------


def ways(card: Gpu, seq_len: int, only: str | None) -> list[Recipe]:
    """The ways to train that ``card`` can do, those that change least first; batch 1."""
    amp = "amp-bf16" if card.bf16_native else "amp-fp16"
    low = "bf16" if card.bf16_native else amp
    full = [(amp, "adamw"), ("fp32", "adamw"), (amp, "adamw8bit"), (amp, "paged-adamw8bit"),
            (amp, "adafactor"), (amp, "sgd")]  # fmt: skip
    if low == "bf16":
        full += [(low, name) for name in
                 ("adamw", "adamw8bit", "paged-adamw8bit", "adafactor", "sgd")]  # fmt: skip
    plain = Recipe(seq_len=seq_len)
    found = []
    if only != "lora":
        found += [plain.but(precision=precision, optimizer=name) for precision, name in full]
    if only != "full":
        lora = plain.but(precision=low, lora=LORA_RANK)
        found += [lora, lora.but(quantize="int8"), lora.but(quantize="nf4-double")]
    able = [recipe for recipe in found if _can(recipe, card)]
    return sorted(able, key=lambda recipe: len(changes(recipe)))


def rungs(way: Recipe, card: Gpu, gpus: int) -> list[Recipe]:
    """``way`` with more and more savers, the cheapest first. All train the same."""
    free = {"chunked_loss": True}
    if gpus == 1 and way.lora is None and way.precision != "amp-fp16":
        free["optimizer_in_backward"] = True
    ladder = [{}, free, {**free, "checkpointing": True}]
    if not card.unified:  # there the host's memory is the card's
        ladder.append({**free, "offload": "activations"})
        on_host = {"chunked_loss": True, "checkpointing": True}
        if way.lora is None and way.optimizer == "adamw":  # the others hold little to offload
            ladder.append({**on_host, "offload": "optimizer"})
        if gpus == 1 and way.optimizer == "adamw":  # DDP takes no model that lies on two devices
            ladder.append({**on_host, "offload": "weights"})
    if gpus > 1:  # one model for all, in place of one for each
        shared = {"chunked_loss": True, "ranks": gpus}
        ladder[3:3] = [shared, {**shared, "checkpointing": True}]
        if not card.unified:
            ladder.append({**shared, "checkpointing": True, "offload": "weights"})
    return [recipe for change in ladder if (recipe := _allowed(way, change))]


def _allowed(way: Recipe, change: dict[str, Any]) -> Recipe | None:
    try:
        return way.but(**change)
    except InputError:  # the two contradict each other
        return None


def _can(recipe: Recipe, card: Gpu) -> bool:
    try:
        recipe.check(card)
    except InputError:
        return False
    return True


# --- what is known without a simulation -----------------------------------------------------------


def least_bytes(recipe: Recipe, sizes: Sizes, gpus: int = 1) -> int:
    """What ``recipe`` takes of the card at the least, whatever the batch.

    Weights and optimizer state that live there, and all trained gradients (the largest alone where
    the optimizer steps in backward). With several cards a share of all that, or DDP's buckets too.
    """
    if recipe.ranks > 1:
        if recipe.offload == "weights":
            return 0
        whole = least_bytes(recipe.but(ranks=1, offload="none"), sizes)
        return whole // recipe.ranks
    width = models.dtype_of(recipe.precision).itemsize
    here = sizes.parameters - (sizes.in_layers if recipe.offload == "weights" else 0)
    if recipe.lora:
        whole = here - (sizes.linear if recipe.quantize else 0)
        packed = {"int8": sizes.linear, "nf4": sizes.linear // 2, "nf4-double": sizes.linear // 2}
        return whole * width + packed.get(recipe.quantize, 0)
    states = _HELD_STATES.get(recipe.optimizer, 0) * (width if recipe.optimizer == "adamw" else 1)
    if recipe.offload == "optimizer":
        states = 0
    gradients = here
    if recipe.optimizer_in_backward:
        gradients = sizes.largest if recipe.offload != "weights" else 0
    return here * (width + states) + gradients * width + bucket_bytes(recipe, sizes, gpus)


def bucket_bytes(recipe: Recipe, sizes: Sizes, gpus: int) -> int:
    """DDP's buckets: a second copy of every gradient, kept for good.

    With ``gradient_as_bucket_view`` the two are one from the second step on, but the first step
    still holds both. Source: the documentation of ``DistributedDataParallel``.
    """
    if gpus == 1 or recipe.ranks > 1:
        return 0
    if recipe.lora:
        return sizes.adapters * 4  # PEFT keeps adapters in float32
    return sizes.parameters * models.dtype_of(recipe.precision).itemsize


def link_bytes(recipe: Recipe, sizes: Sizes, sent_bytes: int) -> int:
    """Bytes that cross between host and card in one step.

    Args:
        recipe: what is offloaded.
        sizes: of the model.
        sent_bytes: of the activations that one step moves to the host.
    """
    width = models.dtype_of(recipe.precision).itemsize
    if recipe.offload == "activations":
        return 2 * sent_bytes
    if recipe.offload == "optimizer":  # gradients go, weights come
        return 2 * (sizes.adapters * 4 if recipe.lora else sizes.parameters * width)
    if recipe.offload == "weights" and recipe.ranks > 1:  # the same with this card's shares
        there = sizes.parameters * width * 2 // recipe.ranks
        trained = sizes.adapters * 4 if recipe.lora else sizes.parameters * width
        return there + trained // recipe.ranks
    if recipe.offload == "weights":  # fetched for forward and for backward; gradients go back
        return sizes.in_layers * width * (2 if recipe.lora else 3)
    return 0


def link_gb_per_s(card: Gpu) -> float | None:
    """What 16 lanes to ``card`` carry in one direction; None where host and card share memory."""
    if card.unified:
        return None
    major = card.compute_capability[0] if card.compute_capability else 9  # AMD's are as new
    return _LINK_GB_PER_S[3 if major < 8 else 4 if major == 8 else 5]


# --- in words -------------------------------------------------------------------------------------

_OPTIMIZER_CHANGES = {
    "adamw8bit": ("the optimizer state is kept in 8 bits",),
    "paged-adamw8bit": ("the optimizer state is kept in 8 bits",),
    "adafactor": (
        "Adafactor keeps second moments by row and column only",
        "Adafactor has no momentum",
    ),
    "sgd": (
        "SGD: one learning rate for all weights, where AdamW fits one to each",
        "SGD needs another learning rate: find it anew",
    ),
}
_QUANTISED = {"int8": "8", "nf4": "4", "nf4-double": "4"}


def changes(recipe: Recipe, sizes: Sizes | None = None) -> tuple[str, ...]:
    """What ``recipe`` trains otherwise than AdamW on float32 weights, a sentence each."""
    found: tuple[str, ...] = ()
    if recipe.lora:
        share = f", {sizes.adapters / sizes.parameters:.1%} of the parameters" if sizes else ""
        found += (f"only adapters are trained{share}",)
        if recipe.quantize:
            found += (f"the frozen weights are rounded to {_QUANTISED[recipe.quantize]} bits",)
    elif recipe.precision == "bf16":
        found += ("bf16 weights: updates smaller than 1/256 of a weight are lost",)
    return found + _OPTIMIZER_CHANGES.get(recipe.optimizer, ())


def costs(
    recipe: Recipe, crossing_bytes: int, host_bytes: int, sent_bytes: int = 0
) -> tuple[str, ...]:
    """What ``recipe`` pays for its memory without training otherwise, a sentence each."""
    found = []
    if recipe.ranks > 1:
        found.append(
            f"one model for all {recipe.ranks} GPUs: each sends {sent_bytes / GIB:.3g} GiB a step "
            "to the others"
        )
    if recipe.precision.startswith("amp-"):
        products = "float16 (losses are scaled)" if recipe.precision == "amp-fp16" else "bfloat16"
        found.append(f"products in {products}; weights and their updates stay float32")
    if recipe.checkpointing:
        more = 50 if recipe.lora else 33  # a forward more, beside backward's one or two
        found.append(f"every layer's forward runs twice: up to +{more} % arithmetic")
    if recipe.chunked_loss:
        found.append("the logits are computed twice, a piece at a time")
    if recipe.optimizer_in_backward:
        found.append("gradients are gone once used: no clipping by their norm, no accumulation")
    if recipe.optimizer == "paged-adamw8bit":
        found.append("the optimizer state is in host memory whenever the card is short")
    gib = f"{crossing_bytes / GIB:.3g} GiB a step"
    found += {
        "none": [],
        "activations": [f"activations cross the PCIe link twice: {gib}"],
        "optimizer": [f"gradients and weights cross the PCIe link: {gib}; the CPU does the step"],
        "weights": [
            f"weights cross the PCIe link twice{'' if recipe.lora else ', gradients once'}: "
            f"{gib}" + ("" if recipe.lora else "; the CPU does the step")
        ],
    }[recipe.offload]
    if recipe.offload != "none":
        found.append(f"{format_bytes(host_bytes)} of host memory")
    return tuple(found)
