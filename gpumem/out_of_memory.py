"""The simulated out-of-memory error, and how real ones are recognised and read."""

import re

import torch

from gpumem.units import format_bytes


def requested_bytes(error: BaseException) -> int:
    """Return what the failed request asked for, 0 where the message does not say."""
    if isinstance(error, SimulatedOutOfMemory):
        return error.requested_bytes
    return _stated_bytes(error, r"ried to allocate ([\d.]+) (\w+)")


def allocated_bytes(error: BaseException) -> int:
    """Return what PyTorch held when a CUDA request failed, 0 where the message does not say."""
    return _stated_bytes(error, r"([\d.]+) (\w+) is allocated by PyTorch")


def _stated_bytes(error: BaseException, pattern: str) -> int:
    units = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
    found = re.search(pattern, str(error))
    if found is None or found[2] not in units:
        return 0  # another wording: the caller shows no number
    return int(float(found[1]) * units[found[2]])


class SimulatedOutOfMemory(torch.OutOfMemoryError):
    """A request went past the budget of a pretended device. Means what the real error means."""

    def __init__(self, requested_bytes: int, live_bytes: int, budget_bytes: int) -> None:
        self.requested_bytes = requested_bytes
        super().__init__(
            f"Simulated device out of memory. Tried to allocate {format_bytes(requested_bytes)}. "
            f"The pretended device allows {format_bytes(budget_bytes)}, of which "
            f"{format_bytes(live_bytes)} is in use."
        )


# What drivers, libraries and the CPU say in a plain RuntimeError.
_SHORTAGES = ("out of memory", "can't allocate memory", "status_alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether it is PyTorch's own class, or a RuntimeError by which others say it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _SHORTAGES)
