"""The machine, the catalogue, the CUDA adapter, pretending and cleaning up.

No GPU here: CUDA is a stand-in that remembers what was asked of it.
"""

import dataclasses
import gc
import json
import platform
import subprocess
import sys
import types
import weakref

import pytest
import torch

from gpumem.hardware import catalogue, cuda, this_machine
from gpumem.hardware.least_seconds import least_seconds
from gpumem.inputs import InputError
from gpumem.units import GIB, MIB

# --- a CUDA that is not there ------------------------------------------------------------------


class FakeCuda:
    """Enough of torch.cuda for one 24 GiB GPU; ``calls`` lists what changed something."""

    def __init__(self, total_bytes=24 * GIB):
        self.total_bytes, self.calls = total_bytes, []

    def note(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args))

    def install(self, monkeypatch):
        answers = {
            "is_available": lambda: True,
            "init": lambda: None,
            "current_device": lambda: 0,
            "get_device_name": lambda *_: "Test GPU",
            "get_device_properties": lambda *_: types.SimpleNamespace(
                total_memory=self.total_bytes
            ),
            "is_bf16_supported": lambda including_emulation=True: including_emulation,
        }
        for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
            answers[name] = self.note(name)
        answers["set_per_process_memory_fraction"] = self.note("cap")
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.version, "hip", None)
        return self

    @property
    def caps(self):
        return [call[1] for call in self.calls if call[0] == "cap"]


@pytest.fixture
def fake_cuda(monkeypatch):
    return FakeCuda().install(monkeypatch)


@pytest.fixture
def no_cuda(monkeypatch):
    """As on a CPU, whatever this machine has: nothing else of torch.cuda may be touched."""
    for name in ("init", "memory_allocated", "empty_cache", "set_per_process_memory_fraction"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("touched CUDA"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


# --- the catalogue -----------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", catalogue.gpus(), ids=lambda gpu: gpu.key)
def test_figures_are_sane_and_sourced(gpu):
    assert catalogue.gpu(gpu.key.upper().replace("-", "_")) is gpu
    assert catalogue.gpu(gpu.name) is catalogue.gpu(gpu) is gpu
    # Vendors' GB of GPU memory are nearer to GiB; usable never exceeds that.
    assert 0.66 * gpu.memory_gb * GIB < gpu.usable_bytes <= gpu.memory_gb * GIB
    assert 100 <= gpu.bandwidth_gb_per_s <= 10_000
    assert gpu.memory_type.startswith(("GDDR", "HBM", "LPDDR"))
    assert ", https://" in gpu.source
    assert gpu.capacity_source.startswith(("https://", "derived: ", "measured: "))
    assert gpu.note
    if gpu.unified:
        assert (gpu.context_bytes, gpu.context_known) == (0, "none")
    elif gpu.context_source == "assumed":
        assert gpu.context_bytes == catalogue.CUDA_CONTEXT_BYTES == 512 * MIB
    else:
        assert 100 * MIB < gpu.context_bytes < GIB
        assert gpu.context_source.startswith("measured: ")
    if not gpu.unified:
        assert 20 < gpu.fp16_tflops < 3000
    if gpu.bf16_tflops is not None:
        assert gpu.bf16_native
        assert gpu.bf16_tflops == gpu.fp16_tflops  # true of every one so far


def test_rates_are_dense():
    """The sparse figures, which vendors print larger, are twice these."""
    dense = {"rtx-4090": 165.2, "a100-80gb": 312, "h100": 989.5, "l4": 121, "b200": 2250}
    assert {key: catalogue.gpu(key).fp16_tflops for key in dense} == dense


def test_names_as_drivers_give_them():
    keys = {
        "Tesla T4": "t4",
        "4090": "rtx-4090",
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA H100 80GB HBM3": "h100",
        "Tesla V100-SXM2-16GB": "v100",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H100 NVL": "h100-nvl",
        "NVIDIA GeForce RTX 3080": "rtx-3080",
        "NVIDIA GeForce RTX 4080": "rtx-4080",
        "rtx 4080": "rtx-4080",
        "NVIDIA GeForce RTX 4080 SUPER": "rtx-4080-super",
        "Apple M4 Max 64 GB": "m4-max-64gb",
        "AMD Instinct MI300X": "mi300x",
    }
    assert {name: catalogue.gpu(name).key for name in keys} == keys


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a100", r"'a100'.*'a100-40gb' or 'a100-80gb'"),
        ("t5", "unknown GPU 't5'. Did you mean 't4'"),
        ("RTX 4090 Laptop GPU", "Did you mean 'rtx-4090'"),  # another chip, half the speed
        ("A100-PCIE-40GB", "Did you mean 'a100-40gb'"),  # another bandwidth
        ("4060 Ti", "comes in several sizes: say 'rtx-4060-ti-16gb'"),
        ("Apple M4 Max", "'m4-max-36gb' or 'm4-max-48gb' or 'm4-max-64gb' or 'm4-max-128gb'"),
        ("m4", "'m4-16gb' or 'm4-24gb' or 'm4-32gb'"),
        ("a100-60gb", "Did you mean 'a100-"),
        (None, "unknown GPU .*Known: t4, v100"),
        ("gpu", "unknown GPU .*Known: t4, v100"),
    ],
)
def test_other_names_are_refused_with_the_nearest(name, message):
    with pytest.raises(InputError, match=message):
        catalogue.gpu(name)


def test_no_name_fits_two():
    names = [name for gpu in catalogue.gpus() for name in catalogue._spellings(gpu)]
    assert len(names) == len(set(names))


def test_a_superchip_is_linked_by_more_than_pci_express():
    assert (catalogue.gpu("gh200").link_gb_per_s, catalogue.gpu("h100").link_gb_per_s) == (450, 63)


# --- a GPU that is not listed --------------------------------------------------------------------


def test_a_gpu_is_described_by_memory_and_compute_capability():
    gpu = catalogue.gpu("24 GiB:8.9")
    assert (gpu.key, catalogue.gpu(gpu.key)) == ("24gib:8.9", gpu)
    assert gpu.name == "NVIDIA GPU with 24.0 GiB and compute capability 8.9"
    assert (gpu.usable_bytes, gpu.compute_capability) == (24 * GIB, (8, 9))
    assert (gpu.context_bytes, gpu.context_known) == (512 * MIB, "assumed")
    assert gpu.multiprocessors == catalogue.gpu("rtx-4090").multiprocessors
    assert (gpu.bf16_native, catalogue.gpu("11GB:7.5").bf16_native) == (True, False)


def test_no_bound_where_nothing_is_known_of_the_speed():
    gpu = catalogue.gpu("24GiB:8.9")
    assert least_seconds(gpu, {"bf16": 10**15}, 10**12, 10**12, 10**12) is None
    assert catalogue.rated(gpu) is catalogue.gpu("rtx-4090")
    assert catalogue.rated(catalogue.gpu("t4")) is catalogue.gpu("t4")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("24GiB", "memory and compute capability, such as 24GiB:8.9, not '24GiB'"),
        ("24GiB:", "such as 24GiB:8.9"),
        (":8.9", "such as 24GiB:8.9"),
        ("0GiB:8.9", "from 1.00 GiB to 1.00 TiB, not '0gib'"),
        ("24:8.9", "from 1.00 GiB to 1.00 TiB, not '24'"),
        ("1000000000GiB:8.9", "from 1.00 GiB to 1.00 TiB"),
        ("1e9GiB:8.9", "memory must be a size such as 64GiB, not '1e9gib'"),
        ("-24GiB:8.9", "memory must be a size such as 64GiB, not '-24gib'"),
        ("nanGiB:8.9", "memory must be a size such as 64GiB, not 'nangib'"),
        ("24GiB:3.5", "unknown compute capability '3.5'"),
        ("24GiB:99.9", "unknown compute capability '99.9'.*Known: 7.0, 7.5, 8.0, 8.6, 8.9, 9.0"),
        ("24GiB:nan", "unknown compute capability 'nan'"),
    ],
)
def test_a_description_without_sense_is_refused(name, message):
    with pytest.raises(InputError, match=message):
        catalogue.gpu(name)


# --- this machine ------------------------------------------------------------------------------


def test_machine_without_a_gpu(no_cuda, monkeypatch):
    here = this_machine.machine()
    assert (here.kind, here.can_measure, here.capacity_bytes) == ("cpu", False, None)
    assert "tracked on the CPU" in here.note
    assert here.versions["torch"] == torch.__version__
    assert here.versions["driver"] is None
    assert here.cores >= 1
    assert here.host_memory_bytes > 256 * MIB
    assert this_machine.device() == torch.device("cpu")
    assert not here.in_colab
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-x")
    assert this_machine.machine().in_colab
    json.dumps(dataclasses.asdict(here))  # it is stored with results


def test_machine_with_cuda(fake_cuda, monkeypatch):
    monkeypatch.setattr(this_machine, "_driver", {"cuda": "580.1"}.get)
    here = this_machine.machine()
    assert (here.kind, here.name, here.can_measure) == ("cuda", "Test GPU", True)
    assert here.capacity_bytes == 24 * GIB
    assert here.note == "Measured for real on Test GPU (24.0 GiB)."
    assert here.versions["driver"] == "580.1"
    assert not here.bf16_native  # the stand-in only emulates it, as a T4 does
    assert this_machine.device() == torch.device("cuda")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    amd = this_machine.machine()
    assert (amd.kind, amd.can_measure) == ("rocm", True)
    assert this_machine.device().type == "cuda"


def test_a_gpu_that_fails_is_named_and_not_used(fake_cuda, monkeypatch):
    def fail():
        raise RuntimeError("CUDA driver initialization failed\nmore lines")

    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    here = this_machine.machine()
    assert here.kind == this_machine.device().type == "cpu"
    assert "could not be used: CUDA driver initialization failed. No GPU" in here.note
    assert not cuda.cuda_memory.available
    assert cuda.cuda_memory.allocated() is None
    with this_machine.pretend("t4"):
        cuda.free_memory()
    assert fake_cuda.calls == []


def test_an_apple_gpu_is_named_and_not_measured(no_cuda, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * GIB)
    here = this_machine.machine()
    assert (here.kind, here.capacity_bytes, here.can_measure) == ("mps", 12 * GIB, False)
    assert "tracked on the CPU" in here.note
    assert this_machine.device().type == "cpu"


# --- pretending --------------------------------------------------------------------------------


def test_pretending_on_the_cpu_sets_the_budget(no_cuda):
    assert (this_machine.pretended(), this_machine.current_budget_bytes()) == (None, None)
    with this_machine.pretend("t4") as gpu:
        assert this_machine.pretended() is gpu is catalogue.gpu("t4")
        assert this_machine.current_budget_bytes() == gpu.usable_bytes - 141 * MIB
    assert (this_machine.pretended(), this_machine.current_budget_bytes()) == (None, None)


def test_pretending_nests(no_cuda):
    with this_machine.pretend("rtx-4090"):
        with this_machine.pretend(budget_bytes=MIB) as gpu, this_machine.pretend():
            assert gpu is this_machine.pretended() is None
            assert this_machine.current_budget_bytes() is None
        assert this_machine.pretended().key == "rtx-4090"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "t5"}, "Did you mean 't4'"),
        ({"name": "t4", "budget_bytes": 5}, "not both"),
        ({"budget_bytes": 0}, "budget_bytes must be from 1"),
    ],
)
def test_bad_pretence_changes_nothing(no_cuda, arguments, message):
    with pytest.raises(InputError, match=message), this_machine.pretend(**arguments):
        pytest.fail("entered")
    assert this_machine.current_budget_bytes() is None


def test_a_gpu_of_the_same_model_can_be_pretended(monkeypatch):
    """Drivers report a few tenths of a GiB more or less for one and the same GPU."""
    l4 = catalogue.gpu("l4")
    fake = FakeCuda(total_bytes=l4.usable_bytes - 200 * MIB).install(monkeypatch)
    with this_machine.pretend("l4"):
        assert 0.9 < fake.caps[-1] < 1.0


# --- cleaning up: in a live kernel, tests/notebooks/test_oom_kernel.py ---------------------------


def fail_holding(tensors, *, cause=None):
    tensor = torch.zeros(1000)
    tensors.append(weakref.ref(tensor))
    raise ValueError("no room") from cause


def caught(*args, **kwargs):
    try:
        fail_holding(*args, **kwargs)
    except ValueError as error:
        return error


_FRAGMENTED = """
import psutil, torch, labkit as lab
own = psutil.Process()
lab.free_memory()
clean = own.memory_info().rss
torch.empty(24 << 20, dtype=torch.uint8)  # from now on glibc takes blocks this large from its heap
blocks = [torch.ones(60_000, dtype=torch.uint8) for _ in range(4000)]
last = blocks.pop()
del blocks
kept = own.memory_info().rss - clean
lab.free_memory()
print(kept, own.memory_info().rss - clean)
"""


@pytest.mark.nightly
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")
def test_free_memory_hands_the_heap_back():
    """Blocks below one that lives stay with glibc, some hundred MiB of them."""
    done = subprocess.run([sys.executable, "-c", _FRAGMENTED], capture_output=True, text=True)
    kept, left = map(int, done.stdout.split())
    assert kept > 200e6
    assert left < 20e6


def test_clear_exception_follows_the_chain(no_cuda):
    tensors = []
    error = caught(tensors, cause=caught(tensors))
    error.__context__ = ExceptionGroup("several", [caught(tensors)])
    error.__cause__.__cause__ = error  # a ring must not hang
    assert all(tensor() is not None for tensor in tensors)
    cuda.clear_exception(error)
    gc.collect()
    assert [tensor() for tensor in tensors] == [None, None, None]
    assert error.__traceback__ is not None  # it can still be shown


def test_clear_exception_leaves_running_frames_alone():
    mine = torch.zeros(3)
    try:
        fail_holding([])
    except ValueError as error:
        cuda.clear_exception(error)
    assert mine.sum() == 0


# --- this GPU -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gib", "key"),
    [
        ("NVIDIA A100", 39.4, "a100-40gb"),
        ("NVIDIA A100", 79.2, "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", None, "a100-80gb"),
        ("NVIDIA A100", None, "nvidia-a100"),
        ("NVIDIA GeForce RTX 4090", 47.4, "nvidia-geforce-rtx-4090-48gib"),  # a rebuilt one
        ("NVIDIA H200 MIG 1g.18gb", 16.3, "nvidia-h200-mig-1g-18gb-17gib"),
        ("Strange/Card: 9000 ../", 7.5, "strange-card-9000-8gib"),
        ("...", None, "gpu"),
    ],
)
def test_a_folder_for_each_gpu_and_size(name, gib, key):
    assert this_machine.gpu_key(name, gib and int(gib * (1 << 30))) == key


def test_this_gpu_is_the_catalogues_or_one_with_its_own_memory(monkeypatch):
    here = dataclasses.replace(
        this_machine.machine(), name="NVIDIA Imaginary 9000", capacity_bytes=7 * MIB
    )
    monkeypatch.setattr(this_machine, "machine", lambda: here)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    gpu = this_machine.this_gpu()
    assert (gpu.name, gpu.usable_bytes) == ("NVIDIA Imaginary 9000", 7 * MIB)
    assert (gpu.compute_capability, gpu.bf16_native) == ((7, 5), False)
    assert gpu.bandwidth_gb_per_s is None  # which is not that of the T4
    whole = dataclasses.replace(
        here, name="NVIDIA H200", capacity_bytes=catalogue.gpu("h200").usable_bytes
    )
    monkeypatch.setattr(this_machine, "machine", lambda: whole)
    assert this_machine.this_gpu() is catalogue.gpu("h200")
