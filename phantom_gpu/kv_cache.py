"""transformers' caches of keys and values: where they lie, and what a token of one user takes.

Every layer's update is seen, so that a report can name the cache, and say what a longer
conversation would take. Of an encoder-decoder both caches count, and the tokens of both.

Limits: caches of transformers from 4.56 on, whose layers are objects. Beside windows of attention,
what a token takes is known from the second token of an answer on; until then it is an average.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from gpumem.costs import tensors_in
from phantom_gpu.report_records import CacheHeld

#: Called with a cache, the number of a layer, and the keys that it reads, after each update.
SEEN_BY: list[Callable[[Any, int, torch.Tensor], None]] = []
#: An encoder-decoder's cache of its own tokens -> that of the encoder's, and the other way round.
_BESIDE: weakref.WeakKeyDictionary[Any, weakref.ref] = weakref.WeakKeyDictionary()


class Caches:
    """What is known of the largest cache of this process."""

    def __init__(self) -> None:
        self.largest: CacheHeld | None = None
        self._largest_is = 0  # which cache
        self._before: tuple[int, int, int] = (0, 0, 0)  # which cache, its tokens and bytes

    def filled(self, cache: Any, keys: torch.Tensor) -> None:
        """Note that the last layer reads ``keys``, [users, heads, tokens, size]."""
        users, tokens, nbytes = keys.shape[0], _tokens_of(cache, keys), _bytes_of(cache)
        which, tokens_before, bytes_before = self._before
        more, more_bytes = tokens - tokens_before, nbytes - bytes_before
        self._before = id(cache), tokens, nbytes
        each = nbytes // (users * tokens)
        if which == id(cache) and more > 0 and more_bytes >= 0:
            each = more_bytes // (users * more)
            if self.largest is not None and self._largest_is == which:
                self.largest = self.largest._replace(token_bytes=each)
        other = _BESIDE.get(cache, lambda: None)()
        if other is not None:
            read = [layer.keys for layer in other.layers[:1] if layer.keys is not None]
            tokens += sum(keys.shape[-2] for keys in read)
            nbytes += _bytes_of(other)
        if self.largest is None or nbytes >= self.largest.nbytes:
            self.largest, self._largest_is = CacheHeld(nbytes, users, tokens, each), id(cache)


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """Return the tensors on a GPU of one layer of a cache."""
    return [tensor for tensor in tensors_in(list(vars(layer).values())) if tensor.is_cuda]


def _tokens_of(cache: Any, keys: torch.Tensor) -> int:
    """Return the tokens that went into ``cache``: a layer with a window keeps the last of them."""
    counted = (getattr(layer, "cumulative_length", None) for layer in cache.layers)
    return max([keys.shape[-2], *(n for n in counted if isinstance(n, int))])


def _bytes_of(cache: Any) -> int:
    held = {t.untyped_storage().data_ptr(): t for each in cache.layers for t in tensors_of(each)}
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def after_caches(module: Any) -> None:
    """See what is written into caches."""
    plain, plain_pair = module.Cache.update, module.EncoderDecoderCache.__init__

    @functools.wraps(plain_pair)
    def pair(self: Any, *caches: Any, **named: Any) -> None:
        plain_pair(self, *caches, **named)
        own, encoders = self.self_attention_cache, self.cross_attention_cache
        _BESIDE[own], _BESIDE[encoders] = weakref.ref(encoders), weakref.ref(own)

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

    module.Cache.update, module.EncoderDecoderCache.__init__ = update, pair
