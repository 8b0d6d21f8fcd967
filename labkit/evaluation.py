"""How well a model predicts text that it was not trained on.

Limits: the text is the corpus's test split, code and English; figures published for other texts
are not comparable.
"""

from typing import TYPE_CHECKING, Any

import torch

from labkit.half_products import half_products
from labkit.memory import InputError, positive_int
from labkit.text import batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def held_out_loss(
    model: "PreTrainedModel",
    *,
    tokenizer: Any = None,
    rows: int = 16,
    seq_len: int = 256,
    batch_size: int = 4,
    seed: int = 0,
) -> float:
    """Mean loss per token on the test split, in nats; ``math.exp`` of it is the perplexity.

    Args:
        model: a transformers causal language model (adapters and quantised layers included). It
            is evaluated without dropout and without gradients, and left in the mode it was in.
        tokenizer: as for ``batches``; without one a token is a byte.
        rows: how many rows of text.
        seq_len: tokens per row.
        batch_size: rows at once; it changes the memory, not the result.
        seed: which rows.

    Raises:
        InputError: a count that is not a positive whole number, or a ``seq_len`` of 1 or beyond the
            text.
    """
    rows = positive_int(rows, "rows")
    if positive_int(seq_len, "seq_len") < 2:
        raise InputError("seq_len must be at least 2: each token is predicted from those before it")
    device = next(model.parameters()).device
    [ids] = batches(
        device=device, batch_size=rows, seq_len=seq_len, seed=seed, split="test", steps=1,
        tokenizer=tokenizer,
    )  # fmt: skip
    modes = {module: module.training for module in model.modules()}  # a part may be frozen
    model.eval()
    try:
        with torch.no_grad(), half_products(device):
            total = sum(
                float(model(input_ids=part, labels=part).loss) * len(part)
                for part in ids.split(positive_int(batch_size, "batch_size"))
            )
    finally:
        for module, training in modes.items():
            module.training = training
    return total / rows
