"""What a phantom GPU says of itself, and that it is full when it is full."""

import json
import re

import pytest
import torch
from conftest import left
from torch.nn.attention import SDPBackend, sdpa_kernel

import labkit as lab

CUDNN, FLASH, MATH = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.MATH,
)
#: What PyTorch says, and that NVML agrees once something is allocated.
ABOUT = """
import json, pynvml, torch
properties = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
print(json.dumps([
    [p.name, [p.major, p.minor], p.multi_processor_count, p.total_memory,
    p.shared_memory_per_block_optin, *torch.cuda.mem_get_info(n)]
    for n, p in enumerate(properties)
]))
x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
assert memory.total == torch.cuda.mem_get_info()[1], memory.total
assert memory.free == torch.cuda.mem_get_info()[0], memory.free
assert pynvml.nvmlDeviceGetCount() == torch.cuda.device_count()
assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 0
assert pynvml.nvmlDeviceGetName(handle) == properties[0].name
"""


@pytest.mark.parametrize(
    "named",
    [
        *("t4", "h100x16", "24GiB:12.0x2"),
        *(pytest.param(named, marks=pytest.mark.nightly) for named in ("rtx-4090x2", "b200")),
    ],
)
def test_it_is_the_gpu_of_the_catalogue(on_phantom, named):
    key, count = re.fullmatch(r"(.+?)(?:x(\d+))?", named).groups()
    gpu = lab.gpu(key)
    found = json.loads(on_phantom(named, "-c", ABOUT))
    assert len(found) == int(count or 1)
    for name, capability, multiprocessors, total_bytes, shared_bytes, free_bytes, total in found:
        assert name == gpu.name
        assert tuple(capability) == gpu.compute_capability
        assert multiprocessors == gpu.multiprocessors
        assert total_bytes == total == gpu.usable_bytes
        assert free_bytes == gpu.budget_bytes
        assert 64 << 10 <= shared_bytes <= 227 << 10


#: Answered by the stub library itself, without the seconds that PyTorch takes to be imported.
COUNT = """
import ctypes
count = ctypes.c_int()
ctypes.CDLL(None).cudaGetDeviceCount(ctypes.byref(count))
print(count.value)
"""


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("0", 1), ("1,0", 2), ("0,7,1", 1), ("-1", 0), ("2,1,0", 3)]
)
def test_cuda_visible_devices_hides_the_others(on_phantom, visible, count):
    assert on_phantom("t4x3", "-c", COUNT, CUDA_VISIBLE_DEVICES=visible) == f"{count}\n"


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("0,7,1", 1)])
def test_pytorch_finds_those_that_are_visible(on_phantom, visible, count):
    code = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())"
    said = on_phantom("t4x3", "-c", code, CUDA_VISIBLE_DEVICES=visible)
    assert said.split() == [str(count > 0), str(count)]


def test_pinned_memory_is_known_by_its_address():
    plain = torch.zeros(1000)
    pinned = plain.pin_memory()
    assert pinned[500:].is_pinned()
    assert pinned.pin_memory().data_ptr() == pinned.data_ptr()
    assert not plain.is_pinned()


def test_cudnns_attention_gives_way_to_another_kernel():
    x = torch.zeros(1, 2, 64, 64, dtype=torch.float16, device="cuda")
    with sdpa_kernel([CUDNN, FLASH, MATH], set_priority=True):
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    with sdpa_kernel(CUDNN), pytest.raises(RuntimeError, match="No viable backend"):
        torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_a_full_gpu_says_so_in_pytorchs_words_and_goes_on():
    left()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    for _ in range(200):
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 90\.00 GiB") as caught:
            torch.empty(90 << 30, dtype=torch.uint8, device="cuda")
    assert f"total capacity of {total_bytes / 2**30:.2f} GiB" in str(caught.value)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free_bytes
    whole = torch.empty(free_bytes // (2 << 20) * (2 << 20), dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] < 2 << 20
    del whole
    torch.cuda.empty_cache()


def test_eighty_gigabytes_take_no_memory_of_the_host():
    import psutil

    before = psutil.Process().memory_info().rss
    full = torch.zeros(75 << 30, dtype=torch.uint8, device="cuda")
    full += 1
    host = torch.empty(8 << 30, dtype=torch.uint8)
    host.copy_(full[: 8 << 30])  # as offloaded states come back: pages nobody touched stay away
    assert psutil.Process().memory_info().rss - before < 100 << 20
    del full, host
    torch.cuda.empty_cache()


def test_a_device_that_is_not_there_and_two_that_are(on_phantom):
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="cuda:1")
    code = """if True:
        import torch
        x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:1")
        assert torch.cuda.memory_allocated(0) == 0 and torch.cuda.memory_allocated(1) == 1 << 30
        assert torch.arange(4, device="cuda:0").to("cuda:1").tolist() == [0, 1, 2, 3]
    """
    on_phantom("t4x2", "-c", code)


def test_a_product_that_pytorch_writes_in_triton():
    column, row = torch.ones(2, 32, 1, device="cuda"), torch.ones(2, 1, 6, device="cuda")
    before = torch.cuda.memory_allocated()
    assert (column @ row).shape == (2, 32, 6)
    assert torch.cuda.memory_allocated() == before
