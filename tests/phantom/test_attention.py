"""What fused attention's backward takes, block by block, against PyTorch's own code."""

import pytest

KERNELS = """
import sys
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpumem.allocator.attention_workspaces import efficient_backward, flash_backward
from gpumem.hardware.this_machine import this_gpu

gpu = this_gpu()
half = torch.bfloat16 if gpu.compute_capability >= (8, 0) else torch.float16
torch.cuda.memory._record_memory_history(max_entries=1_000_000)


def history():
    return torch.cuda.memory._snapshot()["device_traces"][0]


def taken(query, key, dtype, kernel):
    def tensor(shape):
        batch, heads, tokens, size = shape  # in the layout that transformers has them
        flat = torch.empty(batch, tokens, heads, size, dtype=dtype, device="cuda")
        return flat.transpose(1, 2).requires_grad_()

    q, k, v = tensor(query), tensor(key), tensor(key)
    with sdpa_kernel(kernel):
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=query[1] != key[1])
    start, grad = len(history()), torch.empty_like(out)
    results = torch.autograd.grad(out, (q, k, v), grad)
    blocks, changes = {}, []
    for entry in history()[start:]:
        if entry["action"] == "alloc":
            blocks[entry["addr"]] = len(blocks)
            changes.append((blocks[entry["addr"]] - 4, entry["size"]))  # gradient, three results
        elif entry["action"] == "free_completed" and entry["addr"] in blocks:
            changes.append((blocks[entry["addr"]] - 4, -entry["size"]))
    return [(block, size) for block, size in changes if block >= 0]


wrong = 0
sizes = [(2, 6, 512), (1, 1, 500), (16, 16, 130), (1, 3, 2048)]
for dtype in (half, torch.float32):
    for head in (32, 64, 72, 96, 128, 136, 256):
        for batch, heads, tokens in sizes:
            query = (batch, heads, tokens, head)
            kernels = {SDPBackend.EFFICIENT_ATTENTION: (heads,)}
            if dtype == torch.bfloat16:
                kernels[SDPBackend.FLASH_ATTENTION] = {heads, 1}
            for kernel, key_heads in kernels.items():
                for shared in key_heads:
                    key = (batch, shared, tokens, head)
                    ours = flash_backward(query, key, 2)
                    if kernel == SDPBackend.EFFICIENT_ATTENTION:
                        ours = efficient_backward(query, key, dtype.itemsize, gpu)
                    rounded = [(n, -(-b // 512) * 512) for n, b in ours]
                    real = taken(query, key, dtype, kernel)
                    real = [(n, -(-b // 512) * 512) for n, b in real]
                    if real != rounded:
                        wrong += 1
                        print(kernel, dtype, query, key, real, rounded, file=sys.stderr)
print("wrong:", wrong)
"""


@pytest.mark.parametrize("gpu", ["t4", "rtx-4090", "a100-80gb", "h100"])
def test_backward_takes_these_blocks_in_this_order(gpu, on_phantom):
    assert on_phantom(gpu, "-W", "ignore", "-c", KERNELS) == "wrong: 0\n"
