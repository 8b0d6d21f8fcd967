"""Exercises of lesson 16: another model of 70B, and double quantization within a memory target."""

import torch

from gpumem.inputs import shown
from labkit.exercises import checks
from labkit.exercises.engine import check_of

IN_LAYERS, WIDTH, VOCABULARY = 68_451_041_280, 8192, 128_256  # Llama-3.1-70B
MOST_BITS, MOST_OFF, GROUP = 8.3, 0.003, 256


def weights_gb():
    in_layers = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672)
    bits = 4 + 8 / 64 + 32 / (64 * 256)
    embedding = output_layer = 2 * 128_256 * 8192
    return (in_layers * bits / 8 + embedding + output_layer) / 1e9


@check_of("16-1", weights_gb)
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


def squeeze(scales):
    groups = scales.reshape(-1, 256)
    steps = groups.amax(1, keepdim=True) / 255  # FP32: 32 / 256 bits for each scale
    codes = (groups / steps).round().to(torch.uint8)  # 0 to 255
    return codes, steps


@check_of("16-2", squeeze)
def check_squeeze(answer):
    # Some blocks of the matrix hold much larger weights.
    weight = 0.02 * torch.randn(64 * 8 * GROUP, generator=torch.Generator().manual_seed(0))
    scales = weight.view(-1, 64).abs().amax(1)
    scales[GROUP : GROUP + 8] *= 50
    given = checks.call(answer, scales.clone())
    pair = isinstance(given, tuple | list) and len(given) == 2
    if not pair or not all(map(torch.is_tensor, given)):
        return f"`squeeze` should return two tensors, codes and steps; it returned {shown(given)}."
    codes, steps = given
    if codes.is_floating_point():
        return f"The codes should be integers; yours are {codes.dtype}."
    restored = codes * steps
    if restored.numel() != scales.numel():
        return f"`codes * steps` is {restored.numel()} numbers for {scales.numel()} scales."
    stored = sum(each.untyped_storage().nbytes() for each in given)
    bits = 8 * stored / scales.numel()
    if bits > MOST_BITS:
        return f"Your tensors take {bits:.3g} bits for each scale; {MOST_BITS} are allowed."
    groups = scales.view(-1, GROUP)
    apart = (restored.float().view(-1, GROUP) - groups).abs().amax(1)
    off = float((apart / groups.amax(1)).max())
    if not off <= MOST_OFF:
        return (
            f"{bits:.3g} bits for each scale are few enough, but one is off by {off:.2%} of the "
            f"largest in its group; {MOST_OFF:.1%} is allowed."
        )
    return checks.Correct(
        f"That is right: {bits:.4g} bits for each scale, {4 + bits / 64:.4g} for each weight."
    )
