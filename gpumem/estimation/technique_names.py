"""What memory techniques are called, and what each changes in the training.

`labkit advise`, the cheat sheet, the page "Will it fit?" and `labkit phantom --fix` take names and
words from here.

Limits: those that more than one of them knows. The cheat sheet and `--fix` have further ones.
"""

from typing import NamedTuple


class Known(NamedTuple):
    """A technique.

    Attributes:
        name: the field's term.
        changes: what it trains otherwise than AdamW in float32, a sentence each.
        besides: what else a training notices of it.
    """

    name: str
    changes: tuple[str, ...] = ()
    besides: str = ""

    @property
    def in_training(self) -> str:
        """All that a training notices, in one line; empty: nothing."""
        return "; ".join((*self.changes, *filter(None, (self.besides,))))


_ADAPTERS = "only adapters are trained"
KNOWN = {
    "fused-attention": Known("fused attention"),
    "checkpointing": Known("gradient checkpointing"),
    "half-rows": Known(
        "accumulation of two halves",
        besides="the same where all rows count the same; batch norms see half of them",
    ),
    "chunked-loss": Known("chunked loss", besides="the forward pass gives no logits"),
    "step-in-backward": Known(
        "optimizer in backward",
        besides="gradients are gone once used: no clipping by their norm, no accumulation",
    ),
    "offload-activations": Known("activations on the host"),
    "offload-optimizer": Known("optimizer on the host"),
    "offload-weights": Known("weights on the host"),
    "autocast": Known("mixed precision", besides="products are rounded to 16 bits"),
    "bf16": Known(
        "BF16 throughout", ("bf16 weights: updates smaller than 1/256 of a weight can be lost",)
    ),
    "8bit-adam": Known("8-bit optimizer", ("the optimizer's state is rounded to 8 bits",)),
    "adafactor": Known(
        "Adafactor",
        (
            "Adafactor keeps second moments by row and column only",
            "Adafactor has no momentum",
        ),
    ),
    "sgd": Known(
        "SGD",
        (
            "SGD: one learning rate for all weights, where AdamW fits one to each",
            "SGD needs another learning rate: find it anew",
        ),
    ),
    "lora": Known("LoRA", (_ADAPTERS,)),
    "qlora": Known("QLoRA", (_ADAPTERS, "the frozen weights are rounded to 4 bits")),
}
