"""Loading, timed: what lesson 21 compares workers and pinning with.

    rows_per_second("cpu", num_workers=2)

Limits: rates are those of a machine as busy as it is.
"""

import re
import time
from collections.abc import Sequence
from typing import Any

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
