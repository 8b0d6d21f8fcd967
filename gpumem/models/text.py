"""The corpus and the batches: real text that every machine has, without a download.

The text is the top level of Python's standard library, some 4 MB of code and English, split by file
into train and test. A token is a byte unless a tokenizer is given, so that the same ids fit any
model's vocabulary.

Limits: the text is that of the running Python, so losses differ a little between Python versions;
they never differ between precisions, devices or runs. Rows start anywhere, also inside a word,
and hold no padding.
"""

import functools
import hashlib
import itertools
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpumem.inputs import InputError, one_of, positive_int

SPLITS = ("train", "test")
# Written for one machine by whoever installed Python there.
_LOCAL = ("_sysconfigdata", "sitecustomize", "usercustomize")


@functools.cache
def corpus(split: str = "train") -> str:
    """Return the text of one split: about 4 million characters for ``train``, a tenth for ``test``.

    A file belongs to the split that the hash of its name says, on every machine.

    Raises:
        InputError: unknown split, or a Python without the source of its standard library.
    """
    split = one_of(split, SPLITS, "split")
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(folder.glob("*.py")) if _split_of(path.name) == split]
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    if not text:
        raise InputError(f"the corpus is the standard library's source, and {folder} has none")
    return text


def _split_of(name: str) -> str | None:
    """Return the split of a file: one in ten is for testing, and local ones are in none."""
    if name.startswith(_LOCAL):
        return None
    return "test" if hashlib.sha256(name.encode()).digest()[0] % 10 == 0 else "train"


def batches(
    *,
    device: torch.device | str,
    batch_size: int,
    seq_len: int,
    seed: int = 0,
    split: str = "train",
    steps: int | None = None,
    tokenizer: Any = None,
) -> Iterator[torch.Tensor]:
    """Yield batches of token ids from the corpus: the same for the same seed.

    Args:
        device: where the batches are put.
        batch_size, seq_len: rows per batch, tokens per row.
        seed: decides where in the corpus each row starts.
        split: ``"train"`` or ``"test"``.
        steps: how many batches; None never ends.
        tokenizer: a transformers tokenizer; without one a token is a byte, 0 to 255.

    Yields:
        int64 tensors [batch_size, seq_len] on ``device``. They serve as labels too:
        transformers' models shift them.

    Raises:
        InputError: a bad argument, at the call and not at the first batch.
    """
    batch_size = positive_int(batch_size, "batch_size")
    seq_len = positive_int(seq_len, "seq_len")
    if steps is not None:
        steps = positive_int(steps, "steps")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"seed must be a whole number, not {seed!r}")
    text = corpus(split)
    data = text.encode()
    circle = "" if tokenizer is None else text + text  # so that a late start finds enough text
    if tokenizer is None and seq_len > len(data):
        raise InputError(f"seq_len must be at most {len(data)}, the corpus in bytes, not {seq_len}")
    # Python's generator, not torch's: torch's would be a fake tensor in a simulation, and drawing
    # from it would change what an experiment's own torch.manual_seed gives.
    choose = random.Random(seed)

    def row() -> list[int]:
        if tokenizer is None:
            start = choose.randrange(len(data) - seq_len + 1)
            return list(data[start : start + seq_len])
        start = choose.randrange(len(text))
        width = min(8 * seq_len, len(text))  # a token of code is about 3 characters, at most 16
        while True:
            piece = circle[start : start + width]
            ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
            if len(ids) >= seq_len:
                return ids[:seq_len]
            if width == len(text):
                raise InputError(f"seq_len must be at most {len(ids)} with this tokenizer")
            width = min(2 * width, len(text))

    def draw() -> Iterator[torch.Tensor]:
        for _ in itertools.count() if steps is None else range(steps):
            rows = [row() for _ in range(batch_size)]
            yield torch.tensor(rows, dtype=torch.int64, device=device)

    return draw()
