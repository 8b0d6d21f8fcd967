"""Give PyTorch's own CUDA allocator and labkit's model of it the same random requests.

Runs on a phantom GPU: ``python judge.py STEPS SEED CASE ...``, where a case is JSON: settings as
PYTORCH_ALLOC_CONF takes them, the number of streams, and the fraction of the memory that the
process may have, or null. After every request both must say the same bytes, allocated and reserved,
and fail together; at the end they must hold the same blocks. Each case has a process of its own,
which has imported all it needs.
"""

import contextlib
import json
import random
import sys
from multiprocessing import get_context

import torch

from gpumem.allocator.caching import CachingAllocator
from gpumem.out_of_memory import SimulatedOutOfMemory

PAGE_BYTES = 2 << 20


def model_of(settings: str, free_bytes: int, total_bytes: int, fraction: float | None):
    """Return the model for the settings that PyTorch reads."""
    given = dict(pair.split(":") for pair in settings.split(",") if pair)
    options = {}
    if "expandable_segments" in given:
        options["expandable_segments"] = given["expandable_segments"] == "True"
    if "max_split_size_mb" in given:
        options["max_split_bytes"] = int(given["max_split_size_mb"]) << 20
    if "roundup_power2_divisions" in given:
        options["roundup_power2_divisions"] = int(given["roundup_power2_divisions"])
    if "garbage_collection_threshold" in given:
        options["garbage_collection_threshold"] = float(given["garbage_collection_threshold"])
    if fraction is not None:
        options["limit_bytes"] = int(fraction * total_bytes)
    budget_bytes = free_bytes // PAGE_BYTES * PAGE_BYTES
    return CachingAllocator(budget_bytes=budget_bytes, device_bytes=total_bytes, **options)


def random_bytes(rng: random.Random) -> int:
    """Return a request: small ones, medium ones, and a few of almost a GiB."""
    kind = rng.random()
    most = (1 << 14, 2 << 20, 40 << 20, 900 << 20)[(kind >= 0.3) + (kind >= 0.6) + (kind >= 0.97)]
    return rng.randint(1, most)


def blocks(segments: list) -> list:
    """Return what a snapshot holds, in the order of addresses, without the addresses themselves."""
    return [
        (
            segment["segment_type"],
            [(block["size"], block["state"]) for block in segment["blocks"]],
            [b["requested_size"] for b in segment["blocks"] if b["state"] == "active_allocated"],
        )
        for segment in sorted(segments, key=lambda segment: segment["address"])
    ]


def judge(steps: int, seed: int, settings: str, stream_count: int, fraction: float | None) -> str:
    """Return what is equal in one case; raise an AssertionError where something is not."""
    if settings:
        torch._C._accelerator_setAllocatorSettings(settings)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction)
    model = model_of(settings, free_bytes, total_bytes, fraction)
    streams = [torch.cuda.default_stream()]
    streams += [torch.cuda.Stream() for _ in range(1, stream_count)]
    rng = random.Random(seed)
    live, failed = [], 0
    for step in range(steps):
        what = rng.random()
        if live and what < (0.42 if len(live) < 700 else 0.6):
            tensor, handle = live.pop(rng.randrange(len(live)))
            if len(streams) > 1 and rng.random() < 0.4:
                user = rng.randrange(len(streams))
                tensor.record_stream(streams[user])
                model.record_stream(handle, user)
            del tensor
            model.free(handle)
        elif what > 0.999:
            torch.cuda.empty_cache()
            model.empty_cache()
        else:
            nbytes, stream = random_bytes(rng), rng.randrange(len(streams))
            real = ours = None
            try:
                with torch.cuda.stream(streams[stream]):
                    real = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                failed += 1
            with contextlib.suppress(SimulatedOutOfMemory):
                ours = model.allocate(nbytes, stream=stream)
            assert (real is None) == (ours is None), f"step {step}: only one has {nbytes} bytes"
            if real is not None:
                live.append((real, ours))
            del real
        real_bytes = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        model_bytes = model.allocated_bytes, model.reserved_bytes
        assert real_bytes == model_bytes, f"step {step}: {real_bytes} and {model_bytes}"
    assert blocks(torch.cuda.memory_snapshot()) == blocks(model.segments())
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    assert retries == model.flushes, (retries, model.flushes)
    return f"equal at {steps} steps, {failed} out of memory, {retries} retries"


if __name__ == "__main__":
    steps, seed = map(int, sys.argv[1:3])
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for case in sys.argv[3:]:
            print(case, pool.apply(judge, (steps, seed, *json.loads(case))))
