"""transformers' caches of keys and values: where they lie, and what a token of one user takes.

Every layer's update is seen, so that a report can name the cache, and say what a longer
conversation would take.

Limits: caches of transformers from 4.56 on, whose layers are objects. Beside windows of attention a
token counts with what the last one added.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from gpumem.costs import tensors_in
from phantom_gpu.report_records import CacheHeld

#: Called with a cache, the number of a layer, and the keys that it reads, after each update.
SEEN_BY: list[Callable[[Any, int, torch.Tensor], None]] = []


class Caches:
    """What is known of the largest cache of this process."""

    def __init__(self) -> None:
        self.largest: CacheHeld | None = None
        self._before: tuple[int, int, int] = (0, 0, 0)  # which cache, its tokens and bytes

    def filled(self, cache: Any, keys: torch.Tensor) -> None:
        """Note that the last layer reads ``keys``, [users, heads, tokens, size]."""
        users, tokens = keys.shape[0], keys.shape[-2]
        held = {
            t.untyped_storage().data_ptr(): t for each in cache.layers for t in tensors_of(each)
        }
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
        which, tokens_before, bytes_before = self._before
        more = tokens - tokens_before
        self._before = id(cache), tokens, nbytes
        each = nbytes // (users * tokens)
        if which == id(cache) and more > 0:
            each = (nbytes - bytes_before) // (users * more)
        if self.largest is None or nbytes >= self.largest.nbytes:
            self.largest = CacheHeld(nbytes, users, tokens, each)


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """Return the tensors on a GPU of one layer of a cache."""
    return [tensor for tensor in tensors_in(list(vars(layer).values())) if tensor.is_cuda]


def after_caches(module: Any) -> None:
    """See what is written into caches."""
    plain = module.Cache.update

    @functools.wraps(plain)
    def update(
        self: Any, keys: Any, values: Any, layer_idx: int, *args: Any, **options: Any
    ) -> Any:
        found = plain(self, keys, values, layer_idx, *args, **options)
        layers = getattr(self, "layers", ())
        if SEEN_BY and layer_idx < len(layers) and keys.is_cuda:
            for seen in SEEN_BY:
                seen(self, layer_idx, found[0])
        return found

    module.Cache.update = update
