"""Loading, timed and weighed: what lesson 21 compares workers, pinning and streaming with.

    rows_per_second("cpu", num_workers=2)
    most_held_bytes(np.memmap("tokens.bin", np.uint16, "r").reshape(-1, 1024))

Limits: rates are those of a machine as busy as it is. Bytes are what Python and NumPy allocate;
pages of mapped files are not among them.
"""

import re
import time
import tracemalloc
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from gpumem.models.text import corpus

PAGE, TOKENS, BATCH = 8192, 1024, 16  # characters of a page, words of it that are kept, pages
TIMED = 3  # epochs


def split_words(pages: Sequence[str]) -> torch.Tensor:
    """Return a row of word lengths for each page: slow, as splitting text is."""
    words = (re.findall(r"\w+|\W", page)[:TOKENS] for page in pages)
    return torch.tensor([[len(word) for word in row] for row in words])


def rows_per_second(device: str, **options: Any) -> float:
    """Return how many pages of text a DataLoader with these ``options`` brings to ``device``.

    The fastest of three epochs counts, after one that starts the workers that are kept.
    """
    text = corpus()
    pages = [text[start : start + PAGE] for start in range(0, len(text) - PAGE, PAGE)]
    loader = DataLoader(pages, batch_size=BATCH, collate_fn=split_words, **options)
    seconds = []
    for _ in range(1 + TIMED):
        start = time.perf_counter()
        rows = sum(len(batch.to(device, non_blocking=True)) for batch in loader)
        seconds.append(time.perf_counter() - start)
    return rows / min(seconds[1:])


def most_held_bytes(rows: Iterable[np.ndarray]) -> int:
    """Read all ``rows``, and return the most that Python and NumPy held meanwhile, in bytes."""
    tracemalloc.start()
    try:
        for row in rows:
            row.sum()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
