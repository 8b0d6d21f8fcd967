"""DeepSpeed: what is missing, its operators built once, its disk watched, host told from device."""

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import labkit as lab
from labkit import deepspeed_build, deepspeed_here, hardware
from labkit.deepspeed_here import Traffic
from labkit.memory import InputError

lack = deepspeed_build.missing()
# Where all are to run, as in continuous integration, they fail without it: nobody reads of skips.
needs_deepspeed = pytest.mark.skipif(bool(lack) and "CI" not in os.environ, reason=str(lack))

# --- what is missing -----------------------------------------------------------------------------


@pytest.fixture
def complete(monkeypatch):
    """Everything is there, as far as the questions go."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(deepspeed_build.shutil, "which", lambda name, path=None: f"/bin/{name}")
    monkeypatch.setattr(deepspeed_build, "_has_header", lambda compiler, header: True)
    monkeypatch.setattr(deepspeed_build, "can_lock", lambda nbytes: True)
    monkeypatch.setattr(deepspeed_build.sys, "platform", "linux")
    monkeypatch.setattr(hardware, "device", lambda: torch.device("cpu"))
    monkeypatch.delenv("CXX", raising=False)


def test_nothing_is_missing(complete):
    assert deepspeed_build.missing() is None
    assert deepspeed_build.missing(nvme=False) is None


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ("ninja", "`pip install ninja`"),
        ("c++", "there is no c++: on Debian and Ubuntu `apt-get install g++`"),
    ],
)
def test_a_missing_program_is_named(complete, monkeypatch, gone, says):
    which = deepspeed_build.shutil.which
    monkeypatch.setattr(
        deepspeed_build.shutil, "which", lambda name, path=None: name != gone and which(name)
    )
    assert says in deepspeed_build.missing()
    assert deepspeed_build.missing(nvme=False) is None  # host memory needs no compiler


def test_a_compiler_of_ones_own_is_asked_for(complete, monkeypatch):
    monkeypatch.setenv("CXX", "my-compiler")
    monkeypatch.setattr(deepspeed_build.shutil, "which", lambda name, path=None: name == "ninja")
    assert "there is no my-compiler" in deepspeed_build.missing()


@pytest.mark.parametrize(
    ("header", "package"), [("libaio.h", "libaio-dev"), ("Python.h", "python3-dev")]
)
def test_a_missing_header_is_named(complete, monkeypatch, header, package):
    monkeypatch.setattr(deepspeed_build, "_has_header", lambda compiler, name: name != header)
    assert header in deepspeed_build.missing()
    assert f"`apt-get install {package}`" in deepspeed_build.missing()


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_headers_are_looked_for_by_the_compiler():
    assert deepspeed_build._has_header("c++", "cstdio")
    assert not deepspeed_build._has_header("c++", "no_such_header.h")


def test_without_deepspeed_nothing_else_is_asked(complete, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-build-isolation deepspeed" in deepspeed_build.missing(nvme=False)
    with pytest.raises(InputError, match="DeepSpeed is not installed"):
        deepspeed_here.prepare()


def test_other_systems_have_no_disk_operator(complete, monkeypatch):
    monkeypatch.setattr(deepspeed_build.sys, "platform", "darwin")
    assert "on Linux only" in deepspeed_build.missing()
    assert deepspeed_build.missing(nvme=False) is None


def test_a_limit_of_locked_memory_is_named(complete, monkeypatch, traffic):
    monkeypatch.setattr(deepspeed_build, "can_lock", lambda nbytes: nbytes < 1 << 20)
    assert "`ulimit -l unlimited`" in deepspeed_build.missing()
    monkeypatch.setattr(deepspeed_here, "can_lock", lambda nbytes: nbytes < 1 << 20)
    with pytest.raises(OSError, match=r"wants to lock 4\.00 MiB more"):
        handle(traffic).new_cpu_locked_tensor(1 << 20, torch.zeros(1))


@pytest.mark.skipif(sys.platform != "linux", reason="as DeepSpeed")
def test_locking_is_tried():
    assert deepspeed_build.can_lock(4096)
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (8192, 8192))\n"
        "from labkit.deepspeed_build import can_lock; print(can_lock(4096), can_lock(1 << 20))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(lab.__file__).parents[1])}
    command = [sys.executable, "-c", code]
    if os.geteuid() == 0:  # whom no limit binds
        if not shutil.which("setpriv"):
            pytest.skip("needs setpriv to be bound by a limit")
        command = ["setpriv", "--bounding-set=-ipc_lock", *command]
    said = subprocess.run(command, env=env, capture_output=True, text=True)
    assert said.stdout.split() == ["True", "False"], said.stderr


def test_a_gpu_needs_the_toolkit(complete, monkeypatch):
    import torch.utils.cpp_extension as extension

    monkeypatch.setattr(hardware, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(extension, "CUDA_HOME", None)
    assert "nvcc" in deepspeed_build.missing()
    monkeypatch.setattr(extension, "CUDA_HOME", "/usr/local/cuda")
    assert deepspeed_build.missing() is None


def test_the_ninja_beside_python_comes_first():
    assert deepspeed_build._path().split(os.pathsep)[0] == str(Path(sys.executable).parent)


# --- building ------------------------------------------------------------------------------------


class Builder:
    NAME = "op"

    def __init__(self, origin):
        self.origin = origin

    def deepspeed_src_path(self, path):
        return str(self.origin / path)

    def sources(self):
        return ["csrc/aio/a.cpp", "csrc/pin_memory/b.cpp"]


def test_an_operator_becomes_one_file(tmp_path):
    for part in ("aio", "pin_memory"):
        (tmp_path / "csrc" / part).mkdir(parents=True)
    (tmp_path / "csrc/aio/shared.h").write_text("struct twice {};\n")
    for name in ("aio/a", "pin_memory/b"):
        text = f'#include "{tmp_path}/out/aio/shared.h"\nstatic const int c_block_size = 1;\n'
        (tmp_path / f"csrc/{name}.cpp").write_text(text)
    together = deepspeed_build._one_file(Builder(tmp_path), tmp_path / "out")
    text = together.read_text()
    assert text.count("#include") == 2
    assert "#define c_block_size c_block_size_0" in text
    assert "#define c_block_size c_block_size_1" in text
    assert (tmp_path / "out/aio/shared.h").read_text().startswith("#pragma once\n")
    if shutil.which("c++"):
        assert os.system(f"c++ -fsyntax-only {together}") == 0
    written = together.stat().st_mtime_ns
    assert deepspeed_build._one_file(Builder(tmp_path), tmp_path / "out") == together
    assert together.stat().st_mtime_ns == written  # or it would be compiled again


def test_versions_and_processors_are_kept_apart(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(deepspeed_build, "version", lambda name: "1.2")
    first = deepspeed_build.build_folder()
    assert first.is_relative_to(tmp_path)
    assert torch.__version__ in first.name
    monkeypatch.setattr(deepspeed_build, "_processor", lambda: ["Another (R) CPU"])
    second = deepspeed_build.build_folder()
    assert second != first
    assert second.name.endswith("Another_R_CPU")


def test_what_the_compiler_said_is_passed_on(monkeypatch, tmp_path):
    monkeypatch.setattr(deepspeed_build, "build_folder", lambda: tmp_path)
    monkeypatch.setattr(
        deepspeed_build.subprocess,
        "run",
        lambda *_, **__: SimpleNamespace(returncode=1, stderr="fatal error: stop"),
    )
    with pytest.raises(RuntimeError, match="could not be built: fatal error: stop"):
        deepspeed_build.build()
    for name in ("pin_memory", "async_io"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").touch()
    assert deepspeed_build.build() < 10  # nobody is asked


# --- watching the disk ---------------------------------------------------------------------------


class FakeHandle:
    """DeepSpeed's handle: what it is told to do it does when it is waited for."""

    def __init__(self, spoil=False, refuse=False):
        self.spoil, self.refuse, self.work = spoil, refuse, []

    def async_pwrite(self, buffer, path, offset):
        def write():
            with open(path, "r+b") as file:
                file.seek(offset)
                file.write(bytes(buffer.view(torch.uint8).tolist()))

        return self._queued(write)

    def async_pread(self, buffer, path, offset):
        def read():
            data = bytearray(Path(path).read_bytes()[offset : offset + buffer.nbytes])
            if not self.spoil:
                buffer.copy_(torch.frombuffer(data, dtype=torch.float32))

        return self._queued(read)

    def _queued(self, work):
        self.work += [] if self.refuse else [work]
        return -self.refuse

    def wait(self):
        assert self.work, "DeepSpeed's own would abort the process"
        done, self.work = self.work, []
        for each in done:
            each()
        return len(done)


@pytest.fixture
def traffic():
    return Traffic()


def handle(traffic, **options):
    return deepspeed_here.watched(FakeHandle, traffic)(**options)


def test_bytes_are_counted_and_come_back(traffic, tmp_path):
    one, path = handle(traffic), str(tmp_path / "x")
    assert one.async_pwrite(torch.arange(8.0), path, 0) == 0
    assert one.wait() == 1
    back = torch.zeros(8)
    assert one.async_pread(back, path, 0) == 0
    assert one.wait() == 1
    assert back.tolist() == list(range(8))
    assert (traffic.read_bytes, traffic.written_bytes) == (32, 32)
    assert traffic.waited_seconds > 0


def test_waiting_for_nothing_does_not_abort(traffic):
    assert handle(traffic).wait() == 0


def test_a_read_that_failed_is_noticed(traffic, tmp_path):
    """DeepSpeed's handle says that it was done, and the buffer holds what it held before."""
    path = str(tmp_path / "x")
    writer, reader = handle(traffic), handle(traffic, spoil=True)  # it has one for each
    writer.async_pwrite(torch.arange(8.0), path, 0)
    writer.wait()
    reader.async_pread(torch.zeros(8), path, 0)
    with pytest.raises(OSError, match="does not hold what was written there") as caught:
        reader.wait()
    assert caught.value.errno == errno.EIO


def test_parts_of_one_file_are_told_apart(traffic, tmp_path):
    path, one = str(tmp_path / "x"), handle(traffic)
    for offset, value in ((0, 1.0), (32, 2.0)):
        one.async_pwrite(torch.full((8,), value), path, offset)
    one.wait()
    for offset, value in ((0, 1.0), (32, 2.0)):
        one.async_pread(back := torch.zeros(8), path, offset)
        one.wait()
        assert back.tolist() == [value] * 8
        reader = handle(traffic, spoil=True)
        reader.async_pread(torch.zeros(8), path, offset)
        with pytest.raises(OSError, match="does not hold"):
            reader.wait()
    one.async_pwrite(torch.zeros(8), path, 16)  # what overlaps is no longer what was written first
    one.wait()
    one.async_pread(back := torch.zeros(8), path, 0)
    one.wait()
    assert back.tolist() == [1.0] * 4 + [0.0] * 4


def test_a_read_that_was_refused_is_not_compared(traffic, tmp_path):
    path, one = str(tmp_path / "x"), handle(traffic)
    one.async_pwrite(torch.arange(8.0), path, 0)
    one.wait()
    one.async_pread(back := torch.zeros(8), path, 0)
    one.refuse = True
    with pytest.raises(OSError, match="cannot be read past the page cache"):
        one.async_pread(torch.zeros(8), path, 0)
    assert back.tolist() == list(range(8))  # nothing is under way


def test_a_full_disk_stops_at_once_with_nothing_under_way(traffic, tmp_path, monkeypatch):
    def full(path, nbytes):
        raise OSError(errno.ENOSPC, "the disk is full")

    one = handle(traffic)
    one.async_pwrite(torch.zeros(8), str(tmp_path / "x"), 0)
    monkeypatch.setattr(deepspeed_here, "reserve", full)
    with pytest.raises(OSError, match="the disk is full"):
        one.async_pwrite(torch.zeros(8), str(tmp_path / "y"), 0)
    assert one.work == []
    assert (tmp_path / "x").stat().st_size == 32
    assert traffic.written_bytes == 32


def test_a_short_file_is_not_read(traffic, tmp_path):
    (tmp_path / "x").write_bytes(bytes(16))
    for name in ("x", "gone"):
        with pytest.raises(OSError, match="is gone, or shorter"):
            handle(traffic).async_pread(torch.zeros(8), str(tmp_path / name), 0)
    assert traffic.read_bytes == 0


def test_a_folder_without_direct_transfers_is_named(traffic, tmp_path):
    with pytest.raises(OSError, match="cannot be written past the page cache"):
        handle(traffic, refuse=True).async_pwrite(torch.zeros(8), str(tmp_path / "x"), 0)


# --- the log, and device or host -----------------------------------------------------------------


def test_the_log_has_what_each_phase_added(tmp_path, traffic):
    log = deepspeed_here.Log(tmp_path, traffic)
    with log.phase("forward"):
        traffic.read_bytes += 5
    with log.phase("step"):
        traffic.read_bytes += 7
        traffic.written_bytes += 1
        traffic.waited_seconds += 2.0
    log.write()
    with log.phase("forward"):
        pass
    log.write()
    first, second = deepspeed_here.read_log(tmp_path)
    assert (first["forward"]["read_bytes"], first["step"]["read_bytes"]) == (5, 7)
    assert (first["step"]["written_bytes"], first["step"]["waited_seconds"]) == (1, 2.0)
    assert second["forward"]["read_bytes"] == 0
    assert first["forward"]["seconds"] >= 0


def test_what_is_allocated_on_the_host_counts_there():
    kept = []

    def experiment(device):
        with deepspeed_here.on_host():
            kept.append(torch.ones(1000))
            torch.ones(3000).sum()  # gone when the block ends
        with deepspeed_here.on_host(False):
            kept.append(torch.ones(100))
        yield torch.ones(())

    run = lab.measure(experiment, steps=1)
    kept.clear()
    trace = run.trace
    assert trace.devices == ("cpu", "host")
    assert trace.peak("host").total_bytes in range(16000, 16100)
    assert trace.peak().total_bytes in range(400, 500)


def test_a_budget_is_the_devices_and_not_the_hosts():
    def experiment(device):
        with deepspeed_here.on_host():
            kept = torch.ones(2000)
        yield torch.ones(len(kept) // 2).sum()

    with lab.pretend(budget_bytes=6000):
        assert lab.measure(experiment, steps=1).oom is None


def test_without_a_tracker_nothing_happens():
    with deepspeed_here.on_host():
        assert torch.ones(3).sum() == 3


# --- the real engine -----------------------------------------------------------------------------

ENGINE = """
import json
import torch
import labkit as lab
from labkit import deepspeed_here

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])

def train(device, where="nvme", folder=""):
    traffic = deepspeed_here.prepare(nvme=where == "nvme")
    place = {"device": where, "nvme_path": folder}
    room = {"buffer_count": 4, "buffer_size": 300_000, "max_in_cpu": 0}
    adam = {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}
    engine = deepspeed_here.start(build(), {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {
            "stage": 3, "offload_param": place | room, "offload_optimizer": place,
            "reduce_bucket_size": 300_000, "sub_group_size": 300_000,
            "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}})
    log = deepspeed_here.Log(folder, traffic)
    while True:
        with log.phase("forward"):
            loss = engine(torch.ones(4, 512, device=device)).square().mean()
        with log.phase("backward"):
            engine.backward(loss)
        with log.phase("step"), deepspeed_here.on_host():
            engine.step()
        log.write()
        yield loss

def plain(device):
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    while True:
        loss = model(torch.ones(4, 512, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
"""


@needs_deepspeed
def test_zero_infinity_trains_as_plain_pytorch_does(tmp_path, monkeypatch):
    (tmp_path / "engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    import engine

    deepspeed_build.build()
    numbers = 8 * 512 * 512
    folder = tmp_path / "nvme"
    folder.mkdir()
    [run] = lab.launch(engine.train, ranks=1, steps=3, folder=str(folder))
    reference = lab.measure(engine.plain, steps=3)
    assert run.losses == pytest.approx(reference.losses, rel=1e-4)
    assert max(run.step_peaks_bytes) < 4 * numbers  # less than the weights alone
    [*_, last] = deepspeed_here.read_log(folder)
    # Weights are read forward and backward, gradients and state in the step; small biases stay.
    assert last["forward"]["read_bytes"] == last["backward"]["read_bytes"] == 4 * numbers
    assert 16 * numbers <= last["step"]["read_bytes"] <= 16.2 * numbers
    written = sum(phase["written_bytes"] for phase in last.values())
    assert 20 * numbers <= written <= 20.2 * numbers
    swapped = {name: n for name, n in lab.files(folder).items() if name.endswith(".swp")}
    assert 20 * numbers <= sum(swapped.values()) <= 20.2 * numbers
    assert json.loads((folder / "log.json").read_text())


@needs_deepspeed
def test_a_disk_that_fills_ends_the_job_with_a_sentence(tmp_path, monkeypatch):
    full = "raise OSError(28, f'the disk is full: {path}')"
    patch = f"\ndef reserve(path, nbytes):\n    {full}\ndeepspeed_here.reserve = reserve\n"
    (tmp_path / "engine_full.py").write_text(ENGINE + patch)
    monkeypatch.syspath_prepend(tmp_path)
    import engine_full

    deepspeed_build.build()
    with monkeypatch.context() as undone:
        undone.setattr(deepspeed_here, "reserve", deepspeed_here.reserve)
        with pytest.raises(lab.RankError, match="the disk is full"):
            lab.launch(engine_full.train, ranks=1, steps=2, folder=str(tmp_path))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(1024), torch.zeros(1024)),  # words that repeat
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),  # another order
        (torch.tensor([1, 2, 3], dtype=torch.uint8), torch.tensor([1, 2, 4], dtype=torch.uint8)),
    ],
    ids=["constant", "order", "tail"],
)
def test_contents_that_differ_are_told_apart(one, other):
    assert deepspeed_here._print_of(one) != deepspeed_here._print_of(other)
    assert deepspeed_here._print_of(one) == deepspeed_here._print_of(one.clone())
