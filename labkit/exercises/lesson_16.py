"""Exercises of lesson 16: another model of 70B, and a memory target for the real model."""

import math
from collections import Counter

import torch
from torch import nn

from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.models.catalogue import pretrained
from labkit.toolbox.losses import held_out_loss
from labkit.values import format_bytes, shown

IN_LAYERS, WIDTH, VOCABULARY = 68_451_041_280, 8192, 128_256  # Llama-3.1-70B
MOST_SHARE, MOST_PERPLEXITY = 0.32, 4 / 3
ROWS, SEQ_LEN = 8, 128


def weights_gb():
    in_layers = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672)
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    embedding = output_layer = 2 * 128_256 * 8192
    return (in_layers * bits / 8 + embedding + output_layer) / 1e9


@check_of(
    "16-1",
    weights_gb,
    "Only two terms of the table depend on the vocabulary. How large are they?",
    "Keep the table's codes, scales and scales of the scales. Embedding and output layer are "
    "128 256 × 8192 weights each, of two bytes.",
)
def check_weights(answer):
    layers = IN_LAYERS * (4 + 8 / 64 + 32 / (64 * 256)) / 8e9
    table = 2 * VOCABULARY * WIDTH / 1e9
    slips = {
        IN_LAYERS * 4.5 / 8e9 + 2 * table: "Those scales are in FP32: double them.",
        IN_LAYERS / 2e9 + 2 * table: "Scales take bytes, too.",
        layers + table: "The output layer is a matrix of its own, as large as the embedding.",
        layers: "Embedding and output layer are weights, too.",
        layers + 4 * 32_000 * WIDTH / 1e9: "That is Llama-2-70B, with 32 000 tokens.",
    }
    right = weights_gb()
    if problem := checks.expect_number(answer, right, rel_tolerance=0.005, unit="GB", slips=slips):
        return problem
    return checks.Correct(
        f"That is right: {right:.1f} GB. The larger vocabulary adds 2.9 GiB to the step above: on "
        "40 GB it does not fit."
    )


class EightBits(nn.Module):
    """A matrix in int8, one scale per row: an embedding for ids, an output layer for vectors."""

    def __init__(self, weight):
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (weight / scale).round().to(torch.int8))

    def forward(self, x):
        if not x.is_floating_point():
            return self.codes[x].float() * self.scale[x]
        return nn.functional.linear(x, self.codes.float() * self.scale)


def shrink(model):
    import bitsandbytes as bnb

    kind = {"quant_type": "nf4", "compress_statistics": True}  # double quantisation
    for name, old in list(model.named_modules()):
        if isinstance(old, nn.Linear) and old is not model.lm_head:
            new = bnb.nn.Linear4bit(
                old.in_features, old.out_features, bias=False, compute_dtype=torch.float32, **kind
            )
            new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, **kind)
            model.set_submodule(name, new)
    # What is left is the embedding, which is the output layer, too: one matrix, now in 8 bits.
    model.model.embed_tokens = model.lm_head = EightBits(model.lm_head.weight.detach())
    return model.to(model.device)


def stored_bytes(model: nn.Module) -> Counter[str]:
    """Return bytes by kind: floats as if in 16 bits, all else as it is.

    A tensor counts whether a module registered it or not, and once however often it is used.
    """
    counted: dict[int, tuple[str, int]] = {}  # by address: views share a storage

    def count(kind: str, tensor: torch.Tensor, divisor: int = 1) -> None:
        storage = tensor.untyped_storage()
        counted[storage.data_ptr()] = (kind, storage.nbytes() // divisor)

    for module in model.modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        for tensor in filter(torch.is_tensor, held.values()):
            state = getattr(tensor, "quant_state", None)
            if state is not None:
                count("4-bit matrices", tensor)
                count("their scales", state.absmax)
                if state.nested:  # then those are codes of one byte, with scales of their own
                    count("their scales", state.state2.absmax)
            elif tensor.is_floating_point():
                count("floats", tensor, divisor=2 if tensor.dtype is torch.float32 else 1)
            else:
                count("integers", tensor)
    found: Counter[str] = Counter()
    for kind, nbytes in counted.values():
        found[kind] += nbytes
    return found


@check_of(
    "16-2",
    shrink,
    "Count: what is the largest part once the matrices are in four bits, and are their "
    "scales as small as they can be?",
    "The embedding is the output layer as well: one module in 8 bits, a scale per row, can serve "
    "both. With it, double quantisation does the rest.",
)
def check_shrink(answer):
    model, tokenizer = pretrained()
    whole = 2 * sum(p.numel() for p in model.parameters())
    reference = _loss(model, tokenizer)
    with torch.no_grad():  # adapting is refused: it would hide what rounding costs
        small = checks.call(answer, model)
    if not isinstance(small, nn.Module):
        return f"`shrink` should return the model; it returned {shown(small)}."
    parts = stored_bytes(small)
    share = sum(parts.values()) / whole
    if share > MOST_SHARE:
        listed = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in parts.items())
        return (
            f"Your model takes {share:.1%} of the 16-bit bytes; {MOST_SHARE:.0%} are allowed. "
            f"It holds: {listed}."
        )
    times = math.exp(_loss(small, tokenizer) - reference)
    if not times <= MOST_PERPLEXITY:
        return (
            f"{share:.1%} of the bytes is little enough, but the perplexity is {times - 1:+.1%} "
            "off. Which part did you round most?"
        )
    return checks.Correct(f"That is right: {share:.1%} of the bytes, perplexity {times - 1:+.1%}.")


def _loss(model: nn.Module, tokenizer) -> float:
    return held_out_loss(model, tokenizer=tokenizer, rows=ROWS, seq_len=SEQ_LEN)
