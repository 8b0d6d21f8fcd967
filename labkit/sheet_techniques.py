"""The techniques of the cheat sheet: each as a change of a recipe, with what there is to say of it.

Limits: what no recipe can say (operations in place, loading data) has no change, and so no figures.
"""

from collections.abc import Callable
from dataclasses import dataclass

from labkit.catalogue import Gpu
from labkit.memory import InputError
from labkit.recipes import Recipe

Change = Callable[[Recipe, Gpu], Recipe]


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One technique.

    Attributes:
        name, lesson: what it is called, and where it is taught.
        change: a recipe with it in place of one without; None where no recipe can say it.
        effort: what there is to write.
        not_when: when not to use it, a sentence.
        claims: the claims of the articles that are about it.
    """

    name: str
    lesson: str
    change: Change | None
    effort: str
    not_when: str
    claims: tuple[str, ...] = ()


def _to(**fields: object) -> Change:
    return lambda recipe, card: recipe.but(**fields)


def _mixed(recipe: Recipe, card: Gpu) -> Recipe:
    if recipe.precision != "fp32":  # it is in half precision already
        return recipe
    return recipe.but(precision="amp-bf16" if card.bf16_native else "amp-fp16")


def _in_halves(recipe: Recipe, card: Gpu) -> Recipe:
    if recipe.accumulate > 1:
        return recipe
    if recipe.batch_size % 2:
        raise InputError(f"a batch of {recipe.batch_size} has no halves")
    return recipe.but(batch_size=recipe.batch_size // 2, accumulate=2)


def _technique(name: str, lesson: str, change: Change | None, effort: str, claims: str,
               not_when: str) -> Technique:  # fmt: skip
    return Technique(name=name, lesson=lesson, change=change, effort=effort, not_when=not_when,
                     claims=tuple(claims.split()))  # fmt: skip


_OFFLOAD = "offload-80 offload-2-5x-slower pcie-16gbs"
TECHNIQUES: tuple[Technique, ...] = (
    _technique(
        "emptying the cache", "02", None, "one line", "empty-cache-frees",
        "In a training loop: the next step allocates the same again, and waits for it.",
    ),
    _technique(
        "mixed precision", "04", _mixed, "three lines; in FP16 five",
        "amp-halves-memory amp-halves-activations amp-halves-weights-grads amp-20-50-faster "
        "amp-accuracy",
        "When weights and states are most of the peak: they stay FP32, and casts come on top.",
    ),
    _technique(
        "BF16 throughout", "05", _to(precision="bf16"), "one line", "bf16-halves bf16-no-scaler",
        "When updates are small beside the weights, late in training: they are rounded away.",
    ),
    _technique(
        "gradient checkpointing", "06", _to(checkpointing=True), "one line",
        "ckpt-40 ckpt-activations-40-70 ckpt-activations-10x ckpt-20-30-slower",
        "When the peak lies in the optimizer's step, where no activations are left.",
    ),
    _technique(
        "accumulation of two halves", "07", _in_halves, "three lines",
        "accum-constant-memory accum-neutral-speed accum-same-gradient large-vs-accumulated",
        "When pieces hold unequal numbers of tokens, unless each is weighted by its own.",
    ),
    _technique(
        "fused attention", "08", _to(attention="sdpa"), "one word",
        "attention-quadratic flash-linear flash-8k-8gb-05gb flash-2-4x-faster sdpa-picks-flash",
        "When texts are short, or attention weights are to be looked at.",
    ),
    _technique(
        "operations in place", "09", None, "one line each", "inplace-saves grads-freed-after-step",
        "When autograd needs the old value: it refuses, or keeps a copy after all.",
    ),
    _technique(
        "TorchScript", "10", None, "one line, and what it cannot read", "torchscript-efficient",
        "In new code: it is deprecated; torch.compile took its place.",
    ),
    _technique(
        "torch.compile", "11", None, "one line", "compile-shrinks compile-faster",
        "When shapes keep changing, or a run is shorter than compiling it.",
    ),
    _technique(
        "chunked loss", "11", _to(chunked_loss=True), "a dozen lines", "",
        "When the vocabulary is small beside the layers, or something else is the peak.",
    ),
    _technique(
        "SGD", "12", _to(optimizer="sgd"), "one line, and a new learning rate",
        "sgd-two-thirds adam-doubles",
        "When weights need step sizes of their own, as those of transformers do.",
    ),
    _technique(
        "Adafactor", "12", _to(optimizer="adafactor"), "one line", "",
        "When momentum matters: it keeps none.",
    ),
    _technique(
        "optimizer in backward", "12", _to(optimizer_in_backward=True), "a dozen lines", "",
        "With accumulation, or clipping by the norm of all gradients.",
    ),
    _technique(
        "8-bit optimizer", "13", _to(optimizer="adamw8bit"), "one line",
        "opt8-75 opt8-same-speed opt8-drop-in",
        "When activations are the peak: it touches the states alone.",
    ),
    _technique(
        "LoRA", "14", _to(lora=16), "a dozen lines, another training", "lora-parameter-efficient",
        "When training from scratch, or for knowledge that a low rank cannot hold.",
    ),
    _technique(
        "QLoRA", "15", _to(lora=16, quantize="nf4-double"), "two dozen lines, another training",
        "qlora-75 qlora-15-slower qlora-70b-35gb inference-int4-1b",
        "When 16-bit weights fit: unpacking costs time at every product.",
    ),
    _technique(
        "activations on the host", "16", _to(offload="activations"), "one line", _OFFLOAD,
        "When checkpointing is enough: computing again is mostly faster than the link.",
    ),
    _technique(
        "optimizer on the host", "16", _to(offload="optimizer"), "two dozen lines", _OFFLOAD,
        "When a step has few tokens: weights and gradients cross the link each time.",
    ),
    _technique(
        "weights on the host", "16", _to(offload="weights", checkpointing=True),
        "a library, or a hundred lines", f"{_OFFLOAD} zero3-70b-4xa100",
        "When anything else fits: every layer waits for the link, twice a step.",
    ),
    _technique(
        "weights on a disk", "17", None, "a library", "nvme-infinity",
        "When host memory would do, or the disk must live long.",
    ),
    _technique(
        "sharding over 8 GPUs", "18", _to(ranks=8), "a dozen lines, and torchrun", "fsdp-10x",
        "When activations are the peak: every rank keeps its own.",
    ),
    _technique(
        "layers over several GPUs", "19", None, "one word", "sharding-linear sharding-10-20-slower",
        "When GPUs should all work at once: one at a time does.",
    ),
    _technique(
        "careful data loading", "20", None, "a few words",
        "loading-gpu-memory pinned-faster streaming-avoids-loading",
        "For memory of the GPU: a batch of tokens is next to nothing there.",
    ),
)  # fmt: skip
