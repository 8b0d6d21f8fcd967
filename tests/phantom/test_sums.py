"""What sums take besides their results, against PyTorch's own kernels."""

import math
import random

import pytest
import torch

from gpumem.allocator.reductions import RULES, sum_workspaces
from gpumem.hardware import this_machine

#: Each reduces a dimension, and returns what it takes besides its results.
INDEXED = {
    "argmax": lambda tensor, dim: tensor.argmax(dim),
    "argmin of all": lambda tensor, dim: tensor.argmin(),
    "max": lambda tensor, dim: tensor.max(dim),
    "min": lambda tensor, dim: tensor.min(dim),
}
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


@pytest.mark.parametrize("name", INDEXED)
def test_where_the_largest_value_lies_takes_what_pytorch_takes(name):
    gpu, rng, buffers = this_machine.this_gpu(), random.Random(name), 0
    for _ in range(150):
        shape = rng.choices([*SIZES, 152_064], k=rng.randint(1, 3))
        if math.prod(shape) * 8 >= 1 << 31:
            continue
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.int64])
        tensor = torch.empty(shape, dtype=dtype, device="cuda")
        if len(shape) > 1 and rng.random() < 0.4:
            tensor = tensor.transpose(*rng.sample(range(len(shape)), 2))
        dim = rng.randrange(len(shape))
        torch.cuda.memory._record_memory_history(context=None)
        made = INDEXED[name](tensor, dim)
        [events] = torch.cuda.memory._snapshot()["device_traces"]
        torch.cuda.memory._record_memory_history(enabled=None)
        taken = [event["size"] for event in events if event["action"] == "alloc"]
        results = [made] if isinstance(made, torch.Tensor) else list(made)
        operator = getattr(torch.ops.aten, name.split()[0])
        rule = RULES[operator.dim if len(results) > 1 else operator.default]
        changes = rule(gpu, tensor, *([] if name == "argmin of all" else [dim]))
        expected = [nbytes for _, nbytes in changes if nbytes > 0]
        for result in results:
            taken.remove(result.nbytes)
        assert taken == expected, (shape, tensor.stride(), dim, dtype)
        buffers += bool(expected)
    assert buffers > 5
