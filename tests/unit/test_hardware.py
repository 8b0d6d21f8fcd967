"""The machine, the catalogue, the CUDA adapter, pretending, snapshots and cleaning up.

No GPU here: CUDA is a stand-in that remembers what was asked of it.
"""

import contextlib
import dataclasses
import gc
import json
import os
import pickle
import platform
import struct
import subprocess
import sys
import types
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import cuda, hardware
from labkit.memory import GIB, MIB, InputError

# --- a CUDA that is not there ------------------------------------------------------------------


class FakeCuda:
    """Enough of torch.cuda for one 24 GiB GPU; ``calls`` lists what changed something."""

    def __init__(self, total_bytes=24 * GIB, name="Test GPU"):
        self.total_bytes, self.name, self.calls = total_bytes, name, []

    def note(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args))

    def install(self, monkeypatch, *, hip=None):
        answers = {
            "is_available": lambda: True,
            "init": lambda: None,
            "current_device": lambda: 0,
            "get_device_name": lambda *_: self.name,
            "get_device_properties": lambda *_: types.SimpleNamespace(
                total_memory=self.total_bytes
            ),
            "is_bf16_supported": lambda including_emulation=True: including_emulation,
            "memory_allocated": lambda: 10,
            "memory_reserved": lambda: 20,
            "max_memory_allocated": lambda: 30,
            "max_memory_reserved": lambda: 40,
            "mem_get_info": lambda: (5, self.total_bytes),
            "memory_summary": lambda: "a table",
        }
        for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
            answers[name] = self.note(name)
        answers["set_per_process_memory_fraction"] = self.note("cap")
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.note("record"))
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self.note("dump"))
        monkeypatch.setattr(torch.version, "hip", hip)
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
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)


# --- the catalogue -----------------------------------------------------------------------------

PROMISED = {
    *("t4", "v100", "rtx-3060", "rtx-3090", "rtx-4090", "rtx-5090", "l4", "a10g"),
    *("a100-40gb", "a100-80gb", "h100", "h200", "b200", "mi300x", "m3-ultra", "m4-max"),
}


def test_catalogue_has_the_promised_gpus():
    assert set(hardware.GPUS) >= PROMISED


@pytest.mark.parametrize("card", hardware.GPUS.values(), ids=lambda card: card.key)
def test_figures_are_sane_and_sourced(card):
    # Vendors' GB of GPU memory are nearer to GiB; usable never exceeds that.
    assert 0.7 * card.memory_gb * GIB < card.usable_bytes <= card.memory_gb * GIB
    assert 0 < card.budget_bytes <= card.usable_bytes
    assert 200 <= card.bandwidth_gb_per_s <= 10_000
    assert card.memory_type.startswith(("GDDR", "HBM", "LPDDR"))
    assert ", https://" in card.source
    assert card.capacity_source.startswith(("https://", "derived: "))
    assert card.note
    if card.unified:
        assert card.context_bytes == 0
    else:
        assert card.context_bytes == hardware.CUDA_CONTEXT_BYTES == 512 * MIB
        assert 20 < card.fp16_tflops < 3000
    if card.bf16_tflops is not None:
        assert card.bf16_native
        assert card.bf16_tflops == card.fp16_tflops  # true of every one so far


def test_rates_are_dense():
    """The sparse figures, which vendors print larger, are twice these."""
    dense = {"rtx-4090": 165.2, "a100-80gb": 312, "h100": 989.5, "l4": 121, "b200": 2250}
    assert {key: hardware.gpu(key).fp16_tflops for key in dense} == dense


def test_bf16_is_native_from_ampere_on():
    without = {card.key for card in hardware.GPUS.values() if not card.bf16_native}
    assert without == {"t4", "v100", "v100-32gb"}


def test_gpus_are_ordered_by_memory():
    sizes = [card.usable_bytes for card in hardware.gpus()]
    assert sizes == sorted(sizes)
    assert len(sizes) == len(hardware.GPUS)


def test_every_name_finds_its_own_gpu():
    for card in hardware.GPUS.values():
        assert hardware.gpu(card.key.upper().replace("-", "_")) is card
        assert hardware.gpu(card.name) is card
        assert hardware.gpu(card) is card


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA T4", "t4"),
        ("Tesla T4", "t4"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA L4", "l4"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Apple M4 Max", "m4-max"),
    ],
)
def test_names_as_drivers_give_them(name, key):
    assert hardware.gpu(name).key == key


def test_ambiguous_name_names_both():
    with pytest.raises(InputError, match=r"'a100'.*'a100-40gb' or 'a100-80gb'"):
        hardware.gpu("a100")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("t5", "t4"),
        ("rtx-4080", "rtx-4090"),
        ("RTX 4090 Laptop GPU", "rtx-4090"),  # another chip, half the speed
        ("H100 PCIe", "h100"),  # another bandwidth
        ("a100-60gb", "a100-"),
    ],
)
def test_unknown_gpu_names_the_nearest(name, nearest):
    with pytest.raises(InputError, match=f"unknown GPU {name!r}. Did you mean '{nearest}"):
        hardware.gpu(name)


@pytest.mark.parametrize("name", ["", None, 5, "zzzz", "nvidia", "(", "gpu"])
def test_nonsense_lists_what_is_known(name):
    with pytest.raises(InputError, match=r"unknown GPU .*Known: t4, v100"):
        hardware.gpu(name)


# --- this machine ------------------------------------------------------------------------------


def test_machine_without_a_gpu(no_cuda):
    here = hardware.machine()
    assert (here.kind, here.can_measure, here.capacity_bytes) == ("cpu", False, None)
    assert "tracked on the CPU" in here.note
    assert "simulated" in here.note
    assert here.versions["torch"] == torch.__version__
    assert here.versions["driver"] is None
    assert here.cores >= 1
    assert here.host_memory_bytes > 256 * MIB
    assert hardware.device() == torch.device("cpu")
    json.dumps(dataclasses.asdict(here))  # it is stored with results


def test_machine_with_cuda(fake_cuda, monkeypatch):
    monkeypatch.setattr(hardware, "_driver", {"cuda": "580.1"}.get)
    here = hardware.machine()
    assert (here.kind, here.name, here.can_measure) == ("cuda", "Test GPU", True)
    assert here.capacity_bytes == 24 * GIB
    assert here.note == "Measured for real on Test GPU (24.0 GiB)."
    assert here.versions["driver"] == "580.1"
    assert not here.bf16_native  # the stand-in only emulates it, as a T4 does
    assert hardware.device() == torch.device("cuda")


def test_rocm_measures_through_the_cuda_calls(monkeypatch):
    FakeCuda(name="AMD Instinct MI300X").install(monkeypatch, hip="7.0")
    here = hardware.machine()
    assert (here.kind, here.can_measure) == ("rocm", True)
    assert "ROCm" in here.note
    assert hardware.device().type == "cuda"


def test_a_gpu_that_fails_is_named_and_not_used(fake_cuda, monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: unknown error\nmore lines")

    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    here = hardware.machine()
    assert here.kind == "cpu"
    assert "could not be used: CUDA error: unknown error. No GPU" in here.note
    assert hardware.device().type == "cpu"


def test_a_driver_that_does_not_start(fake_cuda, monkeypatch):
    def fail():
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: fail())
    assert hardware.machine().kind == "cpu"
    assert not hardware.cuda_memory.available
    assert hardware.cuda_memory.allocated() is None
    with hardware.pretend("t4"):
        hardware.free_memory()
    assert fake_cuda.calls == []


def test_mps_and_xpu_fall_back_to_tracking(no_cuda, monkeypatch):
    found = types.SimpleNamespace(name="Intel Arc", total_memory=16 * GIB)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda: found)
    here = hardware.machine()
    assert (here.kind, here.name, here.can_measure) == ("xpu", "Intel Arc", False)
    assert "tracked on the CPU" in here.note
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * GIB)
    here = hardware.machine()
    assert (here.kind, here.capacity_bytes, here.can_measure) == ("mps", 12 * GIB, False)
    assert "Apple" in here.note
    assert hardware.device().type == "cpu"


def test_missing_package_has_no_version(monkeypatch):
    monkeypatch.setattr(hardware, "PACKAGES", ("torch", "no-such-package"))
    assert hardware.machine().versions["no-such-package"] is None


@pytest.mark.parametrize(
    ("program", "expected"),
    [("printf '580.95\\n580.95\\n'", "580.95"), ("exit 9", None), ("printf ''", None)],
)
def test_driver_from_nvidia_smi(tmp_path, monkeypatch, program, expected):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{program}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(hardware.Path, "is_file", lambda _: False)
    hardware._driver.cache_clear()
    assert hardware._driver("cuda") == expected
    assert hardware._driver("cpu") is None
    hardware._driver.cache_clear()


def test_colab_is_noticed(monkeypatch):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-x")
    assert hardware.machine().in_colab
    monkeypatch.delenv("COLAB_RELEASE_TAG")
    assert not hardware.machine().in_colab


def test_import_stays_light():
    code = (
        "import sys, torch; before = set(sys.modules); import labkit.hardware;"
        "new = set(sys.modules) - before;"
        "print([m for m in ('matplotlib', 'IPython', 'ipywidgets', 'transformers', 'pandas')"
        " if m in new])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "[]", answer.stderr


def test_public_names_exist():
    for name in hardware.PUBLIC:
        assert hasattr(hardware, name)


# --- the CUDA adapter --------------------------------------------------------------------------

QUESTIONS = ("allocated", "reserved", "peak_allocated", "peak_reserved")


def test_adapter_without_cuda_answers_none(no_cuda, tmp_path):
    allocator = cuda.CudaMemory()
    assert not allocator.available
    for question in (*QUESTIONS, "capacity", "free_and_total"):
        assert getattr(allocator, question)() is None
    for action in ("reset_peaks", "synchronize", "empty_cache"):
        assert getattr(allocator, action)() is None
    allocator.cap(0.5)
    allocator.record_history(True)
    assert allocator.summary() == cuda.NO_CUDA
    assert allocator.snapshot_to(tmp_path / "snapshot.pickle") is None
    assert list(tmp_path.iterdir()) == []


def test_adapter_passes_cuda_answers_on(fake_cuda):
    allocator = cuda.CudaMemory()
    assert [getattr(allocator, question)() for question in QUESTIONS] == [10, 20, 30, 40]
    assert allocator.capacity() == 24 * GIB
    assert allocator.free_and_total() == (5, 24 * GIB)
    assert allocator.summary() == "a table"
    allocator.reset_peaks()
    allocator.synchronize()
    allocator.empty_cache()
    assert [name for (name,) in fake_cuda.calls] == [
        "reset_peak_memory_stats",
        "synchronize",
        "empty_cache",
    ]


def test_adapter_records_and_writes(fake_cuda, tmp_path):
    allocator = cuda.CudaMemory()
    allocator.record_history(True)
    path = allocator.snapshot_to(tmp_path / "s.pickle")
    allocator.record_history(False)
    assert path == tmp_path / "s.pickle"
    assert fake_cuda.calls == [("record", "all"), ("dump", str(path)), ("record", None)]


def test_snapshot_that_cannot_be_written(fake_cuda, monkeypatch):
    def dump(path):
        with open(path, "wb"):
            pytest.fail("that folder should not exist")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    with pytest.raises(InputError, match=r"cannot write the snapshot '/no/such/folder/s'"):
        cuda.CudaMemory().snapshot_to("/no/such/folder/s")


def test_private_pytorch_functions_still_exist():
    """Contract: the adapter leans on these two private functions and their arguments."""
    import inspect

    record = inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters
    assert {"enabled", "stacks", "max_entries"} <= set(record)
    assert next(iter(inspect.signature(torch.cuda.memory._dump_snapshot).parameters)) == "filename"


# --- pretending --------------------------------------------------------------------------------


def test_pretending_on_the_cpu_sets_the_budget(no_cuda):
    assert (hardware.pretended(), hardware.current_budget_bytes()) == (None, None)
    with hardware.pretend("t4") as card:
        assert hardware.pretended() is card is hardware.gpu("t4")
        assert hardware.current_budget_bytes() == card.usable_bytes - 512 * MIB
    assert (hardware.pretended(), hardware.current_budget_bytes()) == (None, None)


def test_pretending_nests(no_cuda):
    with hardware.pretend("rtx-4090"):
        with hardware.pretend(budget_bytes=MIB) as card:
            assert card is hardware.pretended() is None
            assert hardware.current_budget_bytes() == MIB
            with hardware.pretend():
                assert hardware.current_budget_bytes() is None
            assert hardware.current_budget_bytes() == MIB
        assert hardware.pretended().key == "rtx-4090"


def test_pretending_survives_errors(no_cuda):
    with pytest.raises(ZeroDivisionError), hardware.pretend("t4"), hardware.pretend("l4"):
        raise ZeroDivisionError
    assert hardware.current_budget_bytes() is None


def test_pretences_left_out_of_order(no_cuda):
    """As two generators may leave them: each removes its own, equal ones too."""
    first, second, third = (hardware.pretend(budget_bytes=n) for n in (7, 8, 7))
    for each in (first, second, third):
        each.__enter__()
    third.__exit__(None, None, None)
    assert hardware.current_budget_bytes() == 8
    first.__exit__(None, None, None)
    assert hardware.current_budget_bytes() == 8
    second.__exit__(None, None, None)
    assert hardware.current_budget_bytes() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "t5"}, "Did you mean 't4'"),
        ({"name": "t4", "budget_bytes": 5}, "not both"),
        ({"budget_bytes": 0}, "budget_bytes must be from 1"),
        ({"budget_bytes": -1}, "budget_bytes must be from 1"),
        ({"budget_bytes": 1.5}, "whole number"),
        ({"budget_bytes": True}, "whole number"),
    ],
)
def test_bad_pretence_changes_nothing(no_cuda, arguments, message):
    with pytest.raises(InputError, match=message), hardware.pretend(**arguments):
        pytest.fail("entered")
    assert hardware.current_budget_bytes() is None


def test_pretending_on_cuda_caps_and_restores(fake_cuda):
    t4, l4 = hardware.gpu("t4"), hardware.gpu("l4")
    with hardware.pretend("l4"), hardware.pretend("t4"):
        assert fake_cuda.calls[-2:] == [("empty_cache",), ("cap", t4.budget_bytes / (24 * GIB))]
    shares = [card.budget_bytes / (24 * GIB) for card in (l4, t4, l4)]
    assert fake_cuda.caps == [*shares, 1.0]


def test_cap_is_lifted_after_out_of_memory(fake_cuda):
    with pytest.raises(torch.OutOfMemoryError), hardware.pretend("t4"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert fake_cuda.caps[-1] == 1.0


def test_lifting_the_limit_inside(fake_cuda):
    with hardware.pretend("t4"):
        with hardware.pretend():
            assert fake_cuda.caps[-1] == 1.0
        assert fake_cuda.caps[-1] < 1.0


def test_a_larger_card_cannot_be_pretended(fake_cuda):
    message = r"A100 SXM 40 GB needs 39.0 GiB, but this machine's GPU has 24.0 GiB"
    with pytest.raises(InputError, match=message), hardware.pretend("a100-40gb"):
        pytest.fail("entered")
    with pytest.raises(InputError, match="That budget"), hardware.pretend(budget_bytes=25 * GIB):
        pytest.fail("entered")
    assert fake_cuda.caps == []
    assert hardware.current_budget_bytes() is None


def test_a_card_of_the_same_model_can_be_pretended(monkeypatch):
    """Drivers report a few tenths of a GiB more or less for one and the same card."""
    t4 = hardware.gpu("t4")
    fake = FakeCuda(total_bytes=t4.usable_bytes - 200 * MIB).install(monkeypatch)
    with hardware.pretend("t4"):
        assert 0.9 < fake.caps[-1] < 1.0


# --- snapshots ---------------------------------------------------------------------------------

SNAPSHOT = {
    "segments": [{"address": 1 << 46, "total_size": 2 * MIB, "segment_pool_id": (0, 0)}],
    "device_traces": [[{"action": "alloc", "size": 512, "frames": [], "time_us": 1.5}]],
    "allocator_settings": {"expandable_segments": False, "last": None, "résumé": "ü"},
}

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary(max_size=300),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    | st.tuples(inner) | st.tuples(inner, inner) | st.lists(inner).map(tuple),
    max_leaves=30,
)  # fmt: skip


def write(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_snapshot_round_trip(tmp_path, protocol):
    path = write(tmp_path / "s.pickle", pickle.dumps(SNAPSHOT, protocol))
    assert hardware.read_snapshot(path) == SNAPSHOT
    assert hardware.read_snapshot(str(path)) == SNAPSHOT


@given(value=plain, protocol=st.integers(3, 5))
def test_plain_data_reads_as_pickle_reads_it(tmp_path_factory, value, protocol):
    path = tmp_path_factory.getbasetemp() / "plain.pickle"
    content = {"segments": [value, value], "device_traces": [], "more": value}
    write(path, pickle.dumps(content, protocol))
    assert hardware.read_snapshot(path) == content


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hostile-was-here",)


class Rebuilt:
    """Pickles by NEWOBJ and BUILD, without __reduce__ of its own."""

    def __init__(self):
        self.x = 1


def hostile_pickles():
    wrapped = dict(SNAPSHOT, extra=Hostile())
    yield "reduce", pickle.dumps(wrapped, 4)
    yield "reduce, protocol 2", pickle.dumps(wrapped, 2)
    yield "reduce, protocol 0", pickle.dumps(wrapped, 0)
    yield "object", pickle.dumps(dict(SNAPSHOT, extra=Rebuilt()), 4)
    yield "global", pickle.dumps(dict(SNAPSHOT, extra=os.system), 4)
    yield "inst", b"(S'touch hostile-was-here'\nios\nsystem\n."
    yield "persistent id", b"\x80\x04Ptouch\n."
    yield "extension", b"\x80\x04\x82\x01."


@pytest.mark.parametrize(
    "content", [c for _, c in hostile_pickles()], ids=[n for n, _ in hostile_pickles()]
)
def test_hostile_snapshot_is_refused_and_nothing_runs(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "s.pickle", content)
    with pytest.raises(InputError, match=r"refused 's.pickle': it holds more than plain data"):
        hardware.read_snapshot(path)
    assert [p.name for p in tmp_path.iterdir()] == ["s.pickle"]


@given(cut=st.integers(0, len(pickle.dumps(SNAPSHOT, 4)) - 1))
def test_truncated_snapshot_is_refused(tmp_path_factory, cut):
    path = tmp_path_factory.getbasetemp() / "cut.pickle"
    write(path, pickle.dumps(SNAPSHOT, 4)[:cut])
    with pytest.raises(InputError, match="refused"):
        hardware.read_snapshot(path)


@given(content=st.binary(max_size=200))
def test_noise_is_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "noise.pickle"
    for noise in (content, b"\x80\x04" + content, b"\x80\x04" + content + b"."):
        write(path, noise)
        with pytest.raises(InputError, match="refused"):
            hardware.read_snapshot(path)


@given(position=st.integers(0, len(pickle.dumps(SNAPSHOT, 4)) - 1), byte=st.integers(0, 255))
def test_damaged_snapshot_is_read_or_refused(tmp_path_factory, position, byte):
    content = bytearray(pickle.dumps(SNAPSHOT, 4))
    content[position] = byte
    path = write(tmp_path_factory.getbasetemp() / "damaged.pickle", bytes(content))
    with contextlib.suppress(InputError):  # any other exception fails
        assert isinstance(hardware.read_snapshot(path), dict)


def test_nested_deeply_does_not_crash(tmp_path):
    depth = 200_000
    nested_list = b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces" + b"]" * depth
    nested_list += b"a" * (depth - 1) + b"u."
    snapshot = hardware.read_snapshot(write(tmp_path / "deep.pickle", nested_list))
    assert len(snapshot["device_traces"]) == 1
    nested_key = b"\x80\x04})" + b"\x85" * depth + b"K\x01s."  # hashing it exhausts the C stack
    with pytest.raises(InputError, match="a dictionary key is a tuple"):
        hardware.read_snapshot(write(tmp_path / "key.pickle", nested_key))


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04Nr" + struct.pack("<I", 0xFFFFFFFF) + b".",  # a memo of four thousand million
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",  # a text of 2**60 bytes
        b"\x80\x04\x8b" + struct.pack("<I", 0x7FFFFFFF) + b".",  # a number of two GB
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",  # a frame longer than the file
    ],
    ids=["memo", "text", "number", "frame"],
)
def test_small_file_that_asks_for_gigabytes(tmp_path, content):
    with pytest.raises(InputError, match="refused"):
        hardware.read_snapshot(write(tmp_path / "greedy.pickle", content))


def test_large_snapshot_is_refused(tmp_path):
    path = write(tmp_path / "s.pickle", pickle.dumps(SNAPSHOT))
    size = path.stat().st_size
    assert hardware.read_snapshot(path, most_bytes=size) == SNAPSHOT
    with pytest.raises(InputError, match=r"refused 's.pickle': larger than"):
        hardware.read_snapshot(path, most_bytes=size - 1)


@pytest.mark.parametrize(
    "value", [[], 5, {}, {"segments": []}, {"segments": {}, "device_traces": []}]
)
def test_other_plain_pickles_are_no_snapshots(tmp_path, value):
    with pytest.raises(InputError, match="not a memory snapshot"):
        hardware.read_snapshot(write(tmp_path / "s.pickle", pickle.dumps(value)))


def test_missing_snapshot(tmp_path):
    with pytest.raises(InputError, match=r"cannot read the snapshot '.*none': No such file"):
        hardware.read_snapshot(tmp_path / "none")
    with pytest.raises(InputError, match="cannot read"):
        hardware.read_snapshot(tmp_path)


# --- cleaning up -------------------------------------------------------------------------------


def fail_holding(tensors, *, cause=None):
    tensor = torch.zeros(1000)
    tensors.append(weakref.ref(tensor))
    raise ValueError("no room") from cause


def caught(*args, **kwargs):
    try:
        fail_holding(*args, **kwargs)
    except ValueError as error:
        return error


def test_free_memory_forgets_the_last_exception(no_cuda):
    tensors = []
    error = caught(tensors)
    for name, value in [
        ("last_type", type(error)),
        ("last_value", error),
        ("last_traceback", error.__traceback__),
        ("last_exc", error),
    ]:
        setattr(sys, name, value)  # as the interpreter does after an uncaught error
    del error, value
    gc.collect()
    assert tensors[0]() is not None
    hardware.free_memory()
    assert tensors[0]() is None
    assert not hasattr(sys, "last_value")
    hardware.free_memory()  # nothing left to forget


_FRAGMENTED = """
import psutil, torch, labkit as lab
own = psutil.Process()
lab.free_memory()
clean = own.memory_info().rss
torch.empty(24 << 20, dtype=torch.uint8)  # from now on glibc takes blocks this large from its heap
held = [torch.ones(60_000, dtype=torch.uint8) for _ in range(4000)]
last = held.pop()
del held
kept = own.memory_info().rss - clean
lab.free_memory()
print(kept, own.memory_info().rss - clean)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")
def test_free_memory_hands_the_heap_back():
    """Blocks below one that lives stay with glibc, some hundred MiB of them."""
    done = subprocess.run([sys.executable, "-c", _FRAGMENTED], capture_output=True, text=True)
    kept, left = map(int, done.stdout.split())
    assert kept > 200e6
    assert left < 20e6


def test_free_memory_clears_jupyter(no_cuda, monkeypatch):
    tensors = []
    shell = types.SimpleNamespace(
        InteractiveTB=types.SimpleNamespace(tb=caught(tensors).__traceback__),
        last_execution_result=types.SimpleNamespace(error_in_exec=caught(tensors)),
    )
    module = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)
    hardware.free_memory()
    assert [tensor() for tensor in tensors] == [None, None]


def test_free_memory_with_ipython_imported_but_no_shell(no_cuda, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: None))
    hardware.free_memory()


def test_free_memory_empties_the_cache(fake_cuda):
    hardware.free_memory()
    assert fake_cuda.calls == [("empty_cache",)]


def test_clear_exception_follows_the_chain(no_cuda):
    tensors = []
    error = caught(tensors, cause=caught(tensors))
    error.__context__ = ExceptionGroup("several", [caught(tensors)])
    error.__cause__.__cause__ = error  # a ring must not hang
    assert all(tensor() is not None for tensor in tensors)
    hardware.clear_exception(error)
    gc.collect()
    assert [tensor() for tensor in tensors] == [None, None, None]
    assert error.__traceback__ is not None  # it can still be shown


def test_clear_exception_leaves_running_frames_alone():
    mine = torch.zeros(3)
    try:
        fail_holding([])
    except ValueError as error:
        hardware.clear_exception(error)
    assert mine.sum() == 0
