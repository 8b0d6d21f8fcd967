"""Recipe: every memory technique of a training run as one frozen record.

    recipe = Recipe(batch_size=4, seq_len=2048, precision="bf16", checkpointing=True)
    run = lab.run(recipe.experiment("Llama-3.1-8B"), gpu="a100-80gb")

A recipe that contradicts itself cannot be made, and `check` says what a card cannot do. It becomes
JSON and comes back; nothing in the JSON is trusted. `labkit.training` holds the code of each
technique.

Limits: several GPUs share a model in one way, `fully_shard`. The batch holds no padding.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.catalogue import Gpu
from labkit.experiment import PRECISIONS
from labkit.memory import InputError, one_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OPTIMIZERS = ("adamw", "sgd", "adafactor", "adamw8bit", "paged-adamw8bit")
#: "flash" is `scaled_dot_product_attention` held to its flash kernel; "sdpa" lets it choose.
ATTENTIONS = ("sdpa", "eager", "flash")
QUANTIZATIONS = ("nf4", "nf4-double", "int8")
OFFLOADS = ("none", "activations", "optimizer", "weights")
#: PEFT's word for every linear layer but the output.
ALL_LINEAR = ("all-linear",)
#: Of the chunked loss: logits exist for so many tokens at a time.
CHUNK_TOKENS = 1024
MOST_BATCH, MOST_SEQUENCE, MOST_RANK, MOST_ACCUMULATE = 65_536, 1 << 22, 16_384, 65_536
#: GPUs. The time of a simulation grows with their number.
MOST_RANKS = 1024
#: In one forward pass. The chunked loss does a piece of work for every thousand.
MOST_TOKENS = 1 << 22
_MOST_TARGETS, _MOST_TARGET_LENGTH = 64, 100


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained.

    Attributes:
        batch_size: sequences in one forward pass (the micro-batch, if gradients accumulate) of
            each GPU.
        seq_len: tokens per sequence.
        precision: one of ``PRECISIONS``. With ``amp-`` the weights stay in float32.
        optimizer: one of ``OPTIMIZERS``; the last two are bitsandbytes'.
        optimizer_in_backward: each parameter is updated, and its gradient freed, as soon as the
            gradient is there.
        checkpointing: every layer's activations are recomputed in backward.
        attention: one of ``ATTENTIONS``.
        lora: rank of LoRA adapters on a frozen model; None trains every weight.
        lora_targets: names of the layers that get adapters.
        quantize: frozen weights in 4 or 8 bit, one of ``QUANTIZATIONS``; None keeps them.
        accumulate: forward and backward passes per optimizer step.
        offload: what lives in host memory, one of ``OFFLOADS``.
        chunked_loss: output layer and loss are computed a piece of the sequence at a time.
        ranks: GPUs that share weights, gradients and optimizer state, each with a batch of its
            own (``fully_shard``, ZeRO's stage 3). With ``offload="weights"`` the shares live on
            the host. What a card takes is that of one of them.

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

    def __post_init__(self) -> None:
        _normalise(self)
        for contradicts, reason in _CONTRADICTIONS:
            if contradicts(self):
                raise InputError(reason)

    @property
    def tokens(self) -> int:
        """Tokens in one optimizer step of one GPU."""
        return self.batch_size * self.seq_len * self.accumulate

    def but(self, **changes: Any) -> "Recipe":
        """The same recipe with some fields changed.

        Raises:
            InputError: unknown field, or as for a new recipe.
        """
        names = [field.name for field in fields(self)]
        return replace(
            self, **{one_of(k, names, "field of a recipe"): v for k, v in changes.items()}
        )

    def check(self, card: Gpu) -> None:
        """Refuse what ``card`` cannot do.

        Raises:
            InputError: the reason, in one sentence.
        """
        for lacks, reason in _CARD_LACKS:
            if lacks(self, card):
                raise InputError(reason.format(card=card.name, recipe=self))

    def experiment(self, model: "str | Path | PreTrainedConfig") -> Callable[..., Iterator[Any]]:
        """The recipe on ``model`` as an experiment, for `measure`, `simulate` and `run`.

        Raises:
            InputError: unknown model, or one that cannot be built.
        """
        from labkit.training import training

        return training(model, self)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        return {**asdict(self), "lora_targets": list(self.lora_targets)}

    @classmethod
    def from_dict(cls, record: Any) -> "Recipe":
        """Read back what ``to_dict`` wrote; missing fields take their defaults.

        Raises:
            InputError: not an object, an unknown field, or as for a new recipe.
        """
        if not isinstance(record, Mapping):
            raise InputError(f"a recipe must be an object, not {type(record).__name__}")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(_brief(key) for key in set(record) - known):
            raise InputError(f"a recipe has no field {unknown[0]}")
        values = dict(record)
        if isinstance(values.get("lora_targets"), list):
            values["lora_targets"] = tuple(values["lora_targets"])
        return cls(**values)

    def __str__(self) -> str:
        """The recipe in a line: what differs from plain fp32 training with AdamW."""
        parts = [f"{self.batch_size} × {self.seq_len}"]
        parts += [f"× {self.accumulate} accumulated"] * (self.accumulate > 1)
        parts += [self.precision, self.optimizer]
        parts += ["optimizer in backward"] * self.optimizer_in_backward
        parts += ["checkpointing"] * self.checkpointing
        parts += [f"{self.attention} attention"] * (self.attention != "sdpa")
        parts += [f"LoRA {self.lora}"] if self.lora else []
        parts += [self.quantize] if self.quantize else []
        parts += [f"{self.offload} on the host"] * (self.offload != "none")
        parts += ["chunked loss"] * self.chunked_loss
        parts += [f"sharded over {self.ranks}"] * (self.ranks > 1)
        return ", ".join(parts)


def _normalise(recipe: Recipe) -> None:
    """Check each field by itself, and store it in its plain form."""
    counts = {"batch_size": MOST_BATCH, "seq_len": MOST_SEQUENCE, "accumulate": MOST_ACCUMULATE,
              "ranks": MOST_RANKS}  # fmt: skip
    if recipe.lora is not None:
        counts["lora"] = MOST_RANK
    clean: dict[str, Any] = {
        name: _count(getattr(recipe, name), name, most) for name, most in counts.items()
    }
    for name in ("optimizer_in_backward", "checkpointing", "chunked_loss"):
        if not isinstance(getattr(recipe, name), bool):
            raise InputError(f"{name} must be true or false, not {_brief(getattr(recipe, name))}")
    if _is_name(recipe.precision) and recipe.precision.lower() == "fp16":
        raise InputError(
            "fp16 weights cannot be trained: a gradient scaler refuses to unscale fp16 gradients, "
            "and without one they vanish. Use 'amp-fp16', or 'bf16'."
        )
    choices = {
        "precision": PRECISIONS, "optimizer": OPTIMIZERS, "attention": ATTENTIONS,
        "offload": OFFLOADS,
    }  # fmt: skip
    if recipe.quantize is not None:
        choices["quantize"] = QUANTIZATIONS
    clean |= {
        name: _choice(getattr(recipe, name), allowed, name) for name, allowed in choices.items()
    }
    clean["lora_targets"] = _targets(recipe.lora_targets)
    for name, value in clean.items():
        object.__setattr__(recipe, name, value)


def _brief(value: Any) -> str:
    """``value`` for an error's sentence: short and in one line, whatever it is."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "…")
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else "a number of many digits"
    return f"a value of type {type(value).__name__[:40]}"


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TARGET_LENGTH


def _count(value: Any, name: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number of at least 1, not {_brief(value)}")
    if not 1 <= value <= most:
        raise InputError(f"{name} must be from 1 to {most}, not {_brief(int(value))}")
    return int(value)


def _choice(value: Any, allowed: tuple[str, ...], name: str) -> str:
    if not _is_name(value):
        raise InputError(f"{name} must be one of {', '.join(allowed)}, not {_brief(value)}")
    return one_of(value, allowed, name)


def _targets(names: Any) -> tuple[str, ...]:
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, tuple | list) or not 1 <= len(names) <= _MOST_TARGETS:
        raise InputError(f"lora_targets must be 1 to {_MOST_TARGETS} names of layers")
    for name in names:
        if not _is_name(name) or not name or not name.isprintable():
            raise InputError(f"lora_targets must hold names of layers, not {_brief(name)}")
    return tuple(names)


_8BIT = ("adamw8bit", "paged-adamw8bit")
_CONTRADICTIONS: tuple[tuple[Callable[[Recipe], bool], str], ...] = (
    (
        lambda r: r.batch_size * r.seq_len > MOST_TOKENS,
        f"batch_size × seq_len must be at most {MOST_TOKENS} tokens in one forward pass: take a "
        "smaller batch and accumulate.",
    ),
    (
        lambda r: r.optimizer_in_backward and r.accumulate > 1,
        "optimizer_in_backward frees each gradient at once, so there is none left to accumulate. "
        "Choose one of them.",
    ),
    (
        lambda r: r.optimizer_in_backward and r.precision == "amp-fp16",
        "optimizer_in_backward steps before the gradient scaler has seen all gradients, so an "
        "overflow would be trained on. Use 'amp-bf16'.",
    ),
    (
        lambda r: r.optimizer_in_backward and r.offload in ("optimizer", "weights"),
        "optimizer_in_backward steps on the GPU while the next gradient is computed; with the "
        "optimizer or the weights on the host, every step would wait for a copy. Choose one.",
    ),
    (
        lambda r: r.quantize is not None and r.lora is None,
        "quantized weights cannot be trained: give them LoRA adapters (lora=16), or leave them "
        "unquantized.",
    ),
    (
        lambda r: r.lora is None and r.lora_targets != ALL_LINEAR,
        "lora_targets without lora: say the adapters' rank too.",
    ),
    (
        lambda r: r.quantize is not None and r.offload == "weights",
        "quantized weights keep their statistics on the device, so bitsandbytes cannot fetch them "
        "layer by layer. Offload something else, or do not quantize.",
    ),
    (
        lambda r: r.offload == "weights" and not r.checkpointing and r.ranks == 1,
        "weights on the host save nothing without checkpointing: autograd would keep every "
        "fetched layer until backward.",
    ),
    (
        lambda r: r.offload == "weights" and r.precision == "amp-fp16",
        "a gradient scaler checks gradients on one device, and with the weights on the host they "
        "are on two. Use 'amp-bf16' or 'bf16'.",
    ),
    (
        lambda r: r.offload in ("optimizer", "weights") and r.optimizer in _8BIT,
        "bitsandbytes' 8-bit optimizers keep their state where the GPU can reach it. For state on "
        "the host take 'paged-adamw8bit' without offload, or 'adamw' with it.",
    ),
    (
        lambda r: r.ranks > 1 and r.precision == "amp-fp16",
        "a gradient scaler looks at one GPU's gradients, and with sharding each has a part of "
        "them. Use 'amp-bf16' or 'bf16'.",
    ),
    (
        lambda r: r.ranks > 1 and r.optimizer not in ("adamw", "sgd"),
        "with sharding every GPU steps its own part of each tensor: 'adamw' and 'sgd' can, whose "
        "arithmetic is number by number.",
    ),
    (
        lambda r: r.ranks > 1 and r.quantize is not None,
        "bitsandbytes' quantized weights cannot be cut by rows: leave out quantize, or train on "
        "one GPU.",
    ),
    (
        lambda r: r.ranks > 1 and r.optimizer_in_backward,
        "with sharding a gradient is there only when all GPUs have summed it, after the hook that "
        "optimizer_in_backward uses. It is freed in parts anyway. Choose one.",
    ),
    (
        lambda r: r.ranks > 1 and r.offload in ("activations", "optimizer"),
        "with sharding the shares as a whole can live on the host: offload 'weights', which takes "
        "the optimizer along, or nothing.",
    ),
    (
        lambda r: r.attention == "flash" and r.precision == "fp32",
        "the flash kernel computes in half precision only: take attention 'sdpa', or another "
        "precision.",
    ),
)

_CARD_LACKS: tuple[tuple[Callable[[Recipe, Gpu], bool], str], ...] = (
    (
        lambda r, card: "bf16" in r.precision and not card.bf16_native,
        "{card} has no bfloat16 in hardware: PyTorch only emulates it there. Use 'amp-fp16' or "
        "'fp32' instead of {recipe.precision!r}.",
    ),
    (
        lambda r, card: r.attention == "flash" and card.unified,
        "the flash kernel is not written for {card}: take attention 'sdpa' there.",
    ),
    (
        # The flash kernels are written for NVIDIA's Ampere and later, which brought bfloat16.
        lambda r, card: r.attention == "flash" and not card.bf16_native,
        "{card} is too old for the flash kernel, which needs Ampere or later. Take attention "
        "'sdpa', which falls back to another.",
    ),
    (
        lambda r, card: (r.quantize is not None or r.optimizer in _8BIT) and card.unified,
        "bitsandbytes has no kernels for {card}: leave out quantize and 8-bit optimizers there.",
    ),
    (
        # Source: ``has_imma`` in bitsandbytes' cuda_specs.py, and what it is asked for.
        lambda r, card: r.quantize == "int8" and (card.compute_capability or (99, 0)) < (7, 5),
        "{card} has no int8 tensor cores, which LLM.int8() needs: quantize to 'nf4' there.",
    ),
)
