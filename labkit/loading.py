"""Loading, timed: what lesson 21 compares workers and pinning with, and what reading a file holds.

    step_ends("one slow", "cpu", num_workers=2)

Limits: times are those of a machine as busy as it is. A step is a pause: no time of a GPU's.
"""

import re
import time
import tracemalloc
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from gpumem.inputs import one_of
from gpumem.models.text import corpus

PAGE, TOKENS = 8192, 1024  # characters of a page, words of it that are kept
BATCH, BATCHES = 16, 32  # rows, and how many batches an epoch has
STEP_SECONDS = 0.02  # in which Python waits for the GPU
SLOW_SECONDS, SLOW_BATCH = 0.4, 24  # how long one row of this batch takes, counted from 0
TIMED = 2  # epochs


def split_words(page: str) -> torch.Tensor:
    """Return the lengths of a page's first words: slow, as splitting text is."""
    words = re.findall(r"\w+|\W", page)[:TOKENS]
    return torch.tensor([len(word) for word in words])


class Pages(Dataset):
    """Pages of text as rows of word lengths.

    ``rows`` are "split" when they are asked for, "stored", or stored but for "one slow" row.
    """

    def __init__(self, rows: str) -> None:
        self.rows = one_of(rows, ("stored", "split", "one slow"), "rows")
        text = corpus()
        self.pages = [text[start : start + PAGE] for start in range(0, len(text) - PAGE, PAGE)]
        self.stored = torch.ones(TOKENS, dtype=torch.long)

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, number: int) -> torch.Tensor:
        if self.rows == "split":
            return split_words(self.pages[number % len(self.pages)])
        if self.rows == "one slow" and number == BATCH * SLOW_BATCH:
            time.sleep(SLOW_SECONDS)
        return self.stored


def step_ends(
    rows: str, device: str, *, step_seconds: float = STEP_SECONDS, **options: Any
) -> list[float]:
    """Return after how many seconds of an epoch each step ends, with these ``options`` of a loader.

    The fastest of two epochs counts, after one that starts the workers that are kept.
    """
    loader = DataLoader(Pages(rows), batch_size=BATCH, **options)
    epochs = []
    for _ in range(1 + TIMED):
        ends, start = [], time.perf_counter()
        for batch in loader:
            batch.to(device, non_blocking=True)
            time.sleep(step_seconds)
            ends.append(time.perf_counter() - start)
        epochs.append(ends)
    return min(epochs[1:], key=lambda ends: ends[-1])


def switch_speeds(device: str) -> dict[str, float]:
    """Return, for each switch of the loader, the rate of split rows with it over that without.

    Nothing runs beside the loading. Workers that are kept are compared with none, and with workers
    that start anew in each epoch; pinned memory is for GPUs only.
    """

    def seconds(**options: Any) -> float:
        return step_ends("split", device, step_seconds=0, **options)[-1]

    plain, kept = seconds(), seconds(num_workers=2, persistent_workers=True)
    speeds = {"workers": plain / kept, "persistent workers": seconds(num_workers=2) / kept}
    if device == "cuda":
        speeds["pinned memory"] = plain / seconds(pin_memory=True)
    return speeds


def most_held(rows: Iterable[Any]) -> int:
    """Return the most bytes that Python and NumPy hold while something reads all ``rows``."""
    tracemalloc.start()
    try:
        for row in rows:
            row.sum()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
