"""Recipe: every memory technique of a training run as one frozen record.

    recipe = Recipe(batch_size=4, seq_len=2048, precision="bf16", checkpointing=True)
    run = lab.run(lab.training("Llama-3.1-8B", recipe), gpu="a100-80gb")

A recipe that contradicts itself cannot be made, and `Recipe.check` refuses what a GPU cannot do.

Limits: several GPUs share a model in one way, `fully_shard`. The batch holds no padding.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import (
    PRECISIONS,
    InputError,
    boolean,
    one_of,
    positive_int,
    read_record,
    shown,
)

if TYPE_CHECKING:
    import torch

OPTIMIZERS = ("adamw", "fused-adamw", "sgd", "adafactor", "adamw8bit", "paged-adamw8bit")
#: "flash" restricts `scaled_dot_product_attention` to its flash kernel; "sdpa" lets it choose.
ATTENTIONS = ("sdpa", "eager", "flash")
QUANTIZATIONS = ("nf4", "nf4-double", "int8")
OFFLOADS = ("none", "activations", "optimizer", "weights")
#: PEFT's word for every linear layer but the output.
ALL_LINEAR = ("all-linear",)
#: Of the adapters that are advised.
LORA_RANK = 16
#: Tokens whose logits exist at a time in the chunked loss.
CHUNK_TOKENS = 1024
MOST_SEQUENCE = 1 << 22
#: In one forward pass. The chunked loss does a piece of work for every thousand.
MOST_TOKENS = 1 << 22
_MOST = {
    "batch_size": 65_536,
    "seq_len": MOST_SEQUENCE,
    "accumulate": 65_536,
    "ranks": 1024,  # the time of a simulation grows with their number
    "lora": 16_384,
}
_CHOICES = {
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
    "attention": ATTENTIONS,
    "offload": OFFLOADS,
    "quantize": QUANTIZATIONS,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained.

    Attributes:
        batch_size: sequences in one forward pass of each GPU (the micro-batch, if gradients
            accumulate).
        seq_len: tokens per sequence.
        precision: one of ``PRECISIONS``. With ``amp-`` weights that are trained stay in float32;
            frozen ones are stored in what autocast computes in.
        optimizer: one of ``OPTIMIZERS``; the last two are bitsandbytes'. ``"adamw"`` steps with
            PyTorch's default on a GPU, ``foreach=True``, which copies what it works on;
            ``"fused-adamw"`` is ``fused=True``, which does not.
        optimizer_in_backward: each parameter is updated, and its gradient freed, as soon as
            backward has computed it.
        checkpointing: every layer's activations are recomputed in backward.
        attention: one of ``ATTENTIONS``.
        lora: rank of LoRA adapters on a frozen model; None trains every weight.
        lora_targets: names of the layers that get adapters; by default all linear layers of the
            decoder, which experts are not.
        quantize: frozen weights in 4 or 8 bit, one of ``QUANTIZATIONS``; None leaves them.
        accumulate: forward and backward passes per optimizer step.
        offload: what lives in host memory, one of ``OFFLOADS``.
        chunked_loss: output layer and loss are computed a piece of the sequence at a time.
        ranks: GPUs that share weights, gradients and optimizer state, each with a separate batch
            (``fully_shard``, ZeRO's stage 3). With ``offload="weights"`` the shards live on the
            host. Memory is that of one GPU.

    Raises:
        InputError: a value that is not allowed, or two that contradict each other.
    """

    batch_size: int = 1
    seq_len: int = 1024
    precision: str = "fp32"
    optimizer: str = "adamw"
    optimizer_in_backward: bool = False
    checkpointing: bool = False
    attention: str = "sdpa"
    lora: int | None = None
    lora_targets: tuple[str, ...] = ALL_LINEAR
    quantize: str | None = None
    accumulate: int = 1
    offload: str = "none"
    chunked_loss: bool = False
    ranks: int = 1

    instead_of_bf16: ClassVar[str] = "'amp-fp16' or 'fp32'"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, _checked(name, value))
        for reason in _contradictions(self):
            raise InputError(reason)

    @property
    def tokens(self) -> int:
        """Tokens in one optimizer step of one GPU."""
        return self.batch_size * self.seq_len * self.accumulate

    @property
    def weights_dtype(self) -> "torch.dtype":
        """Weights are stored in this; frozen ones beside adapters in what autocast computes in."""
        from gpumem.models.precisions import dtype_of  # it needs PyTorch

        return (self.lora and self.autocast_dtype) or dtype_of(self.precision)

    @property
    def autocast_dtype(self) -> "torch.dtype | None":
        """What autocast computes in; None without it."""
        from gpumem.models.precisions import autocast_dtype

        return autocast_dtype(self.precision)

    def but(self, **changes: Any) -> "Recipe":
        """Return the same recipe with some fields changed. Errors as for a new recipe."""
        for name in changes:
            one_of(name, [field.name for field in fields(self)], "field of a recipe")
        return replace(self, **changes)

    def check(self, gpu: Gpu) -> None:
        """Raise `InputError` with the reason if ``gpu`` cannot do all of this."""
        for reason in unsupported(self, gpu):
            raise InputError(reason)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        return {**asdict(self), "lora_targets": list(self.lora_targets)}

    @classmethod
    def from_dict(cls, record: Any) -> "Recipe":
        """Read back what ``to_dict`` wrote; missing fields take their defaults."""
        return read_record(cls, record, "a recipe")

    def __str__(self) -> str:
        """Write the recipe in one line: what differs from plain fp32 training with AdamW."""
        parts = [
            (True, f"{self.batch_size} × {self.seq_len}"),
            (self.accumulate > 1, f"× {self.accumulate} accumulated"),
            (True, f"{self.precision}, {self.optimizer}"),
            (self.optimizer_in_backward, "optimizer in backward"),
            (self.checkpointing, "checkpointing"),
            (self.attention != "sdpa", f"{self.attention} attention"),
            (self.lora, f"LoRA {self.lora}"),
            (self.quantize, self.quantize),
            (self.offload != "none", f"{self.offload} on the host"),
            (self.chunked_loss, "chunked loss"),
            (self.ranks > 1, f"sharded over {self.ranks}"),
        ]
        return ", ".join(text for written, text in parts if written)


def _checked(name: str, value: Any) -> Any:
    """Check one field by itself; return its value in its plain form."""
    if value is None and name in ("lora", "quantize"):
        return None
    if name in _MOST:
        return positive_int(value, name, most=_MOST[name])
    if name == "precision" and str(value).lower() == "fp16":
        raise InputError(
            "fp16 weights cannot be trained: their gradients vanish, and a scaler refuses them. "
            "Use 'amp-fp16', or 'bf16'."
        )
    if name in _CHOICES:
        return one_of(value, _CHOICES[name], name)
    if name == "lora_targets":
        names = (value,) if isinstance(value, str) else value
        known = isinstance(names, tuple | list) and len(names) > 0
        if not known or not all(isinstance(n, str) and n and n.isprintable() for n in names):
            raise InputError(f"lora_targets must be names of layers, not {shown(value)}")
        return tuple(names)
    return boolean(value, name)


def _contradictions(r: Recipe) -> Iterator[str]:
    """Yield why fields contradict each other."""
    scaled = r.precision == "amp-fp16"
    on_host = r.offload == "weights"
    step_on_host = r.offload in ("weights", "optimizer")
    if r.batch_size * r.seq_len > MOST_TOKENS:
        yield f"batch_size × seq_len must be at most {MOST_TOKENS} tokens in one forward pass."
    if r.optimizer_in_backward and r.accumulate > 1:
        yield "optimizer_in_backward frees each gradient at once: there is none left to accumulate."
    if r.optimizer_in_backward and scaled:
        yield "optimizer_in_backward steps before the gradient scaler has seen all gradients."
    if r.optimizer_in_backward and step_on_host:
        yield "optimizer_in_backward, with the step on the host: every step would wait for a copy."
    if r.optimizer_in_backward and r.ranks > 1:
        yield "with sharding a gradient is there only when all GPUs have summed it, after backward."
    if scaled and (on_host or r.ranks > 1):
        yield "a gradient scaler checks gradients on one device; here they are on several."
    if r.quantize is not None and r.lora is None:
        yield "quantized weights cannot be trained: give them LoRA adapters (lora=16)."
    if r.quantize is not None and on_host:
        yield "bitsandbytes cannot fetch quantized weights layer by layer: offload something else."
    if r.quantize is not None and r.ranks > 1:
        yield "bitsandbytes' quantized weights cannot be cut by rows: leave out quantize or ranks."
    if r.lora is None and r.lora_targets != ALL_LINEAR:
        yield "lora_targets without lora: say the adapters' rank too."
    if on_host and not r.checkpointing and r.ranks == 1:
        yield "weights on the host save nothing without checkpointing: autograd would keep them."
    if step_on_host and r.optimizer.endswith("8bit"):
        yield "8-bit optimizers keep their state where the GPU can reach it: offload 'adamw'."
    if step_on_host and r.optimizer == "fused-adamw":
        yield "fused-adamw is a kernel of the GPU's, and the step is on the host: offload 'adamw'."
    if r.ranks > 1 and r.optimizer not in ("adamw", "fused-adamw", "sgd"):
        yield "with sharding every GPU steps its own part of each tensor: AdamW and 'sgd' can."
    if r.ranks > 1 and r.offload in ("activations", "optimizer"):
        yield "with sharding the shares as a whole can live on the host: offload 'weights'."
    if r.attention == "flash" and r.precision == "fp32":
        yield "the flash kernel computes in half precision only: take 'sdpa' or another precision."


def unsupported(recipe: Any, gpu: Gpu) -> Iterator[str]:
    """Yield why ``gpu`` cannot do all of a recipe, or of a `Serving`."""
    flash = recipe.attention == "flash"
    eight_bit = recipe.quantize is not None or recipe.optimizer.endswith("8bit")
    if "bf16" in recipe.precision and not gpu.bf16_native:
        yield (
            f"{gpu.name} has no bfloat16 in hardware: PyTorch only emulates it there. Use "
            f"{recipe.instead_of_bf16} instead of {recipe.precision!r}."
        )
    if flash and gpu.unified:
        yield f"the flash kernel is not written for {gpu.name}: take attention 'sdpa' there."
    # The flash kernels are written for NVIDIA's Ampere and later, which brought bfloat16.
    if flash and not gpu.bf16_native:
        yield f"{gpu.name} is too old for flash, which needs Ampere or later: take 'sdpa'."
    if eight_bit and gpu.unified:
        yield f"bitsandbytes has no kernels for {gpu.name}: no quantize, no 8-bit optimizers there."
    # Source: ``has_imma`` in bitsandbytes' cuda_specs.py, and what it is asked for.
    if recipe.quantize == "int8" and (gpu.compute_capability or (99, 0)) < (7, 5):
        yield f"{gpu.name} has no int8 tensor cores, which LLM.int8() needs: take 'nf4' there."
