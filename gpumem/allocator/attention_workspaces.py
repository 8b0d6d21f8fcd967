"""What the backward of fused attention takes from PyTorch's allocator beside its results.

Flash: a number for each row of the query, and the query's gradient summed in float32. Where several
query heads share a key head, the keys' and values' gradients for every query head besides, before
they are added up. Memory-efficient: the same number for each row, and tiles in which the gradients
are summed.

Sources, in PyTorch's ``aten/src/ATen/native/transformers/cuda``: ``mha_bwd`` in
``flash_attn/flash_api.cpp``; ``_efficient_attention_backward`` in ``attention_backward.cu`` with
``workspace_size`` in ``mem_eff_attention/kernel_backward.h``. Which tiles its kernels have was read
from what they take on phantom GPUs, as tests/phantom/test_attention.py does again.

Limits: flash without ``torch.use_deterministic_algorithms``; no bias that needs a gradient. Dropout
makes the memory-efficient kernel of GPUs with 99 KiB of shared memory another one for heads of 65
to 96, which is not seen.
"""

from math import prod

from gpumem.hardware.catalogue import Gpu
from gpumem.trace import Trace

#: A block of this backward pass, counted from 0 as they are taken, and by how many bytes it grows.
Change = tuple[int, int]
Shape = tuple[int, ...]
FLASH = "_scaled_dot_product_flash_attention_backward"
EFFICIENT = "_scaled_dot_product_efficient_attention_backward"
#: With at least 163 KiB of shared memory for a block of threads.
_LARGE = ((8, 0), (9, 0), (10, 0))
_KEYS = 64  # in a tile
_MOST_SPLITS = 200


def backward_blocks(trace: Trace, gpu: Gpu) -> dict[int, list[Change]]:
    """Return what each fused backward on ``gpu`` takes and frees, by its last result's event."""
    found, results = {}, []
    for index, storage, change_bytes in trace.changes():
        if storage.operator not in (FLASH, EFFICIENT) or change_bytes <= 0:
            results = []
            continue
        results.append(storage)
        if len(results) == 3:  # the gradients of query, key and value
            query, key, _ = results
            item_bytes = query.nbytes // prod(query.shape)
            if storage.operator == FLASH:
                found[index] = flash_backward(query.shape, key.shape, item_bytes)
            elif gpu.compute_capability is not None:
                found[index] = efficient_backward(query.shape, key.shape, item_bytes, gpu)
            results = []
    return found


def flash_backward(query: Shape, key: Shape, item_bytes: int) -> list[Change]:
    """Return what flash attention's backward takes and frees.

    ``query`` and ``key`` are shapes, [batch, heads, tokens, head size].
    """
    batch, heads, tokens, size = query
    rows = batch * heads * _up(tokens, 128)
    blocks = [4 * rows, 4 * rows * _up(size, 32 if size <= 128 else 64)]
    if key[1] != heads:
        blocks += 2 * [batch * heads * key[2] * size * item_bytes]
    taken = list(enumerate(blocks))
    return taken + [(block, -nbytes) for block, nbytes in reversed(taken)]


def efficient_backward(query: Shape, key: Shape, item_bytes: int, gpu: Gpu) -> list[Change]:
    """Return what memory-efficient attention's backward takes and frees; shapes as for flash."""
    batch, heads, tokens, size = query
    row_bytes = 4 * batch * heads * tokens
    tiles_bytes = batch * heads * _tiles_bytes(query, key, item_bytes, gpu)
    if item_bytes == 2:
        return [(0, row_bytes), (1, tiles_bytes), (0, -row_bytes), (1, -tiles_bytes)]
    # In float32 the product of gradient and result is summed, and the sums are brought in order.
    product_bytes = row_bytes * size
    changes = [(0, product_bytes), (1, row_bytes)]
    rows, tiles = 1, 2
    if heads > 1 and tokens > 1:
        changes += [(2, row_bytes), (1, -row_bytes)]
        rows, tiles = 2, 3
    changes += [(0, -product_bytes), (tiles, tiles_bytes)]
    return [*changes, (rows, -row_bytes), (tiles, -tiles_bytes)]


def _tiles_bytes(query: Shape, key: Shape, item_bytes: int, gpu: Gpu) -> int:
    """Return the bytes of one head's tiles: the query's, each with a lock, then keys and values."""
    batch, heads, tokens, size = query
    rows, columns, sums_keys = _tile(size, item_bytes, gpu)
    tile_bytes = 4 * rows * columns + 16
    nbytes = -(-tokens // rows) * -(-size // columns) * tile_bytes
    if sums_keys:
        splits = min(-(-key[2] // _KEYS), max(1, _MOST_SPLITS // (batch * heads)))
        nbytes += 2 * splits * 4 * _KEYS * _up(size, rows)
    return nbytes


def _tile(size: int, item_bytes: int, gpu: Gpu) -> tuple[int, int, bool]:
    """Return rows and columns of a query's tile, and whether keys and values need sums, too."""
    if size <= 64:
        return 64, 64, False
    large = gpu.compute_capability in _LARGE
    if item_bytes == 4:
        return (128, 64, False) if large else (64, 64, False)
    if size > 128:
        return 128, 64, True
    if large:
        return 128, 128, False
    if gpu.compute_capability[0] == 7 or size <= 96:
        return 128, 64, False
    return 64, 64, True


def _up(number: int, step: int) -> int:
    """Round up to whole steps."""
    return -(-number // step) * step
