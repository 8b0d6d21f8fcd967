"""What kernels that sort take beside their results, against PyTorch's own code."""

import pytest

KERNELS = """
import sys
import torch

from gpumem.allocator.sorting import radix_sort_bytes, RULES
from gpumem.hardware.this_machine import this_gpu

gpu, aten = this_gpu(), torch.ops.aten
wrong = 0


def peak_bytes(changes):
    live = peak = 0
    for change in changes:
        live += (1 if change > 0 else -1) * -(-abs(change) // 512) * 512
        peak = max(peak, live)
    return peak


def check(func, *args, results):
    global wrong
    torch.cuda.memory._record_memory_history(context=None)
    kept = func(*args)
    [events] = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    real = peak_bytes(signs[e["action"]] * e["size"] for e in events if e["action"] in signs)
    ours = peak_bytes([*results, *(nbytes for _, nbytes in RULES[func](gpu, *args))])
    if real != ours:
        wrong += 1
        shapes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
        print(func, shapes, real, ours, file=sys.stderr)


def empty(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="cuda")


for count in (7, 2304, 2305, 3072, 3073, 8192, 50_000):
    indices = empty(count, dtype=torch.int64)
    for rows in (200, 257, 70_000):
        table, grad = empty(rows, 64), empty(count, 64)
        check(aten._index_put_impl_.default, table, [indices], grad, True, results=[])
        if 10 * rows < count:
            continue  # a kernel that takes less; see the module's limits
        for dtype in (torch.float32, torch.bfloat16):
            args = (grad.to(dtype), indices, rows, -1, False)
            result = rows * 64 * dtype.itemsize
            check(aten.embedding_dense_backward.default, *args, results=[result])
for dtype in (torch.float32, torch.int64):
    for shape in ((100,), (4096,), (4097,), (100_000,), (3, 5000), (127, 4097), (128, 4097)):
        numbers = empty(*shape, dtype=dtype)
        results = [numbers.nbytes, 8 * numbers.numel()]
        check(aten.sort.default, numbers, -1, False, results=results)
    check(aten.sort.default, empty(5000, 3, dtype=dtype), 0, False, results=[
        15_000 * dtype.itemsize, 8 * 15_000])
print("wrong:", wrong)
"""


@pytest.mark.parametrize("gpu", ["t4", "rtx-4090", "a100-80gb", "h100"])
def test_sorting_takes_as_much_at_its_peak(gpu, on_phantom):
    assert on_phantom(gpu, "-W", "ignore", "-c", KERNELS) == "wrong: 0\n"
