"""What sums take besides their results, against PyTorch's own kernels."""

import math
import random

import pytest
import torch

from gpumem.allocator.reductions import sum_workspaces
from gpumem.hardware import this_machine

SIZES = [1, 2, 3, 4, 7, 8, 64, 100, 128, 896, 1000, 1024, 2048, 4096, 50257]


@pytest.mark.parametrize("seed", range(5))
def test_sums_of_random_tensors_take_what_pytorch_takes(seed):
    gpu, rng, buffers = this_machine.this_gpu(), random.Random(seed), 0
    for _ in range(200):
        shape = rng.choices(SIZES, k=rng.randint(1, 4))
        if math.prod(shape) * 4 >= 1 << 31:
            continue
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        tensor = torch.empty(shape, dtype=dtype, device="cuda")
        if len(shape) > 1 and rng.random() < 0.4:
            tensor = tensor.transpose(*rng.sample(range(len(shape)), 2))
        dims = rng.sample(range(len(shape)), rng.randint(1, len(shape)))
        torch.cuda.memory._record_memory_history(context=None)
        tensor.sum(dims)
        [events] = torch.cuda.memory._snapshot()["device_traces"]
        torch.cuda.memory._record_memory_history(enabled=None)
        _result, *taken = [event["size"] for event in events if event["action"] == "alloc"]
        assert tuple(taken) == sum_workspaces(tensor, dims, dtype, gpu), (shape, dims, dtype)
        buffers += bool(taken)
    assert buffers > 10
