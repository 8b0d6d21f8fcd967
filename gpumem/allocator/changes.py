"""What a kernel takes from the allocator and gives back while it runs, in order."""

import torch

#: A block, counted from 0 as they are taken, and by how many bytes it grows.
Change = tuple[int, int]


def held(*blocks: int) -> list[Change]:
    """Return the changes of a kernel that takes blocks of these bytes and frees the last first."""
    taken = list(enumerate(blocks))
    return taken + [(block, -nbytes) for block, nbytes in reversed(taken)]


def copies(*tensors: torch.Tensor) -> list[int]:
    """Return the bytes of the copies that make ``tensors`` contiguous, of those that are not."""
    return [t.numel() * t.element_size() for t in tensors if not t.is_contiguous()]


def up(number: int, step: int) -> int:
    """Round up to whole steps."""
    return -(-number // step) * step
