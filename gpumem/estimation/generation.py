"""A conversation as an experiment, the same for a real run and for a simulation.

    serving = Serving(users=4, prompt_tokens=2048, new_tokens=512, quantize="nf4")
    run = lab.measure(generation("Llama-3.1-8B", serving), steps=1, track=False)

A step is one call of transformers' ``generate``: all users' prompts in one batch, and as many new
tokens for each as were asked for. Beside a vision tower each prompt begins with an image.

Limits: random weights and tokens; on a real GPU a row that meets an end token is padded, and the
call ends early if all do.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from gpumem.estimation.recipe import QUANTIZATIONS, unsupported
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError, boolean, one_of, positive_int

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from transformers import PreTrainedConfig

PRECISIONS = ("bf16", "fp16", "fp32")
CACHES = ("dynamic", "static", "paged")
KV_DTYPES = ("fp8",)
_CHOICES = {
    "precision": PRECISIONS,
    "quantize": QUANTIZATIONS,
    "cache": CACHES,
    "kv_dtype": KV_DTYPES,
    "attention": ("sdpa", "eager"),
}
MOST = {"users": 65_536, "prompt_tokens": 1 << 22, "new_tokens": 1 << 16}
#: In the prompts of one batch.
MOST_TOKENS = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How questions are answered.

    Attributes:
        users: conversations in one batch.
        prompt_tokens: tokens of each prompt.
        new_tokens: tokens of each answer. The last is not read again, so that the cache ends with
            ``prompt_tokens + new_tokens - 1``.
        precision: of weights and activations, one of ``PRECISIONS``.
        quantize: weights in 4 or 8 bit, one of ``QUANTIZATIONS``; None leaves them.
        cache: ``"dynamic"`` is transformers' default, which grows by concatenation; ``"static"``
            takes its final size at once; ``"paged"`` is vLLM's (`gpumem.estimation.paged`).
        kv_dtype: the cache's numbers, ``"fp8"``; None: those of ``precision``. transformers has
            such a cache as a dynamic one.
        attention: ``"sdpa"`` or ``"eager"``.
        padded: whether the prompts of several users differ in length, so that all but the longest
            are padded: attention then takes a mask, and no kernel that has none.

    Raises:
        InputError: a value that is not allowed, or two that contradict each other.
    """

    users: int = 1
    prompt_tokens: int = 2048
    new_tokens: int = 512
    precision: str = "bf16"
    quantize: str | None = None
    cache: str = "dynamic"
    kv_dtype: str | None = None
    attention: str = "sdpa"
    padded: bool = False

    # What else `build_model` and `unsupported` ask of a recipe.
    lora: ClassVar[None] = None
    ranks: ClassVar[int] = 1
    offload: ClassVar[str] = "none"
    checkpointing: ClassVar[bool] = False
    optimizer: ClassVar[str] = ""
    autocast_dtype: ClassVar[None] = None
    instead_of_bf16: ClassVar[str] = "precision 'fp16'"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in MOST:
                value = positive_int(value, name, most=MOST[name])
            elif name == "padded":
                value = boolean(value, name)
            elif value is not None or name not in ("quantize", "kv_dtype"):
                value = one_of(value, _CHOICES[name], name)
            object.__setattr__(self, name, value)
        if self.users * self.prompt_tokens > MOST_TOKENS:
            raise InputError(f"users × prompt_tokens must be at most {MOST_TOKENS} in one batch")
        if self.padded and self.cache == "static":
            raise InputError("a padded batch is known with cache 'dynamic' only")
        if self.cache == "paged" and (self.padded or self.quantize == "int8"):
            why = "pads no prompt" if self.padded else "rounds to int8 only what is stored so"
            raise InputError(f"vLLM {why}: take another cache than 'paged', or leave that out")
        if self.kv_dtype and self.cache == "static":
            raise InputError(
                "transformers has no static cache in fp8: take cache 'dynamic' or 'paged'"
            )

    @property
    def who(self) -> str:
        """Who is answered, in words."""
        return "1 user" if self.users == 1 else f"{self.users} users"

    @property
    def seq_len(self) -> int:
        """Tokens that the model reads in one conversation."""
        return self.prompt_tokens + self.new_tokens - 1

    @property
    def weights_dtype(self) -> "torch.dtype":
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[
            self.precision
        ]

    def but(self, **changes: Any) -> "Serving":
        """Return the same with some fields changed. Errors as for a new one."""
        for name in changes:
            one_of(name, [field.name for field in fields(self)], "field of serving")
        return replace(self, **changes)

    def check(self, gpu: Gpu) -> None:
        """Raise `InputError` with the reason if ``gpu`` cannot do all of this."""
        for reason in unsupported(self, gpu):
            raise InputError(reason)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        return asdict(self)

    def __str__(self) -> str:
        parts = [self.who, f"{self.prompt_tokens} + {self.new_tokens} tokens", self.precision]
        parts += [
            "padded" * self.padded,
            self.quantize,
            f"{self.cache} cache{f' in {self.kv_dtype}' * bool(self.kv_dtype)}",
        ]
        return ", ".join(filter(None, parts))


def generation(
    model: "str | Path | PreTrainedConfig", serving: Serving | None = None, **changes: Any
) -> Callable[..., Iterator[float]]:
    """Return the experiment that answers with ``model``.

    Args:
        model: a model of the table, a folder with a ``config.json``, a hub id when online, or a
            transformers config.
        serving: how; by default one user's 2048 tokens.
        **changes: its fields to change, ``users=8``.

    Returns:
        ``experiment(device, layers=None)``; there is no loss, so each step yields 0.

    Raises:
        InputError: unknown model or field, a paged cache, which is not transformers', or a library
            that is missing. The experiment itself raises it where the model cannot answer so.
    """
    from gpumem.estimation.model_building import possible_for
    from gpumem.estimation.training import import_libraries
    from gpumem.models.config import find_generator

    serving = (serving or Serving()).but(**changes)
    if serving.cache == "paged":
        raise InputError("a paged cache is vLLM's: `serve` computes it, and nothing here runs it")
    name, config = find_generator(model)
    serving = possible_for(config, serving)
    import_libraries(serving)

    def experiment(device: "torch.device", layers: int | None = None) -> Iterator[float]:
        built = answering(name, config, serving, device, layers)
        while True:
            built()
            yield 0.0

    experiment.__name__ = f"{name}: {serving}"[:200]
    return experiment


def answering(
    name: str, config: Any, serving: Serving, device: "torch.device", layers: int | None
) -> "Conversation":
    """Return a model of ``config``, ready to answer; errors as for `generation`'s experiment."""
    from gpumem.estimation.model_building import build_model
    from gpumem.estimation.training import refusing

    with refusing(name, "served"):
        return Conversation(name, build_model(config, serving, device, layers).eval(), serving)


class Conversation:
    """A model, called to answer once."""

    def __init__(self, name: str, model: Any, serving: Serving) -> None:
        self.name, self.model, self.serving = name, model, serving

    def __call__(self, skipped: int = 0, new_tokens: int | None = None) -> None:
        """Answer all users once.

        ``skipped`` tokens of the answers are already part of the prompts, and ``new_tokens`` are
        still to come, by default the others.
        """
        import torch

        from gpumem.estimation.training import images_for, refusing
        from gpumem.models.catalogue import image_tokens

        serving, config = self.serving, self.model.config
        known = config.get_text_config().vocab_size
        if image_tokens(config):
            known = min(known, config.image_token_id)
        # No prompt has the token that pads: `generate` would make a mask for it.
        pad = self.model.generation_config.pad_token_id
        beyond = [range(known)] if pad is None else [range(min(pad, known)), range(pad + 1, known)]
        tokens = max(beyond, key=len)
        device = self.model.get_input_embeddings().weight.device
        shape = serving.users, serving.prompt_tokens + skipped
        with refusing(self.name, "served"), _quietly():
            ids = torch.randint(tokens.start, tokens.stop, shape, device="cpu")
            ids = ids.to(device)  # as from a tokenizer
            self.model.generate(
                ids,
                max_new_tokens=new_tokens or serving.new_tokens - skipped,
                do_sample=False,
                use_cache=True,
                **_padding(serving, ids),
                **_cache(serving),
                **images_for(config, ids),
            )


def _padding(serving: Serving, ids: "torch.Tensor") -> dict[str, Any]:
    """Return the mask of a batch whose first prompt is one token shorter than all others."""
    import torch

    if not serving.padded or serving.users == 1:
        return {}
    mask = torch.ones(ids.shape, dtype=torch.int64)
    mask[0, 0] = 0
    mask = mask.to(ids.device)
    mask.has_padding = True  # a simulation has no values to look at
    return {"attention_mask": mask}


def _cache(serving: Serving) -> dict[str, Any]:
    """Return what ``generate`` is told about its cache."""
    if serving.kv_dtype == "fp8":
        return {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    if serving.cache == "static":
        return {"cache_implementation": "static", "disable_compile": True}
    return {}


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' advice about padding: no prompt here has any."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
