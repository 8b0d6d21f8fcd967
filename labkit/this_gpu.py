"""This machine's GPU: as a card of the catalogue, and as the name of its folder of results.

Limits: cards of one name and one size share a folder, whatever their clocks and power limits.
"""

import math
import re
from dataclasses import replace

import torch

from labkit import hardware
from labkit.catalogue import Gpu
from labkit.memory import GIB, InputError

#: Cards of one kind report capacities that differ by less than this share: drivers and ECC.
ALIKE = 0.06


def gpu_key(name: str, capacity_bytes: int | None = None) -> str:
    """The results folder of the GPU called ``name``: its catalogue key, else made from it.

    Two sizes of one name ("NVIDIA A100") get a folder each.

    Args:
        name: as the driver says it.
        capacity_bytes: all its memory; None where that is unknown.
    """
    card = _listed(name, capacity_bytes)
    if card is not None:
        return card.key
    key = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"
    return key if capacity_bytes is None else f"{key}-{math.ceil(capacity_bytes / GIB)}gib"


def this_card() -> Gpu:
    """This GPU as the catalogue has it; an unlisted one with its own generation and memory."""
    here = hardware.machine()
    card = _listed(here.name, here.capacity_bytes)
    if card is not None:
        return card
    generation = torch.cuda.get_device_capability()
    known = [gpu for gpu in hardware.GPUS.values() if gpu.compute_capability]
    near = min(known, key=lambda gpu: abs(gpu.compute_capability[0] - generation[0]))
    return replace(
        near, key=gpu_key(here.name, here.capacity_bytes), name=here.name,
        compute_capability=generation, usable_bytes=here.capacity_bytes,
        bf16_native=generation >= (8, 0),
    )  # fmt: skip


def _listed(name: str, capacity_bytes: int | None) -> Gpu | None:
    """The catalogue's card of this name and size, if it has one."""
    near, spelled = list(hardware.GPUS.values()), [name]
    if capacity_bytes is not None:
        near = [c for c in near if abs(c.usable_bytes - capacity_bytes) <= ALIKE * c.usable_bytes]
        spelled += [f"{name} {card.memory_gb:g}GB" for card in near]
    for spelling in spelled:
        try:
            card = hardware.gpu(spelling)
        except InputError:  # the catalogue lacks it, or has several sizes of it
            continue
        if card in near:
            return card
    return None
